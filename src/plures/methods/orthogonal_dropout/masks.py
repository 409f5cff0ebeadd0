"""The masks that a stage trains under, as `torch.nn.utils.parametrize` parametrizations."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from plures.errors import PluresError
from plures.native.structures import BLOCK


def spread(owners: Tensor, weight: Tensor) -> Tensor:
    """Repeat owners, or a mask of their shape, for the outputs of a block, so that they broadcast against the weight.

    >>> spread(torch.tensor([[0, 1]]), torch.zeros(3, 2)).tolist()
    [[0, 1], [0, 1], [0, 1]]
    """
    return owners if len(owners) == len(weight) else owners.repeat_interleave(BLOCK, 0)[: len(weight)]


def gathered(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum values of a weight's shape over what has one owner: the opposite of `spread` and of broadcasting.

    >>> gathered(torch.ones(3, 2), (1, 2)).tolist()
    [[3.0, 3.0]]
    """
    if len(values) != shape[0]:
        missing = values.new_zeros(shape[0] * BLOCK - len(values), *values.shape[1:])
        values = torch.unflatten(torch.cat([values, missing]), 0, (shape[0], BLOCK)).sum(1)
    return values.sum_to_size(*shape)


class Keep(nn.Module):
    """Use the weights where the mask is true, and zeros elsewhere.

        parametrize.register_parametrization(layer, "weight", Keep(free))

    The mask broadcasts against the weight. No gradient reaches the weights outside it.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        # Floating, because a product of floats is several times faster on a CPU than a choice by booleans. Not in the
        # state dict, because opening the stage again makes the same mask.
        self.register_buffer("mask", mask.to(torch.float32, memory_format=torch.preserve_format), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight."""
        return weight * self.mask.to(weight.dtype)


