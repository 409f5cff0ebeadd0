"""Ensemble and Stage: the two classes that every method implements."""

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.calling import call, logits_of
from plures.errors import PluresError
from plures.losses import Loss, class_axis, is_for_classes
from plures.prediction import Predictor
from plures.tensors import aliases, check_network, overwrite, own_tensors, tensors


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
        """What a person calls the stage: `member 2 prune`."""
        return self.phase if self.member is None else f"member {self.member} {self.phase}"


def due(plan: Sequence[Step]) -> Step | None:
    """Give the first step of a plan that is not committed; None where all are.

    >>> due([Step("train", 0, True), Step("train", 1, False)]).name
    'member 1 train'
    """
    return next((step for step in plan if not step.committed), None)


class RunsNetwork(Protocol):
    """Run the network of a stage in its place.

    output = engine.output(stage.network, inputs)  # None: call the network
    """

    def output(self, network: nn.Module, inputs: Any) -> Any:
        """Give what the network returns for a batch, or None where the network must be called itself."""

    def takes(self, network: nn.Module, images: int) -> bool:
        """Say whether it runs batches of so many images, on the CPU and in float32."""


class Stage(nn.Module):
    """Train one stage of an ensemble with any loop: it is a module that returns the loss.

        for stage in ensemble.stages():
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
            for inputs, targets in loader:
                optimizer.zero_grad()
                stage(inputs, targets).backward()
                optimizer.step()

    A stage is a copy: the ensemble does not change until the stage is committed. `DDP(stage)` and
    `torch.compile(stage)` work, because a stage does everything in its forward. `stage.loss` is the loss of one
    member's logits; a training loop may replace it for this stage.
    """

    def __init__(self, network: nn.Module, step: Step, loss: Loss, commit: Callable[["Stage"], None]) -> None:
        super().__init__()
        self.network = network
        self.step = step
        self.loss = loss
        self.committed = False
        self.engine: RunsNetwork | None = None  # a faster way to run the network, where there is one
        self._commit = commit
        self.train()

    @property
    def phase(self) -> str:
        """The kind of stage, for which a recipe has a number of epochs: `pretrain`, `prune`, `finetune`, `train`."""
        return self.step.phase

    @property
    def member(self) -> int | None:
        """The member that the stage trains, or None if all train together."""
        return self.step.member

    @property
    def name(self) -> str:
        """What a person calls the stage: `member 2 prune`."""
        return self.step.name

    def logits(self, inputs: Any) -> Tensor:
        """Run the network under training and return its logits."""
        output = None if self.engine is None else self.engine.output(self.network, inputs)
        return logits_of(call(self.network, inputs) if output is None else output)

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        logits = self.logits(inputs)
        check_classes(self.loss, logits, targets)
        return self.loss(logits, targets)

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
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if bool(tensor.isnan().any()) or (isinstance(tensor, nn.Parameter) and bool(tensor.isinf().any())):
                raise PluresError(
                    f"stage '{self.name}' has NaN or infinity in {name!r} and is not committed: train it again with a "
                    "lower learning rate or gradient clipping"
                )
        with torch.no_grad():
            self._commit(self)
        self.committed = True


def refuse_other_shared(stage: Stage, own: Mapping[str, Tensor], used: Mapping[str, Tensor]) -> None:
    """Refuse a stage that was trained with other shared tensors, by name, than the ensemble has.

    DDP gives every process the tensors of the first. What a stage does not write back must be the same everywhere from
    the start, or else each process would end with another ensemble. A moving average or a lower precision may round.
    """
    for name, tensor in own.items():
        theirs = used[name]
        ours = tensor.to(theirs)
        # 1e-7: float16 rounds by up to 3e-8, however small the number.
        rounded = ours.is_floating_point() and torch.allclose(ours, theirs, rtol=0.01, atol=1e-7)
        if not (ours.equal(theirs) or rounded):
            raise other_start(stage, f"the shared tensor {name!r}")


