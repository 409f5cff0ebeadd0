"""The phases of Algorithm 1 in its order: the mask of a stage, what it trains, and what the member then owns.

For each member i: free_i is what no earlier member owns (Algorithm 1 starts from m_0 = 1: the first member has all).

    pretrain    train the free weights from a fresh start
    prune       freeze them, learn a score for each, and claim the member's share: the largest |scores|
    finetune    train what the member owns; then it can predict, and its weights never change again

Without optimised masks the weights are shared out at random beforehand, and `train` is the only phase. So it is for
members that change a given network.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import Change, Keep, TopK, gathered, in_layout_of, mask_of, spread
from plures.methods.orthogonal_dropout.owners import Partition, SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.stage import Stage, other_start, refuse_other_shared
from plures.tensors import own_tensors

log = logging.getLogger("plures")
PHASES = ("pretrain", "prune", "finetune", "train")
COMPLETE = ("finetune", "train")  # after one of these a member can predict


def mask(phase: str, weight: Tensor, partition: Partition, name: str, member: int) -> nn.Module:
    """Make the mask under which a stage sees a split weight: what is free, what has the largest scores, what it owns.

    Scores start as the weights themselves, divided by the largest.
    """
    free = partition.free(name)
    if phase != "prune":
        kept = free if phase == "pretrain" else partition.owned(name, member)
        return Keep(in_layout_of(weight, spread(kept, weight)))
    scores = weight.detach().float()
    if free.shape != scores.shape:  # one score per kernel or block: its length
        scores = gathered(scores.square(), free.shape).sqrt()
    largest = scores.abs().masked_fill(~free, 0.0).max().clamp_min(torch.finfo(torch.float32).tiny)
    return TopK(scores / largest, free, partition.budget(name, member))


def change(given: Tensor, partition: Partition, name: str, member: int) -> Change:
    """Make the mask under which a stage changes a given weight where the member owns it."""
    return Change(given, spread(partition.owned(name, member), given))


def claim(phase: str, network: nn.Module, partition: Partition, member: int) -> None:
    """Assign to a member what its trained stage has chosen; the last member takes all that is left, without pruning."""
    if phase == "prune":
        partition.claim(member, {name: cast(TopK, mask_of(network, name)).chosen() for name in partition.owners()})
    elif phase == "pretrain" and len(partition.claimed()) == partition.members - 1:
        log.info("member %d takes all remaining weights: its prune stage is skipped", member)
        partition.claim(member, {name: partition.free(name) for name in partition.owners()})


def refuse_other_start(stage: Stage, split: SplitNetwork, values: Mapping[str, Tensor]) -> None:
    """Refuse a stage that was trained with other shared weights or masks than the ensemble has."""
    own, member = own_tensors(split.network), cast(int, stage.member)
    refuse_other_shared(stage, {name: own[name] for name in own if split.roles[name] is Role.SHARED}, values)
    for name in split.owners():
        used, same = mask_of(stage.network, name), True
        if isinstance(used, Keep):
            expected = cast(Keep, mask(stage.phase, own[name], split.partition, name, member))
            same = used.mask.equal(expected.mask.to(used.mask))
        elif isinstance(used, Change):
            before, blank = split.before(name, own[name]), torch.zeros_like(values[name])
            ours = change(before, split.partition, name, member)
            same = used.places.equal(ours.places.to(used.places))
            if same:  # then so should be the other places, which a forward may have written into
                rounded, theirs = ours(blank.to(before)).to(used.given.device), used(blank)
                kinds = (theirs.dtype, torch.bfloat16, torch.float16)  # which a stage may have trained in
                if not any(theirs.equal(rounded.to(kind).to(theirs)) for kind in kinds):
                    raise other_start(stage, f"the weights of {name!r} outside of its share")
        if not same:
            raise other_start(stage, f"the mask of {name!r}")


def statistics(network: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the running statistics of a network's batch norms among its values, by name."""
    parts = {name: name.rpartition(".") for name in values}
    norms = {name for name, (path, *_) in parts.items() if isinstance(network.get_submodule(path), _BatchNorm)}
    kept = [name for name in values if name in norms and parts[name][2].startswith(("running_", "num_batches_"))]
    return {name: values[name].detach().clone() for name in kept}


def settled(network: nn.Module, now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the running statistics of a stage's own batches: what is left in them from `before` is taken out.

    A stage changes the mask, so the statistics from before it belong to another network. With a momentum of 0.01 a
    third of them is left after a hundred steps.
    """
    result = {}
    for name, start in before.items():
        path, _, kind = name.rpartition(".")
        norm = cast(_BatchNorm, network.get_submodule(path))
        count = f"{path}.num_batches_tracked".lstrip(".")
        if kind == "num_batches_tracked" or count not in now or norm.momentum == 0:
            continue
        old, steps = int(before[count]), int(now[count]) - int(before[count])
        if steps > 0:
            left = old / (old + steps) if norm.momentum is None else (1 - norm.momentum) ** steps
            own = (now[name] - left * start.to(now[name])) / (1 - left)
            result[name] = own.clamp_min(0) if kind == "running_var" else own
    return result


class Progress:
    """Keep the phases that each member has behind it, in order."""

    def __init__(self, members: int) -> None:
        self.committed: list[list[str]] = [[] for _ in range(members)]

    @property
    def trained(self) -> list[int]:
        """The members that can predict."""
        return [member for member, done in enumerate(self.committed) if done and done[-1] in COMPLETE]

    @property
    def in_training(self) -> int | None:
        """The member that has some of its phases behind it and not all, if there is one."""
        return next((m for m, done in enumerate(self.committed) if done and done[-1] not in COMPLETE), None)

    def ahead(self, member: int, phases: list[str]) -> list[str]:
        """Return those of a member's phases that come after its committed ones."""
        done = self.committed[member]
        reached = PHASES.index(done[-1]) if done else -1
        return [phase for phase in phases if PHASES.index(phase) > reached]

    def take(self, committed: Sequence[Sequence[str]]) -> None:
        """Restore the phases of all members; refuse what no training can lead to."""
        if len(committed) != len(self.committed):
            raise PluresError(f"the progress of {len(committed)} members is stored, not {len(self.committed)}")
        for done in committed:
            if list(done) != [phase for phase in PHASES if phase in done]:
                raise PluresError(f"the progress of a member is stored as {done!r}")
        self.committed = [list(done) for done in committed]