class Change(nn.Module):
    """Use trained values where the mask is true, and the given weight elsewhere.

        parametrize.register_parametrization(layer, "weight", Change(layer.weight, owned), unsafe=True)

    What trains is a vector of these values alone: a member that owns a hundredth of a weight has a gradient and an
    optimizer state of a hundredth. On a CPU the values of a plain layer are written into `given`, of which this is the
    only user: a copy in each step would take as much memory as the gradient of all weights.
    """

    given: Tensor
    places: Tensor

    def __init__(self, given: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.in_place = True  # whether it may write into the given weight: the forward of some layers does, too
        places = mask.expand_as(given).reshape(-1).nonzero().squeeze(1)
        self.register_buffer("given", given.detach(), persistent=False)
        self.register_buffer("places", places, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the given weight with the values in their places."""
        writable = self.in_place and self.given.is_contiguous() and isinstance(values, nn.Parameter)
        if writable and values.is_cpu and not torch.compiler.is_compiling():
            written: Tensor = _Written.apply(values, self.given, self.places)  # type: ignore[no-untyped-call]
            return written
        whole = self.given.reshape(-1).index_put((self.places,), values).view_as(self.given)
        return whole if self.given.is_contiguous() else in_layout_of(self.given, whole)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the values of a weight; of a tied one, they are given already."""
        return weight if weight.shape == self.places.shape else weight.reshape(-1)[self.places]


class _Written(torch.autograd.Function):
    """Write values into the places of a weight, unless they are there already.

    So the weight may be used many times before a backward pass, and torch refuses one that comes after other values.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, given: Tensor, places: Tensor) -> Tensor:
        flat = given.view(-1)
        if not flat[places].equal(values):
            flat[places] = values
        return given.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].reshape(-1)[ctx.saved_tensors[0]], None, None


def in_layout_of(weight: Tensor, mask: Tensor) -> Tensor:
    """Lay a mask out in memory as its weight is: the product of two layouts is many times slower."""
    if mask.shape != weight.shape:
        return mask
    return torch.empty_like(weight, dtype=mask.dtype).copy_(mask)


class TopK(nn.Module):
    """Use exactly `count` of the free weights, those with the largest |score|, and learn the scores.

        mask = TopK(weight / weight.abs().max(), free, count=1000)
        parametrize.register_parametrization(layer, "weight", mask)

    The mask is exactly binary; its gradient passes straight through to |score|.
    """

    free: Tensor
    handicap: Tensor

    def __init__(self, scores: Tensor, free: Tensor, count: int) -> None:
        super().__init__()
        if scores.shape != free.shape or free.dtype != torch.bool:
            raise PluresError(f"free must be a boolean mask of the scores' shape {tuple(scores.shape)}")
        if not 0 <= count <= int(free.sum()):
            raise PluresError(f"cannot choose {count} of {int(free.sum())} free weights")
        # Scores stay float32 under half-precision weights: in bfloat16 most of them would tie.
        self.scores = nn.Parameter(scores.detach().float().clone(memory_format=torch.contiguous_format))
        self.register_buffer("free", free.float().contiguous(), persistent=False)
        # Added to |score|: excluded weights rank below every free one; at 0 they would win a tie.
        lowest = torch.finfo(torch.float32).min
        self.register_buffer("handicap", torch.where(free, 0.0, lowest).contiguous(), persistent=False)
        self.count = count

    def chosen(self) -> Tensor:
        """Return which weights are in use, as a boolean mask; among equal scores, the first ones are chosen."""
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
            weight, self.scores, spread(self.chosen(), weight).to(weight.dtype), self.free
        )
        return masked


class _StraightThrough(torch.autograd.Function):
    """Forward, a mask; backward, as if the mask were |score|."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, chosen: Tensor, free: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scores, chosen, free)
        return weight * chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scores, chosen, free = ctx.saved_tensors
        to_weight = gradient * chosen if ctx.needs_input_grad[0] else None
        # Excluded scores get no gradient: it would count in gradient clipping.
        to_scores = gathered(gradient * weight, scores.shape).to(scores.dtype).mul_(free)
        return to_weight, to_scores.mul_(scores.sign()), None, None


MASKS = (Keep, Change, TopK)
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)  # layers that never write into their weight


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


def owned_part(weight: Tensor, owners: Tensor, member: int, background: Tensor | None = None) -> Tensor:
    """Cut one member out of a weight that holds all of them: zero, or the background, where it is not the owner.

    The memory layout is the weight's own: another one would take another kernel, which rounds differently.
    """
    part = torch.where(spread(owners, weight) == member, weight, 0.0 if background is None else background)
    return part if part.stride() == weight.stride() else torch.empty_like(weight).copy_(part)


def put_on(network: nn.Module, masks: Mapping[str, nn.Module], at: Mapping[str, str]) -> None:
    """Put masks on the named weights of a network, whose `places` are `at`; tied weights stay tied and get one mask.

    Torch makes a class for every layer that it parametrizes. Layers of one kind share one here: to the compiler all
    stages then look alike, and it compiles a few of them instead of all. Torch's property of such a class keeps one
    layer alive, whose weight all would have within `parametrize.cached`: it is replaced.
    """
    for place, first in at.items():
        if first in masks:
            path, _, attribute = place.rpartition(".")
            parametrize.register_parametrization(network.get_submodule(path), attribute, masks[first], unsafe=True)
    for layer in network.modules():
        if any(map(_is_mask, _chains(layer).values())):
            kind = type(layer).__mro__[1], tuple(_chains(layer))
            for attribute in kind[1]:
                setattr(type(layer), attribute, _masked(attribute))
                mask = _chains(layer)[attribute].get_submodule("0")
                if isinstance(mask, Change) and kind[0] not in PLAIN:
                    mask.in_place = False
            layer.__class__ = _CLASSES.setdefault(kind, type(layer))


_CLASSES: dict[tuple[type, tuple[str, ...]], type[nn.Module]] = {}


def _masked(attribute: str) -> property:
    return property(
        lambda layer: layer.parametrizations[attribute](),
        lambda layer, value: layer.parametrizations[attribute].right_inverse(value),
    )


def _chains(layer: nn.Module) -> nn.ModuleDict:
    # Not by its attribute: wrappers such as those of peft forward theirs to the layer inside.
    return cast(nn.ModuleDict, layer._modules.get("parametrizations", nn.ModuleDict()))


def _is_mask(chain: nn.Module) -> bool:
    return isinstance(chain.get_submodule("0"), MASKS)


def mask_of(network: nn.Module, name: str) -> nn.Module:
    """Return the mask that `put_on` put on a weight."""
    path, _, attribute = name.rpartition(".")
    return network.get_submodule(f"{path}.parametrizations.{attribute}.0".lstrip("."))


def unmasked(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a masked network by their names without masks, with the values underneath.

    Changes are a vector: the values of the weights that the member owns, in their order.
    """
    result: dict[str, Tensor] = dict(network.state_dict(keep_vars=True))
    for path, layer in network.named_modules(remove_duplicate=False):
        for attribute, chain in _chains(layer).items():
            if _is_mask(chain):
                inside = f"{path}.parametrizations.{attribute}.".lstrip(".")
                own = {name: result.pop(name) for name in list(result) if name.startswith(inside)}
                result[f"{path}.{attribute}".lstrip(".")] = own[inside + "original"]
    return result
