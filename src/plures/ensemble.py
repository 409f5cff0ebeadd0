"""Ensemble and Stage: the two names that every method implements."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.calling import call, logits_of
from plures.errors import PluresError
from plures.prediction import Predictor
from plures.tensors import aliases, own_tensors, refuse_unfinished, tensors

Loss = Callable[[Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """Name one stage of a method's plan before it is opened.

        [step.phase for step in ensemble.plan() if not step.committed]

    `member` is None where the members train together.
    """

    phase: str
    member: int | None
    committed: bool

    @property
    def name(self) -> str:
        """What a person calls the stage: `member 2 prune`."""
        return self.phase if self.member is None else f"member {self.member} {self.phase}"


class Stage(nn.Module):
    """Train one stage of an ensemble with any loop: it is a module that returns the loss.

        for stage in ensemble.stages():
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
            for inputs, targets in loader:
                optimizer.zero_grad()
                stage(inputs, targets).backward()
                optimizer.step()

    A stage is a copy: until it is committed the ensemble knows nothing of it. `DDP(stage)` and `torch.compile(stage)`
    work, because all that a stage does happens in its forward.
    """

    def __init__(self, network: nn.Module, step: Step, loss: Loss, commit: Callable[["Stage"], None]) -> None:
        super().__init__()
        self.network = network
        self.step = step
        self.loss = loss
        self.committed = False
        self._commit = commit
        self.train()

    @property
    def phase(self) -> str:
        """The kind of stage, which a recipe gives epochs to: `pretrain`, `prune`, `finetune`, `train`."""
        return self.step.phase

    @property
    def member(self) -> int | None:
        """The member that the stage trains, or None where all train together."""
        return self.step.member

    @property
    def name(self) -> str:
        """What a person calls the stage: `member 2 prune`."""
        return self.step.name

    def logits(self, inputs: Any) -> Tensor:
        """Run the network under training and return its logits."""
        return logits_of(call(self.network, inputs))

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self.logits(inputs), targets)

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Give an optimizer what the stage trains, with the weight decay that the method wants where.

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
        """Write the stage into its ensemble; going on to the next stage does this by itself."""
        if self.committed:
            raise PluresError(f"stage '{self.name}' is committed already")
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if bool(tensor.isnan().any()) or (isinstance(tensor, nn.Parameter) and bool(tensor.isinf().any())):
                raise PluresError(
                    f"stage '{self.name}' has NaN or infinity in {name!r} and is not committed: train it again with a "
                    "lower learning rate or gradient clipping"
                )
        with torch.no_grad():
            self._commit(self)
        self.committed = True


class Ensemble(Predictor, ABC):
    """Predict with several members at once; trained stage by stage.

        for stage in ensemble.stages():
            train(stage)
        logits = ensemble(images)  # [members, batch, classes]
        prediction = ensemble.predict(images)

    An ensemble only predicts: its networks stay in eval mode, whatever `train()` is told, and stages, which are copies,
    do the training. A method implements `plan`, `open` and `forward`.
    """

    def __init__(self, network: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise PluresError(f"network must be an nn.Module, not {type(network).__name__}")
        refuse_unfinished(network)
        self.loss: Loss = loss or F.cross_entropy
        self.shapes = {name: list(tensor.shape) for name, tensor in tensors(network).items()}
        self.tied = aliases(network)

    @abstractmethod
    def plan(self) -> list[Step]:
        """List all stages from the first to the last, with those committed marked."""

    @abstractmethod
    def open(self, step: Step) -> Stage:
        """Check out the stage of one step of the plan."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""

    def options(self) -> dict[str, Any]:
        """Give the constructor's arguments as JSON values, so that a file can build the ensemble again.

        Each is an attribute of its name; a method that keeps one in another form overrides this.
        """
        arguments = inspect.signature(type(self)).parameters.values()
        named = [one.name for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        return {name: getattr(self, name) for name in named if name not in ("network", "loss")}

    def stages(self) -> Iterator[Stage]:
        """Go through the stages that are not committed yet.

            for stage in ensemble.stages():
                train(stage, epochs[stage.phase])

        Going on to the next stage commits the last one. Leaving the loop early discards the open stage and keeps the
        committed ones; called again, the loop goes on where it was left.
        """
        while (step := next((step for step in self.plan() if not step.committed), None)) is not None:
            stage = self.open(step)
            yield stage
            if not stage.committed:
                stage.commit()

    def state(self) -> dict[str, Any]:
        """Give what a file must know beyond options and tensors, as JSON values."""
        return {}

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Give the tensors that a file holds, with weights (not statistics) in the dtype asked for."""
        return {name: as_stored(tensor, dtype) for name, tensor in own_tensors(self).items()}

    @classmethod
    def restore(
        cls,
        network: nn.Module,
        options: Mapping[str, Any],
        state: Mapping[str, Any],
        read: Callable[[str], Tensor],
        names: Sequence[str],
        members: Sequence[int] | None,
    ) -> Self:
        """Build an ensemble from what `options`, `state` and `tensors` gave; `read` gets one of the named tensors."""
        if members is not None:
            raise PluresError(f"{cls.__name__} cannot be loaded in part; leave out members={list(members)}")
        ensemble = cls(network, **options)
        with torch.no_grad():
            for name, tensor in own_tensors(ensemble).items():
                tensor.copy_(read(name))
        return ensemble


def as_stored(tensor: Tensor, dtype: torch.dtype | None, like: Tensor | None = None) -> Tensor:
    """Bring a tensor into the form that a file holds: weights in the dtype asked for, vectors and buffers as they are.

        as_stored(network.fc.weight, torch.bfloat16)

    `like` is the tensor of the network that this one stands for, if it is another.
    """
    like = tensor if like is None else like
    weight = isinstance(like, nn.Parameter) and like.is_floating_point() and like.dim() > 1
    return tensor.detach().to(dtype) if dtype is not None and weight else tensor.detach()
