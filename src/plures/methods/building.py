"""What methods share that train one network in one stage."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from plures.calling import Arguments, call_with, logits_of
from plures.checks import one_of, unknown
from plures.ensemble import Ensemble, Stored
from plures.errors import PluresError
from plures.losses import Loss
from plures.seeding import check_seed
from plures.stage import Stage, Step, check_classes
from plures.tensors import Layer, check_network, layers, moments, places, restart, shell, tensors

Init = Literal["given", "fresh"]
Reduction = Literal["mean", "sum"]


class OneStage(Ensemble):
    """Build a method whose members live in one network and are trained together, in one `train` stage.

    `built` is the network that the method made of the user's: the stage trains a copy of it. A method whose loss is not
    that of the network's logits overrides `_stage`. With `ready` the ensemble can predict before it is trained.
    """

    members: int = 1

    def __init__(
        self,
        network: nn.Module,
        loss: Loss | None,
        built: nn.Module,
        *,
        member: int | None = None,
        ready: bool = False,
    ) -> None:
        super().__init__(network, loss)
        self.network = built
        self._committed = False
        self._member = member
        self._untrained_too = ready
        self.eval()

    def plan(self) -> list[Step]:
        """List the one stage."""
        return [Step("train", self._member, self._committed)]

    def open(self, step: Step) -> Stage:
        """Check out the stage, a copy of the network to train."""
        if step not in self.plan() or step.committed:
            raise PluresError(f"stage '{step.name}' cannot be opened: use a step of plan() that is not committed")
        return self._stage(step)

    def _stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out."""
        return Stage(copy.deepcopy(self.network), step, self.loss, self._write)

    def _write(self, stage: Stage) -> None:
        """Restore what a stage has trained: what `Stage` calls to commit."""
        if self._committed:
            raise PluresError(f"stage '{stage.name}' is out of date: another one was committed before it")
        values = tensors(stage.network)
        for name, tensor in tensors(self.network).items():
            tensor.copy_(values[name])
        self._committed = True

    @property
    def trained(self) -> list[int]:
        """The members that can predict: all of them, or none."""
        return list(range(self.members)) if self._committed or self._untrained_too else []

    def _state(self) -> dict[str, Any]:
        """Return the state that a file needs beyond options and tensors, as JSON values."""
        return {"committed": self._committed}

    def _fill(self, stored: Stored) -> None:
        """Restore tensors and progress from a file."""
        if not isinstance(stored.state["committed"], bool):
            raise PluresError(f"the progress is stored as {stored.state['committed']!r}; expected true or false")
        super()._fill(stored)
        self._committed = stored.state["committed"]

    def get_extra_state(self) -> Tensor:
        """Put the progress into the state dict, as a tensor."""
        return torch.tensor(self._committed)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the progress from a state dict."""
        self._committed = bool(state)


class TogetherStage(Stage):
    """Train all members on every batch: the loss is the mean or the sum of their losses."""

    reduction: Reduction = "mean"

    def _loss_of(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(inputs)
        check_classes(self.loss, logits[0], targets)
        losses = torch.stack([self.loss(member, targets) for member in logits])
        self._heads = 1 if self.reduction == "mean" else len(logits)
        return losses.mean() if self.reduction == "mean" else losses.sum(), logits[0]


class ManyInOne(OneStage):
    """Build a method whose one network returns the logits of all members, [members, batch, classes].

    It trains on the mean of the losses of what the network returns, or with `reduction = "sum"` on their sum, unless
    the method overrides `_stage`.
    """

    _stage_class = TogetherStage
    reduction: Reduction = "mean"

    def __init__(self, network: nn.Module, loss: Loss | None, built: nn.Module) -> None:
        super().__init__(network, loss, built)
        self._places = places(built)

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
        """Make the stage that `open` checks out."""
        stage = self._stage_class(copy.deepcopy(self.network), step, self.loss, self._write)
        stage.reduction = self.reduction
        return stage


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


def ends(known: Mapping[str, Layer], first: str | None, last: str | None) -> tuple[str, str]:
    """Return the names of the layers that take the input and return the logits: the first, and the last Linear."""
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


def inside(layer: str, tensor: str) -> str:
    """Return the name that a file has for a tensor of a layer of the user's network; "" is the network itself.

    >>> inside("stem.conv", "weight"), inside("", "weight")
    ('network.network.stem.conv.weight', 'network.network.weight')
    """
    return ".".join(part for part in ("network.network", layer, tensor) if part)


def widths(layer: Layer) -> tuple[int, int]:
    """Return the input and the output width of a layer.

    >>> widths(nn.Conv2d(3, 8, 5))
    (3, 8)
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def rehearse(network: nn.Module, tiled: nn.Module, members: int, explain: str) -> None:
    """Try a rewritten network without computing anything, and refuse now what would fail in training.

    The input's shape is guessed from the layers. Where no guess suits the given network itself, nothing is learned, and
    a misfit shows with the first batch.
    """
    plain, tiled = _shadow(network).eval(), _shadow(tiled).eval()
    for shape in dict.fromkeys(_likely_inputs(network)):
        x = torch.zeros(3, *shape, device="meta", dtype=next(iter(layers_of(network).values())).weight.dtype)
        try:
            with torch.no_grad():
                expected = logits_of(plain(x)).shape
        except Exception:  # the guess was wrong, or the network cannot run without numbers
            continue
        try:
            with torch.no_grad():
                given = tiled(x).shape
        except Exception as error:
            raise PluresError(f"{explain}: {error}") from error
        if given != (members, *expected):
            raise PluresError(f"{explain}: the members gave {list(given)} instead of {[members, *expected]}")
        return


def _shadow(network: nn.Module) -> nn.Module:
    """Copy a network without its numbers: on the meta device only shapes are computed."""

    def shape_of(tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    own = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(tensor): shape_of(tensor) for tensor in own})


def _likely_inputs(network: nn.Module) -> Iterator[tuple[int, ...]]:
    for layer in layers_of(network).values():
        if isinstance(layer, nn.Linear):
            yield (layer.in_features,)
        else:
            for size in (32, 28, 64, 224):
                yield (layer.in_channels, *[size] * len(layer.kernel_size))
