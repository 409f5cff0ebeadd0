"""What the methods have in common that train one network in one stage."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble, Loss, Stage, Step
from plures.errors import PluresError
from plures.initial import moments, restart
from plures.layers import check_network
from plures.rewrite import mean_over_members
from plures.role import tensors

Init = Literal["given", "fresh"]


class OneStage(Ensemble):
    """Build a method whose members live in one network and are trained together, in one `train` stage.

        class Single(OneStage):
            def __init__(self, network, loss=None):
                super().__init__(network, loss, copy.deepcopy(network))

            def forward(self, *args, **kwargs):
                self.require_trained()
                return logits_of(self.network(*args, **kwargs)).unsqueeze(0)

    `built` is the network that the method made of the user's: the stage trains a copy of it. A method whose loss is not
    that of the network's logits overrides `stage`. With `ready` the ensemble can predict before it is trained.
    """

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
        self.committed = False
        self._member = member
        self._ready = ready
        self.eval()

    def plan(self) -> list[Step]:
        """List the one stage."""
        return [Step("train", self._member, self.committed)]

    def open(self, step: Step) -> Stage:
        """Check out the stage, a copy of the network to train."""
        if step not in self.plan() or step.committed:
            raise PluresError(f"stage '{step.name}' cannot be opened: take a step of plan() that is not committed")
        return self.stage(step)

    def stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out."""
        return Stage(copy.deepcopy(self.network), step, self.loss, self.write)

    def write(self, stage: Stage) -> None:
        """Take over what a stage has trained: what `Stage` calls to commit."""
        if self.committed:
            raise PluresError(f"stage '{stage.name}' is out of date: another one was committed before it")
        values = tensors(stage.network)
        for name, tensor in tensors(self.network).items():
            tensor.copy_(values[name])
        self.committed = True

    def require_trained(self) -> None:
        """Refuse to predict with random weights."""
        if not (self.committed or self._ready):
            raise PluresError("this ensemble is not trained: train its stages() or load a trained file")

    def state(self) -> dict[str, Any]:
        """Give what a file must know beyond options and tensors, as JSON values."""
        return {"committed": self.committed}

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
        ensemble = super().restore(network, options, state, read, names, members)
        ensemble.committed = bool(state["committed"])
        return ensemble

    def get_extra_state(self) -> Tensor:
        """Put the progress into the state dict, as a tensor."""
        return torch.tensor(self.committed)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the progress from a state dict."""
        self.committed = bool(state)


class ManyInOne(OneStage):
    """Build a method whose one network returns the logits of all members, [members, batch, classes].

        class Twice(ManyInOne):
            def __init__(self, network, loss=None):
                super().__init__(network, loss, Tiled(copy.deepcopy(network), members=2, rows=Rows()))

    It trains on the mean of the losses of what the network returns, unless the method overrides `stage`.
    """

    stage_class = Stage

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        self.require_trained()
        logits: Tensor = self.network(*args, **kwargs)
        return logits

    def stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out."""
        loss = functools.partial(mean_over_members, self.loss)
        return self.stage_class(copy.deepcopy(self.network), step, loss, self.write)


def started(network: nn.Module, init: Init, seed: int) -> nn.Module:
    """Copy a network as a method shall start from it: with the weights it has, or with fresh ones.

    built = started(network, "fresh", seed=0)
    """
    check_network(network)
    if init not in get_args(Init):
        raise PluresError(f"init={init!r}; use one of {', '.join(get_args(Init))}")
    result = copy.deepcopy(network)
    if init == "fresh":
        known = moments(network)
        restart(result, known, known, seed, "member", 0)
    return result