def other_start(stage: Stage, what: str) -> PluresError:
    """Say that a stage was trained with something that the ensemble of this process does not have."""
    return PluresError(
        f"stage '{stage.name}' was trained with {what} of another ensemble: call torch.manual_seed with one number "
        "and give the ensemble one seed in all processes, and do not change what is frozen"
    )


@dataclass(frozen=True)
class Given:
    """The network that an ensemble was made from: its class, its tensors and its size.

        ensemble.given.name, ensemble.given.nbytes

    `shapes` has all names of its tensors; `tied` maps each further name of a tied tensor to the first.
    """

    name: str
    shapes: dict[str, list[int]]
    tied: dict[str, str]
    nbytes: int

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """Describe a network."""
        shapes = {name: list(tensor.shape) for name, tensor in tensors(network).items()}
        nbytes = sum(tensor.nbytes for tensor in own_tensors(network).values())
        return cls(type(network).__name__, shapes, aliases(network), nbytes)


@dataclass(frozen=True)
class Stored:
    """What a file holds of an ensemble; its tensors are read one by one, when they are needed.

        stored.options["members"], stored.shapes["network.fc.weight"]
        weight = stored.read("network.fc.weight", [10, 512])

    `get` reads a tensor whatever its size; `read` first compares its shape. `members` names those to be read, where not
    all are.
    """

    options: Mapping[str, Any]
    state: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    get: Callable[[str], Tensor]
    members: Sequence[int] | None = None

    def check(self, name: str, expected: Sequence[int]) -> None:
        """Refuse a file whose options promise another shape than it holds, before anything of that size is made."""
        shape = self.shapes.get(name)
        if shape is None or list(shape) != list(expected):
            found = "missing" if shape is None else f"of shape {list(shape)}"
            raise PluresError(f"tensor {name!r} is {found}; expected {list(expected)}")

    def read(self, name: str, expected: Sequence[int]) -> Tensor:
        """Read a tensor, after its shape was compared with the one expected."""
        self.check(name, expected)
        return self.get(name)


