"""Ensembles whose members train together, in one stage."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble, Loss, Stage, Step, logits_of
from plures.errors import PluresError
from plures.role import own_tensors


class JointEnsemble(Ensemble):
    """Train all members together: a method only has to make `self.network`, which returns [members, batch, classes].

        class Twins(JointEnsemble):
            def __init__(self, network, loss=None):
                super().__init__(network, loss)
                self.network = TwinNetwork(network)
                self.eval()

    There is one stage, `train`; its loss is the mean of the members' losses. A network in training may return fewer
    than all members along the first axis, as long as it returns that axis.
    """

    network: nn.Module

    def __init__(self, network: nn.Module, loss: Loss | None = None) -> None:
        super().__init__(network, loss)
        self.committed = False

    def plan(self) -> list[Step]:
        """List the one stage, marked when it is committed."""
        return [Step("train", None, self.committed)]

    def open(self, step: Step) -> Stage:
        """Check out the stage that trains all members."""
        return self.stage_type(copy.deepcopy(self.network), step, self.member_loss(), self._commit)

    @property
    def stage_type(self) -> type[Stage]:
        """The class of the stage, for a method that states weight-decay groups of its own."""
        return Stage

    def member_loss(self) -> Loss:
        """The loss of [members, batch, classes]: the mean of what each member loses."""
        return functools.partial(mean_over_members, self.loss)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        if not self.committed:
            raise PluresError("no member of this ensemble is trained: train its stages() or load a trained file")
        return logits_of(self.network(*args, **kwargs))

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

    def _commit(self, stage: Stage) -> None:
        if self.committed:
            raise PluresError(f"stage '{stage.name}' is out of date: all stages are committed")
        trained = own_tensors(stage.network)
        for name, tensor in own_tensors(self.network).items():
            tensor.copy_(trained[name])
        self.committed = True


def mean_over_members(loss: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Average a loss over the first axis of the logits, with the same targets for all.

    mean_over_members(F.cross_entropy, torch.zeros(5, 8, 10), torch.zeros(8, dtype=torch.long))
    """
    return torch.stack([loss(member, targets) for member in logits]).mean()


def check_members(members: object) -> None:
    """Refuse a number of members that is none.

    check_members(5)
    """
    if not isinstance(members, int) or isinstance(members, bool) or members < 1:
        raise PluresError(f"members={members!r}: give a whole number, 1 or more")
