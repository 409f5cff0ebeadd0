"""The two masks that a stage trains under, as `torch.nn.utils.parametrize` parametrizations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from plures.errors import PluresError


class Keep(nn.Module):
    """Use the weights where the mask is true, and zero elsewhere.

        parametrize.register_parametrization(layer, "weight", Keep(free))

    The mask broadcasts against the weight. Nothing flows back to the weights outside of it.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        # Floating, because a product of floats is several times faster on a CPU than a choice by booleans. Not in the
        # state dict, because whoever opens the stage again makes the same mask.
        self.register_buffer("mask", mask.to(torch.float32, memory_format=torch.preserve_format), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight."""
        return weight * self.mask.to(weight.dtype)


def in_layout_of(weight: Tensor, mask: Tensor) -> Tensor:
    """Lay a mask of a weight's shape out in memory as the weight is: the product of two layouts is many times slower.

    Keep(in_layout_of(weight, free))
    """
    if mask.shape != weight.shape:
        return mask
    return torch.empty_like(weight, dtype=mask.dtype).copy_(mask)


class TopK(nn.Module):
    """Use exactly `count` of the free weights, those of largest |score|, and learn the scores.

        mask = TopK(weight / weight.abs().max(), free, count=1000)
        parametrize.register_parametrization(layer, "weight", mask)

    The mask is binary to the bit; its gradient passes straight through to |score|. With `literal=True` it passes to
    the score itself, as the paper's appendix has it: negative scores then move the wrong way.
    """

    free: Tensor
    handicap: Tensor

    def __init__(self, scores: Tensor, free: Tensor, count: int, literal: bool = False) -> None:
        super().__init__()
        if scores.shape != free.shape or free.dtype != torch.bool:
            raise PluresError(f"free must be a boolean mask of the scores' shape {tuple(scores.shape)}")
        if not 0 <= count <= int(free.sum()):
            raise PluresError(f"cannot choose {count} of {int(free.sum())} free weights")
        # Scores stay float32 under half-precision weights: in bfloat16 most of them would tie.
        self.scores = nn.Parameter(scores.detach().float().clone(memory_format=torch.contiguous_format))
        self.register_buffer("free", free.float().contiguous(), persistent=False)
        # Added to |score|: excluded weights rank as -inf, below every free one; at 0 they would win a tie.
        lowest = torch.finfo(torch.float32).min
        self.register_buffer("handicap", torch.where(free, 0.0, lowest).contiguous(), persistent=False)
        self.count = count
        self.literal = literal

    def chosen(self) -> Tensor:
        """Tell which weights are in use, as a boolean mask; of equal scores the first ones win."""
        rank = self.scores.detach().abs().float().add_(self.handicap).reshape(-1)
        if self.count == 0:
            return torch.zeros_like(self.scores, dtype=torch.bool)
        if rank.is_cpu and not torch.compiler.is_compiling():
            return torch.from_numpy(largest(rank.numpy(), self.count)).reshape(self.scores.shape)
        # The same choice, compiled or on a GPU, without a number that the host must wait for.
        least = rank.topk(self.count, sorted=False).values.min()
        above, tied = rank > least, rank == least
        return (above | (tied & (tied.cumsum(0) <= self.count - above.sum()))).reshape(self.scores.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight with the current choice."""
        masked: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
            weight, self.scores, self.chosen().to(weight.dtype), self.free, self.literal
        )
        return masked


class _StraightThrough(torch.autograd.Function):
    """Forward, a mask; backward, as if the mask were |score|."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, chosen: Tensor, free: Tensor, literal: bool) -> Tensor:
        ctx.save_for_backward(weight, scores, chosen, free)
        ctx.literal = literal
        return weight * chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scores, chosen, free = ctx.saved_tensors
        to_weight = gradient * chosen if ctx.needs_input_grad[0] else None
        # Excluded scores get no gradient: it would count in gradient clipping.
        to_scores = (gradient * weight).sum_to_size(scores.shape).to(scores.dtype).mul_(free)
        if not ctx.literal:
            to_scores.mul_(scores.sign())
        return to_weight, to_scores, None, None, None


def largest(rank: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """Mark exactly the `count` largest values; of equal ones the first.

        >>> largest(np.array([3.0, 1.0, 3.0, 2.0], np.float32), 1).tolist()
        [True, False, False, False]

    A selection in linear time: thirty times faster than a sort, six times faster than torch's topk on a CPU.
    """
    threshold = np.partition(rank, rank.size - count)[rank.size - count]
    chosen: NDArray[np.bool_] = rank > threshold
    chosen[np.flatnonzero(rank == threshold)[: count - np.count_nonzero(chosen)]] = True
    return chosen


def owned_part(weight: Tensor, owners: Tensor, member: int) -> Tensor:
    """Cut one member out of a weight that holds all of them: zero where it is not the owner.

        member_weight = owned_part(weight, owners, member=2)

    The zeros are positive to the bit, and the memory layout is the weight's own: another one would take another kernel,
    which rounds otherwise.
    """
    if not _plain(weight):
        return weight.clone().masked_fill_(owners != member, 0.0)  # a clone keeps the layout
    return _cut(weight, owners.numpy(), member)


def _plain(weight: Tensor) -> bool:
    ready = weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()
    return ready and not torch.compiler.is_compiling() and not (weight.requires_grad and torch.is_grad_enabled())


def _cut(weight: Tensor, owners: NDArray[np.uint8], member: int) -> Tensor:
    """Do by bits, a few rows at a time, what a choice by booleans does several times slower and with more memory."""
    bits = weight.detach().numpy().view(np.int32)
    part = np.empty_like(bits)
    step = max(1, 2**17 * len(bits) // bits.size)
    for start in range(0, len(bits), step):
        rows = slice(start, start + step)
        keep = np.negative((owners[rows] == member).view(np.int8))  # all bits or none
        np.bitwise_and(bits[rows], keep, out=part[rows])
    return torch.from_numpy(part.view(np.float32))


def put_on(network: nn.Module, masks: Mapping[str, nn.Module], first_names: Mapping[str, str]) -> None:
    """Put masks on the named weights of a network; tied weights stay tied and get one mask.

    put_on(network, {"fc.weight": Keep(mask)}, canonical(network))
    """
    for name, first in first_names.items():
        if first in masks:
            path, _, attribute = name.rpartition(".")
            parametrize.register_parametrization(network.get_submodule(path), attribute, masks[first])


def mask_of(network: nn.Module, name: str) -> nn.Module:
    """Get the mask that `put_on` put on a weight.

    chosen = mask_of(stage.network, "fc.weight").chosen()
    """
    path, _, attribute = name.rpartition(".")
    return network.get_submodule(f"{path}.parametrizations.{attribute}.0".lstrip("."))


def unmasked(network: nn.Module) -> dict[str, Tensor]:
    """Name the tensors of a masked network as before the masks came, with the values underneath.

    network.load_state_dict(unmasked(stage.network))
    """
    masked = {
        f"{path}.parametrizations.{attribute}.".lstrip("."): f"{path}.{attribute}".lstrip(".")
        for path, module in network.named_modules()
        if parametrize.is_parametrized(module)
        for attribute, chain in module.parametrizations.items()
        if isinstance(chain[0], Keep | TopK)
    }
    result = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        prefix = next((prefix for prefix in masked if name.startswith(prefix)), None)
        if prefix is None:
            result[name] = tensor
        elif name == prefix + "original":
            result[masked[prefix]] = tensor
    return result
