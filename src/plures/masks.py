"""The two masks that a stage trains under, as `torch.nn.utils.parametrize` parametrizations."""

from collections.abc import Mapping

import torch
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
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight; zeros are exact, whatever the hidden entries hold."""
        return torch.where(self.mask, weight, 0.0)


class TopK(nn.Module):
    """Use exactly `count` of the free weights, those of largest |score|, and learn the scores.

        mask = TopK(weight / weight.abs().max(), free, count=1000)
        parametrize.register_parametrization(layer, "weight", mask)

    The mask is binary to the bit; its gradient passes straight through to |score|. With `literal=True` it passes to
    the score itself, as the paper's appendix has it: negative scores then move the wrong way.
    """

    free: Tensor

    def __init__(self, scores: Tensor, free: Tensor, count: int, literal: bool = False) -> None:
        super().__init__()
        if scores.shape != free.shape or free.dtype != torch.bool:
            raise PluresError(f"free must be a boolean mask of the scores' shape {tuple(scores.shape)}")
        if not 0 <= count <= int(free.sum()):
            raise PluresError(f"cannot choose {count} of {int(free.sum())} free weights")
        # Scores stay float32 under half-precision weights: in bfloat16 most of them would tie.
        self.scores = nn.Parameter(scores.detach().float().clone(memory_format=torch.contiguous_format))
        self.register_buffer("free", free.clone(memory_format=torch.contiguous_format))
        self.count = count
        self.literal = literal

    def chosen(self) -> Tensor:
        """Tell which weights are in use, as a boolean mask."""
        rank = self.scores.detach().abs().masked_fill(~self.free, -torch.inf).reshape(-1)
        # An unsorted topk is a selection in linear time, and takes exactly `count` where scores tie.
        best = rank.topk(self.count, sorted=False).indices
        return torch.zeros_like(rank, dtype=torch.bool).scatter(0, best, True).reshape(self.scores.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight with the current choice."""
        ranked = self.scores if self.literal else self.scores.abs()
        # Excluded scores get no gradient: it would count in gradient clipping.
        ranked = torch.where(self.free, ranked, 0.0)
        hard = self.chosen().to(ranked.dtype)
        # The bracket is exactly 0 in value, so that the mask is exactly binary; without it rounding is not.
        mask = hard + (ranked - ranked.detach())
        return weight * mask.to(weight.dtype)


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
