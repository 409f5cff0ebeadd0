"""The layers of a network that a method can work on."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from plures.errors import PluresError

Layer = nn.Linear | _ConvNd


def layers(network: nn.Module) -> dict[str, Layer]:
    """Name the linear and convolution layers that a network calls, in the order in which they were made.

        >>> list(layers(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))))
        ['0', '3']

    The projection inside of `nn.MultiheadAttention` is not among them: its weight is used, but it is never called.
    """
    check_network(network)
    attention = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    never_called = {id(child) for module in attention for child in module.modules()}
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | _ConvNd) and id(module) not in never_called
    }


def check_network(network: object) -> None:
    """Refuse what is no network, before anything is made of it.

    check_network(network)
    """
    if not isinstance(network, nn.Module):
        raise PluresError(f"network must be an nn.Module, not {type(network).__name__}")
