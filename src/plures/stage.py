"""Stage: the unit of training, a module that any loop can train, and what it knows of its training."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from plures.calling import arguments, call, logits_of
from plures.errors import PluresError
from plures.losses import Loss, class_axis, is_for_classes, name_of
from plures.tensors import ALL_FROZEN

FORGET = 0.1  # the share of the recent loss that each step replaces
FEW_STEPS = 10  # fewer teach a network hardly anything
NO_BETTER = 0.98  # of the loss of guessing: from here on, nothing was learned
ADVICE = {  # what torch says of a batch, and what to do
    "more than 1 value per channel": "a batch norm needs more than one sample in training: drop such a batch "
    "(drop_last=True), or take larger ones",
    "Target": "a target is not among the classes, which count from 0",
}
log = logging.getLogger("plures")


class Step(NamedTuple):
    """One stage of a method's plan, before it is opened.

        [step.phase for step in ensemble.plan() if not step.committed]

    `member` is None if the members train together.
    """

    phase: str
    member: int | None
    committed: bool

    @property
    def name(self) -> str:
        """The name of the stage for people: `member 2 prune`."""
        return self.phase if self.member is None else f"member {self.member} {self.phase}"


def due(plan: Sequence[Step]) -> Step | None:
    """Return the first step of a plan that is not committed, or None.

    >>> due([Step("train", 0, True), Step("train", 1, False)]).name
    'member 1 train'
    """
    return next((step for step in plan if not step.committed), None)


class TrainingRecord(nn.Module):
    """Count training steps and keep the recent loss, in tensors: nothing waits for a GPU, and compilers can follow."""

    steps: Tensor
    loss: Tensor
    chance: Tensor
    taint: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        for name in ("loss", "chance", "taint"):
            self.register_buffer(name, torch.zeros(()), persistent=False)

    @torch.no_grad()
    def add(self, loss: Tensor, chance: float | None, data: Sequence[Any]) -> None:
        """Record a step: its loss, the loss of guessing, and the tensors that it was trained on."""
        self.steps.add_(1)
        self.loss.lerp_(loss.detach().mean().to(self.loss), FORGET)
        if chance is not None:
            self.chance.fill_(chance)
        for tensor in data:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                # Zero, or NaN if the tensor has a NaN or an infinity.
                self.taint.add_(tensor.detach().sum(dtype=torch.float32).mul(0).to(self.taint))

    @property
    def tainted(self) -> bool:
        """Whether inputs or targets had NaN or infinity."""
        return bool(self.taint.isnan())

    def recent_loss(self) -> float:
        """Return the mean of the last losses, the latest with the most weight."""
        return float(self.loss) / (1 - (1 - FORGET) ** int(self.steps))


class Stage(nn.Module):
    """Train one stage of an ensemble with any loop: it is a module that returns the loss.

        for stage in ensemble.stages():
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
            for inputs, targets in loader:
                optimizer.zero_grad()
                stage(inputs, targets).backward()
                optimizer.step()

    A stage is a copy: the ensemble does not change until the stage is committed. `DDP(stage)` and
    `torch.compile(stage)` work, because a stage does everything in its forward.

    - `phase`: the kind of stage, for which a recipe has a number of epochs: `pretrain`, `prune`, `finetune`, `train`.
    - `member`: the member that the stage trains, or None if all train together.
    - `name`: the name of the stage for people: `member 2 prune`.
    - `loss`: the loss of one member's logits; a training loop may replace it for this stage.
    """

    def __init__(self, network: nn.Module, step: Step, loss: Loss, commit: Callable[["Stage"], None]) -> None:
        super().__init__()
        self.network = network
        self.step, self.loss = step, loss
        self.phase, self.member, self.name = step.phase, step.member, step.name
        self.committed = False
        self.engine: Any = None  # a faster way to run the network, if there is one: a TrainingEngine
        self.record = TrainingRecord()
        if (first := next(self.parameters(), None)) is not None:
            self.record.to(first.device)
        # Every process has its own record: DDP must not broadcast it in every step.
        self._ddp_params_and_buffers_to_ignore = [f"record.{name}" for name, _ in self.record.named_buffers()]
        self._commit = commit
        self.still: Sequence[nn.Module] = ()  # norm layers with statistics that members share: they stay in eval mode
        self.pace = 1.0  # how many times the learning rate of a plain network it needs
        self.heads = 1  # how many losses are added up: a mean divides by it
        self._resumed = False
        self.register_load_state_dict_post_hook(_note_resumption)  # type: ignore[no-untyped-call]
        self._start = {name: None for name, one in self.named_parameters() if one.requires_grad}
        if not self._start:
            raise PluresError(ALL_FROZEN)
        self._start = self._sums()
        self.train()

    @property
    def touched(self) -> bool:
        """Whether the stage has been trained: it made a step, or its parameters have changed."""
        return bool(self.record.steps) or self._sums() != self._start

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the norm layers whose statistics members share."""
        super().train(mode)
        for norm in self.still:
            norm.eval()
        return self

    def logits(self, inputs: Any) -> Tensor:
        """Run the network under training and return its logits."""
        output = None if self.engine is None else self.engine.output(self.network, inputs)
        return logits_of(call(self.network, inputs) if output is None else output)

    def outputs(self, inputs: Any) -> Tensor:
        """Run the network and return the logits of the members that it trains, [members, batch, ...]."""
        return self.logits(inputs)[None]

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        args, kwargs = arguments(inputs)
        _check_batch([*args, *kwargs.values()], targets)
        try:
            loss, logits = self._loss_of(inputs, targets)
        except (ValueError, IndexError) as error:
            for words, advice in ADVICE.items():
                if words in str(error):
                    raise PluresError(f"{advice} ({error})") from error
            raise
        if self.training and torch.is_grad_enabled():
            plain = unwrapped(self.loss)
            known = is_for_classes(plain) and logits.dim() > 1
            chance = self.heads * math.log(logits.shape[class_axis(plain)]) if known else None
            self.record.add(loss, chance, [*args, *kwargs.values(), targets])
        return loss

    def _loss_of(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the logits of one member; a method with another loss overrides this."""
        logits = self.logits(inputs)
        return self.member_loss(logits, targets), logits

    def member_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the logits of one member, which must be one number."""
        check_classes(unwrapped(self.loss), logits, targets)
        loss = self.loss(logits, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PluresError(
                f"the loss {name_of(self.loss)} returned {found}: return one number as a tensor, such as the mean over "
                "the batch (reduction='mean')"
            )
        return loss

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer, with weight decay only where the method needs it.

        torch.optim.SGD(stage.parameter_groups(weight_decay=1e-4), lr=0.1)
        """
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": trainable, "weight_decay": weight_decay}]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy what trains, for a moving average for example; the copy commits into the same ensemble."""
        copied = self.__class__.__new__(self.__class__)
        memo |= {id(self): copied, id(self._commit): self._commit, id(self.loss): self.loss}
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def commit(self) -> None:
        """Write the stage into its ensemble; moving on to the next stage does this automatically."""
        if self.committed:
            raise PluresError(f"stage '{self.name}' is already committed")
        for name, tensor in (*self.network.named_parameters(), *self.network.named_buffers()):
            if bool(tensor.isnan().any()) or (tensor.requires_grad and bool(tensor.isinf().any())):
                lower = "train it again with a lower learning rate or gradient clipping"
                clean = "it was trained on inputs or targets with NaN or infinity: clean the data, and train it again"
                raise PluresError(
                    f"stage '{self.name}' has NaN or infinity in 'network.{name}' and is not committed: "
                    f"{clean if self.record.tainted else lower}"
                )
        with torch.no_grad():
            self._commit(self)
        self.committed = True
        self._warn_if_untrained()

    def _warn_if_untrained(self) -> None:
        steps, chance = int(self.record.steps), float(self.record.chance)
        if self._sums() == self._start:
            unchanged = f", but its parameters did not change in {steps} steps: call optimizer.step()"
            log.warning(f"stage '{self.name}' is committed{unchanged if steps else ' without a training step'}")
        elif 0 < steps < FEW_STEPS and not self._resumed:
            log.warning(f"stage '{self.name}' is committed after only {steps} training step{'s' * (steps > 1)}")
        elif steps and chance and (loss := self.record.recent_loss()) > NO_BETTER * chance:
            guess = chance / self.heads  # of one member: the loss of several is their sum
            log.warning(
                f"stage '{self.name}' ends with a loss of {loss / self.heads:.2f}, no better than chance ({guess:.2f} "
                f"for {round(math.exp(guess))} classes): train it for more steps, or with another learning rate"
            )

    def _sums(self) -> dict[str, Any]:
        """Sum up each parameter that the stage trains: training changes some of the sums."""
        known = dict(self.named_parameters())
        sums = {name: known[name].detach().sum(dtype=torch.float64) for name in self._start if name in known}
        return {name: None if one.is_meta else one.item() for name, one in sums.items()}


def _check_batch(inputs: Sequence[Any], targets: Any) -> None:
    for one in (*inputs, targets):
        if isinstance(one, np.ndarray):
            raise PluresError("the batch has a numpy array: convert it with torch.from_numpy")
    if not isinstance(targets, Tensor):
        raise PluresError(f"the targets are {type(targets).__name__}: give a tensor")
    if not targets.numel():
        raise PluresError("the batch is empty: a step needs at least one sample")


def _note_resumption(stage: Stage, _incompatible: object) -> None:
    stage._resumed = True


def unwrapped(loss: Loss) -> Loss:
    """Return the loss that another one calls with more arguments."""
    return getattr(loss, "func", loss)


def refuse_other_shared(stage: Stage, own: Mapping[str, Tensor], used: Mapping[str, Tensor]) -> None:
    """Refuse a stage that was trained with other shared tensors, by name, than the ensemble has.

    DDP gives every process the tensors of the first. What a stage does not write back must be the same everywhere from
    the start, or else each process would end with another ensemble. A moving average or a lower precision may round.
    """
    for name, tensor in own.items():
        theirs = used[name]
        ours = tensor.to(theirs)
        # 1e-7: float16 rounds by up to 3e-8, however small the number.
        if ours.equal(theirs):
            continue
        if not (ours.is_floating_point() and torch.allclose(ours, theirs, rtol=0.01, atol=1e-7)):
            raise other_start(stage, f"the shared tensor {name!r}")


def other_start(stage: Stage, what: str) -> PluresError:
    """Return the error of a stage that was trained with something that the ensemble of this process does not have."""
    return PluresError(
        f"stage '{stage.name}' was trained with {what} of another ensemble: call torch.manual_seed with one number "
        "and give the ensemble one seed in all processes, and do not change what is frozen"
    )


def check_classes(loss: Loss, logits: Tensor, targets: Tensor) -> None:
    """Check that a loss for classes can train on logits: with two classes or more, and one target for each place."""
    if not is_for_classes(loss) or logits.dim() < 2:
        return
    axis, shape = class_axis(loss), list(logits.shape)
    if not -len(shape) <= axis < len(shape):
        raise PluresError(f"the network returned {shape}, which has no axis {axis}: name another class_axis")
    if shape[axis] == 1:
        raise PluresError(
            f"the network returned {shape}: one number per sample, and its cross-entropy is always zero: "
            "return one logit per class (two for a yes-no question), or give another loss, as for regression: loss=..."
        )
    places = [*shape[: axis % len(shape)], *shape[axis % len(shape) + 1 :]]
    distributions = [places[0], shape[axis], *places[1:]]
    if list(targets.shape) == places and (targets.is_floating_point() or targets.dtype == torch.bool):
        raise PluresError(f"the targets are {targets.dtype}; classes are whole numbers: convert them with .long()")
    if list(targets.shape) not in (places, distributions):
        raise PluresError(
            f"the network returned {shape}, classes on axis {axis}, for targets of shape {list(targets.shape)}: give "
            f"one class for each place, {places}"
        )