class Ensemble(Predictor, ABC):
    """An ensemble of members, trained stage by stage.

        for stage in ensemble.stages():
            train(stage)
        logits = ensemble(images)  # [members, batch, classes]
        prediction = ensemble.predict(images)
        print(ensemble)  # members, sizes, and the size of the file

    An ensemble only predicts: its networks stay in eval mode, even after `train()`. Stages, which are copies, do the
    training. A method implements `plan`, `open`, `trained` and `forward`.
    """

    def __init__(self, network: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        check_network(network)
        self.loss = loss or F.cross_entropy
        self.given = Given.of(network)

    @abstractmethod
    def plan(self) -> list[Step]:
        """List all stages in order, with the committed ones marked."""

    @abstractmethod
    def open(self, step: Step) -> Stage:
        """Open the stage of one step of the plan."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""

    def checkout(self, member: int) -> nn.Module:
        """Return one trained member as a plain network of your own class, in eval mode.

            network = ensemble.checkout(2)

        Methods whose members live in one network have no plain member to return.
        """
        raise PluresError(f"the members of {type(self).__name__} live in one network: none can be checked out")

    def engine(self, kind: str | None = None, *, memory: int | None = None, fold: bool = True) -> Predictor:
        """Return what predicts the same in less time or memory: the ensemble itself, unless the method has engines.

            predictor = ensemble.engine()
            prediction = predictor.predict(images)

        `OrthogonalDropout.engine` explains the arguments.
        """
        if kind is not None:
            raise PluresError(f"{type(self).__name__} has no engines: leave out kind={kind!r}")
        return self

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values, so that the ensemble can be rebuilt from a file.

        Each argument is an attribute of the same name; a method that stores one in another form overrides this.
        """
        arguments = inspect.signature(type(self)).parameters.values()
        named = [one.name for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        return {name: getattr(self, name) for name in named if name not in ("network", "loss")}

    def stages(self) -> Iterator[Stage]:
        """Iterate over the stages that are not committed yet.

            for stage in ensemble.stages():
                train(stage, epochs[stage.phase])

        Moving on to the next stage commits the previous one. Leaving the loop early discards the open stage and keeps
        the committed ones; the next call continues there.
        """
        while (step := due(self.plan())) is not None:
            stage = self.open(step)
            yield stage
            if not stage.committed:
                stage.commit()

    def summary(self) -> str:
        """Describe the ensemble in a few lines: members, stages, sizes, and the size of its file.

        print(ensemble.summary())
        """
        calibrated = [] if self.calibration is None else [self.calibration.summary()]
        return "\n".join([self._heading(), *self._size_lines(), *calibrated])

    def _size_lines(self) -> list[str]:
        """Describe the size of the ensemble; a method with more details overrides this."""
        return [file_line(sum(tensor.nbytes for tensor in self.tensors().values()), self.given.nbytes)]

    def __repr__(self) -> str:
        return self.summary()

    def _heading(self) -> str:
        plan = self.plan()
        done = sum(step.committed for step in plan)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if name in SHOWN_OPTIONS)
        progress = "trained" if done == len(plan) else f"{done} of {len(plan)} stages trained"
        return f"{type(self).__name__} of {self.given.name} ({options}): {progress}"

    def _state(self) -> dict[str, Any]:
        """Return the state that a file needs beyond options and tensors, as JSON values."""
        return {}

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors for a file, with weights (not statistics) in the given dtype."""
        return {name: as_stored(tensor, dtype) for name, tensor in own_tensors(self).items()}

    @classmethod
    def _restore(cls, network: nn.Module, stored: Stored) -> Self:
        """Build an ensemble from the results of `options`, `_state` and `tensors`."""
        if stored.members is not None:
            raise PluresError(f"{cls.__name__} cannot be loaded in part; leave out members={list(stored.members)}")
        cls._check_before_building(network, stored)
        ensemble = cls(network, **stored.options)
        ensemble._fill(stored)
        return ensemble

    @classmethod
    def _check_before_building(cls, network: nn.Module, stored: Stored) -> None:
        """Check by the rules of the method, but not for a class derived from it whose constructor has other options."""
        knows = next(one for one in cls.__mro__ if "_check_stored" in vars(one))
        makes = next(one for one in cls.__mro__ if "__init__" in vars(one))
        if issubclass(knows, makes):
            cls._check_stored(network, stored)

    @classmethod
    def _check_stored(cls, network: nn.Module, stored: Stored) -> None:
        """Refuse a file before anything is built from its options, which may need more memory than there is."""

    def _fill(self, stored: Stored) -> None:
        """Copy tensors and progress from a file of an ensemble with the same network and options."""
        with torch.no_grad():
            for name, tensor in own_tensors(self).items():
                overwrite(tensor, stored.read(name, tensor.shape), name)


SHOWN_OPTIONS = ("members", "passes", "classifier", "granularity", "optimize_masks")


def check_classes(loss: Loss, logits: Tensor, targets: Tensor) -> None:
    """Refuse logits that a loss for classes cannot train on: of one class, which cost nothing, or of other places."""
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
    if len(shape) > 2 and list(targets.shape) not in (places, distributions):
        raise PluresError(
            f"the network returned {shape}, classes on axis {axis}, for targets of shape {list(targets.shape)}: give "
            f"one class for each place, {places}"
        )


def file_line(stored: float, plain: float) -> str:
    """Word the size of an ensemble's file.

    >>> file_line(1_080_000, 1_000_000)
    'file: about 1.1 MB, 1.08 x the plain network'
    """
    unit, size = ("MB", 1e6) if stored >= 1e6 else ("kB", 1e3)
    return f"file: about {stored / size:.1f} {unit}, {stored / plain if plain else math.nan:.2f} x the plain network"


def as_stored(tensor: Tensor, dtype: torch.dtype | None, like: Tensor | None = None) -> Tensor:
    """Bring a tensor into the form that a file holds: weights in the dtype asked for, vectors and buffers as they are.

    `like` is the tensor of the network that this one stands for, if it is another.
    """
    like = tensor if like is None else like
    weight = isinstance(like, nn.Parameter) and like.is_floating_point() and like.dim() > 1
    return tensor.detach().to(dtype) if dtype is not None and weight else tensor.detach()
