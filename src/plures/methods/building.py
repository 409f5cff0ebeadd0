"""What methods share: stages in any order, all members in one network, and layers that know whose rows they see."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_in
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from plures.calling import Arguments, batch_of, call_with, each_batched, logits_of
from plures.checks import one_of, unknown
from plures.ensemble import Ensemble, Stored
from plures.errors import PluresError
from plures.losses import Loss, averages_rows
from plures.seeding import check_seed
from plures.stage import Stage, Step, check_classes, unwrapped
from plures.tensors import Layer, check_network, layers, moments, places, restart, shell, tensors

Init = Literal["given", "fresh"]
Reduction = Literal["mean", "sum"]
# Options of earlier versions, at the values that their methods now always have.
GONE = (
    *(("factors", "gaussian"), ("private_norm", False), ("input_repetition", 0.0), ("every_mask", False)),
    *(("granularity", "element"), ("gamma", 1), ("roles", None)),
)


class AnyOrder(Ensemble):
    """Build a method of `train` stages that can be trained in any order: one for each of `trains`, a member or None."""

    def __init__(self, network: nn.Module, loss: Loss | None, trains: Sequence[int | None]) -> None:
        super().__init__(network, loss)
        self._trains = trains
        self._committed = [False] * len(trains)

    def plan(self) -> list[Step]:
        """List all stages, with the committed ones marked."""
        return [Step("train", member, done) for member, done in zip(self._trains, self._committed, strict=True)]

    def open(self, step: Step) -> Stage:
        """Open the stage of one step of the plan, in any order."""
        if step not in self.plan() or step.committed:
            raise PluresError(f"stage '{step.name}' cannot be opened: use a step of plan() that is not committed")
        return self._stage(step)

    @abstractmethod
    def _stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out, a copy to train."""

    @abstractmethod
    def _take(self, stage: Stage) -> None:
        """Copy what a stage has trained into the ensemble."""

    def _write(self, stage: Stage) -> None:
        """Commit a stage: `Stage` calls it."""
        place = self._trains.index(stage.member)
        if self._committed[place]:
            raise PluresError(f"stage '{stage.name}' is out of date: another one was committed before it")
        self._take(stage)
        self._committed[place] = True

    def _state(self) -> dict[str, Any]:
        return {"committed": self._committed if len(self._trains) > 1 else self._committed[0]}

    @classmethod
    def _restore(cls, network: nn.Module, stored: Stored) -> Self:
        options = {name: value for name, value in stored.options.items() if (name, value) not in GONE}
        return super()._restore(network, replace_in(stored, options=options))

    def _take_state(self, state: Mapping[str, Any]) -> None:
        committed = state["committed"]
        committed = committed if isinstance(committed, list) else [committed]  # of one stage
        if list(map(type, committed)) != [bool] * len(self._trains):
            raise PluresError(f"the progress of {len(self._trains)} stages is stored as {committed!r}")
        self._committed = list(committed)


class OneStage(AnyOrder):
    """Build a method whose members live in one network and are trained together, in one `train` stage.

    `built` is the network that the method made of the user's: the stage trains a copy of it. A method whose loss is not
    that of the network's logits overrides `_stage`. With `ready` the ensemble can predict before it is trained.
    """

    members: int = 1

    def __init__(
        self, network: nn.Module, loss: Loss | None, built: nn.Module, *, member: int | None = None, ready: bool = False
    ) -> None:
        super().__init__(network, loss, [member])
        self.network = built
        self._places = places(built)
        self._untrained_too = ready
        self.eval()

    def _stage(self, step: Step) -> Stage:
        return Stage(copy.deepcopy(self.network), step, self.loss, self._write)

    def _take(self, stage: Stage) -> None:
        values = tensors(stage.network)
        for name, tensor in tensors(self.network).items():
            tensor.copy_(values[name])

    @property
    def trained(self) -> list[int]:
        """The members that can predict: all of them, or none."""
        return list(range(self.members)) if all(self._committed) or self._untrained_too else []


