"""Fresh random starts for a network whose class we do not know."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from plures.partition import generator
from plures.role import tensors

Moments = dict[str, tuple[float, float]]


def moments(network: nn.Module) -> Moments:
    """Measure mean and standard deviation of every tensor that a fresh start draws anew.

        >>> moments(nn.LayerNorm(8))
        {}

    These are the parameters of linear, convolution, attention and embedding layers that are not constant. All others
    (norm layers, tokens, buffers, frozen tables) start from the values that the network was given with.
    """
    drawn = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, nn.Linear | _ConvNd | nn.MultiheadAttention | nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    result: Moments = {}
    for name, tensor in tensors(network).items():
        if id(tensor) in drawn and tensor.numel() > 1:
            values = tensor.detach().float()
            mean, deviation = values.mean().item(), values.std().item()
            if deviation > 0:
                result[name] = (mean, deviation)
    return result


def draw(name: str, like: Tensor, known: Moments, seed: int, *key: object) -> Tensor:
    """Draw one tensor afresh: normal, with the moments that the network's own initialiser had.

        weight = draw("fc.weight", network.fc.weight, moments(network), seed, "member", 2)

    The scale is what an initialiser is about, so any network starts as its author meant it to, without our knowing its
    class. Drawn on the CPU, so that every device and every process gets the same numbers.
    """
    mean, deviation = known[name]
    values = torch.randn(like.shape, generator=generator(seed, *key, name)) * deviation + mean
    return values.to(device=like.device, dtype=like.dtype)


def restart(network: nn.Module, known: Moments, names: Iterable[str], seed: int, *key: object) -> None:
    """Draw the named tensors of a network afresh, in place.

    restart(copy, moments(copy), moments(copy), seed, "member", 2)
    """
    current = tensors(network)
    with torch.no_grad():
        for name in names:
            if name in known:
                current[name].copy_(draw(name, current[name], known, seed, *key))
        for module in network.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # never trained, so it must not be drawn
