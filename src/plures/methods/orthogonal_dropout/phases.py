"""The phases of Algorithm 1 in its order: what a stage sees, what it trains, and what the member owns after it.

For each member i: free_i is what no earlier member owns (Algorithm 1 starts from m_0 = 1: the first member has all).

    pretrain    train the free weights from a fresh start
    prune       freeze them, learn a score for each, and claim the member's share: the largest |scores|
    finetune    train what the member owns; then it can predict, and its weights never change again

Without optimised masks the weights are shared out at random beforehand, and `train` is the only phase.
"""

import logging
from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from plures.methods.orthogonal_dropout.masks import Keep, TopK, in_layout_of, mask_of
from plures.methods.orthogonal_dropout.partition import Partition
from plures.methods.orthogonal_dropout.roles import Role

log = logging.getLogger("plures")


class Phase(ABC):
    """One kind of stage.

    PHASES["prune"].mask(weight, partition, "fc.weight", member=2)
    """

    name: ClassVar[str]
    completes: ClassVar[bool] = False  # whether the member can predict after it

    def trains(self, role: Role) -> bool:
        """Say whether the tensors of a role are trained."""
        return role is not Role.SHARED

    @abstractmethod
    def mask(self, weight: Tensor, partition: Partition, name: str, member: int) -> nn.Module:
        """Make the mask under which the stage sees a split weight."""

    def claim(self, network: nn.Module, partition: Partition, member: int) -> None:
        """Give the member what the trained stage has chosen for it: nothing, unless the phase overrides it."""
        return


class Pretrain(Phase):
    """Train all free weights.

    Pretrain().mask(weight, partition, "fc.weight", member=0)
    """

    name = "pretrain"

    def mask(self, weight: Tensor, partition: Partition, name: str, member: int) -> nn.Module:
        """Keep what is free."""
        return Keep(in_layout_of(weight, partition.free(name)))

    def claim(self, network: nn.Module, partition: Partition, member: int) -> None:
        """Give the last member all that is left; the others choose when they prune."""
        if len(partition.claimed()) == partition.members - 1:
            log.info("member %d takes all the weights that are left: its prune stage is skipped", member)
            partition.claim(member, {name: partition.free(name) for name in partition.owners()})


class Prune(Phase):
    """Learn which of the frozen free weights the member keeps; norm layers and other private tensors train along.

    Prune(literal_gradient=False).mask(weight, partition, "fc.weight", member=0)
    """

    name = "prune"

    def __init__(self, literal_gradient: bool = False) -> None:
        self.literal_gradient = literal_gradient

    def trains(self, role: Role) -> bool:
        """Train private tensors, beside the scores."""
        return role is Role.PRIVATE

    def mask(self, weight: Tensor, partition: Partition, name: str, member: int) -> nn.Module:
        """Use the largest scores, which start as the weights themselves, divided by the largest."""
        free = partition.free(name)
        scores = weight.detach().float()
        if free.shape != scores.shape:  # one score per kernel: its length
            scores = scores.flatten(2).norm(dim=2).reshape(free.shape)
        largest = scores.abs().masked_fill(~free, 0.0).max().clamp_min(torch.finfo(torch.float32).tiny)
        return TopK(scores / largest, free, partition.budget(name, member), self.literal_gradient)

    def claim(self, network: nn.Module, partition: Partition, member: int) -> None:
        """Give the member the weights of the largest scores."""
        chosen = {name: cast(TopK, mask_of(network, name)).chosen() for name in partition.owners()}
        partition.claim(member, chosen)


class Finetune(Phase):
    """Train what the member owns.

    Finetune().mask(weight, partition, "fc.weight", member=0)
    """

    name = "finetune"
    completes = True

    def mask(self, weight: Tensor, partition: Partition, name: str, member: int) -> nn.Module:
        """Keep what the member owns."""
        return Keep(in_layout_of(weight, partition.owned(name, member)))


class Train(Finetune):
    """Train what the member was given at random: the only phase without optimised masks.

    Train().mask(weight, partition, "fc.weight", member=0)
    """

    name = "train"


PHASES: dict[str, type[Phase]] = {phase.name: phase for phase in (Pretrain, Prune, Finetune, Train)}