class TogetherStage(Stage):
    """Train all members on every batch: the loss is the mean or the sum of their losses."""

    reduction: Reduction = "mean"

    def outputs(self, inputs: Any) -> Tensor:
        """Run the network and return the logits of all members, [members, batch, ...]."""
        return self.logits(inputs)

    def _loss_of(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(inputs)
        check_classes(unwrapped(self.loss), logits[0], targets)
        self.heads = 1 if self.reduction == "mean" else len(logits)
        if averages_rows(unwrapped(self.loss)):  # one call for all: a small network's step is short
            mean = self.loss(logits.flatten(0, 1), targets.repeat(len(logits), *[1] * (targets.dim() - 1)))
        else:
            mean = torch.stack([self.member_loss(member, targets) for member in logits]).mean()
        return mean * self.heads, logits[0]


class ManyInOne(OneStage):
    """Build a method whose one network returns the logits of all members, [members, batch, classes].

    It trains on the mean of the losses of what the network returns, or with `reduction = "sum"` on their sum, unless
    the method overrides `_stage`.
    """

    _stage_class = TogetherStage
    reduction: Reduction = "mean"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        self._all_ready()
        if torch.compiler.is_compiling():
            logits: Tensor = self.network(*args, **kwargs)
            return logits
        # On a structure of its own: while the layers run, they know whose row is whose in this batch.
        values = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        at, inputs = self._places, Arguments(args, kwargs)
        return self._lender.lend(  # type: ignore[no-any-return]
            self, lambda: shell(self.network), lambda structure: call_with(structure, values, at, inputs)
        )

    def _stage(self, step: Step) -> Stage:
        stage = self._stage_class(copy.deepcopy(self.network), step, self.loss, self._write)
        stage.reduction = self.reduction
        return stage


class Rows:
    """The member of each row of the running batch; one object, shared by all layers of a network.

    `Tiled` writes it before the network runs. A layer may see several rows (tokens, frames) for each row of the batch.
    """

    def __init__(self) -> None:
        self.count = 0
        self.owner: Tensor | None = None  # of each row, unless all have equally many, member after member

    def per_row(self, x: Tensor) -> int:
        """Count the rows of a layer's input for each row of the batch; refuse an input that is not a batch."""
        if not self.count or len(x) % self.count:
            raise PluresError(
                f"a layer was given a tensor of shape {tuple(x.shape)} in a batch of {self.count} rows: its first axis "
                "must be the batch, because it holds the members; change the network (batch_first) or the method"
            )
        return len(x) // self.count

    def spread(self, table: Tensor, x: Tensor, layer: nn.Module) -> Tensor:
        """Shape [members, width] so that each row of a layer's input or output meets what its member has."""
        each = self.per_row(x)
        if self.owner is None:
            rows = table.unsqueeze(1).expand(-1, len(x) // len(table), -1).flatten(0, 1)
        else:
            rows = table[self.owner].repeat_interleave(each, 0)
        between = [1] * (x.dim() - 2)
        shape = [*between, table.shape[1]] if isinstance(layer, nn.Linear) else [table.shape[1], *between]
        return rows.reshape(len(x), *shape).to(x.dtype)


class Tiled(nn.Module):
    """Run a rewritten network on each sample once per member; return [members, batch, classes].

    A method copies the user's network and puts hooks on its layers, or other layers in their place (`replace`). The
    network's own code only sees a longer batch, so it may add, flatten, pool and concatenate as it likes. Hooks are
    bound methods, not closures: a copy of the network has hooks that belong to the copy.
    The tiled batch has all samples of the first member, then all of the second, and so on; with `interleave` it has
    all members of the first sample, then all of the second.
    """

    def __init__(self, network: nn.Module, members: int, rows: Rows, *, interleave: bool = False) -> None:
        super().__init__()
        self.network, self.rows = network, rows
        self.members, self.interleave = members, interleave

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        batch = len(batched(args, kwargs))

        def tile(value: Tensor) -> Tensor:
            if self.interleave:
                return value.repeat_interleave(self.members, 0)
            return value.repeat(self.members, *[1] * (value.dim() - 1))

        self.rows.count = batch * self.members
        self.rows.owner = None
        args, kwargs = each_batched(Arguments(args, kwargs), tile)
        logits = run(self.network, self.rows, *args, **kwargs)
        if self.interleave:
            return torch.unflatten(logits, 0, (batch, self.members)).transpose(0, 1)
        return torch.unflatten(logits, 0, (self.members, batch))


def run(network: nn.Module, rows: Rows, *args: Any, **kwargs: Any) -> Tensor:
    """Run a rewritten network and return its logits, one row for each row of the batch."""
    logits = logits_of(network(*args, **kwargs))
    if logits.dim() == 0 or len(logits) != rows.count:
        raise PluresError(
            f"the network returned logits of shape {tuple(logits.shape)} for a batch of {rows.count} rows; expected "
            "one row of logits for each"
        )
    return logits


def batched(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Find the tensor whose first axis is the batch in what a network is called with: the first one there is."""
    found = batch_of(Arguments(args, dict(kwargs)))
    if found is None:
        raise PluresError("the network was called without a tensor that has a batch axis")
    return found


def replace(network: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace some modules by others, in place, and return the network."""
    if network in others:
        return others[network]
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module in others:
            network.set_submodule(name, others[module])
    return network


def started(network: nn.Module, init: Init, seed: int, member: int = 0) -> nn.Module:
    """Copy a network as the start of a member: with the weights it has, or with fresh ones."""
    check_network(network)
    seed = check_seed(seed)
    one_of("init", init, get_args(Init))
    result = copy.deepcopy(network)
    if init == "fresh":
        known = moments(network)
        restart(result, known, known, seed, "member", member)
    return result


def ends(network: nn.Module, first: str | None, last: str | None) -> tuple[str, str]:
    """Return the names of the layers that take the input and return the logits: the first, and the last Linear."""
    known = layers_of(network)
    linear = [name for name, layer in known.items() if isinstance(layer, nn.Linear)]
    first = next(iter(known)) if first is None else first
    last = (linear or list(known))[-1] if last is None else last
    for end, name in (("first", first), ("last", last)):
        if name not in known:
            raise unknown(f"Linear or convolution for {end}=", name, known)
    return first, last


def layers_of(network: nn.Module) -> dict[str, Layer]:
    """List the layers that members can differ in, by name, or say that there are none."""
    found = layers(network)
    if not found:
        raise PluresError(f"{type(network).__name__} has no Linear or convolution layer in which members could differ")
    return found


def widths(layer: Layer) -> tuple[int, int]:
    """Return the input and the output width of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels
