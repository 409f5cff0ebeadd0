"""Networks whose last layer is frozen but for one learned number: the fixed classifier with a scale.

To the method they are ordinary networks: what the network itself has frozen is shared, and the number is private to
each member. `docs/make/classifiers.py` compares them with what plures offers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plures.lab.models import build

START = 5.0  # a last layer of torch's own scale is about that much too small to become sure in few epochs


class Scaled(nn.Module):
    """Multiply what a frozen layer gives by a number that is learned.

    The number is START * exp(x), and x is what trains: weight decay then pulls it to its start, not to zero.
    """

    traceable = True

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.exponent = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layer(x) * (START * self.exponent.exp())


def mlp(classes: int, channels: int, size: int, width: int) -> nn.Module:
    """Make the perceptron of the recipe `digits`."""
    return scaled(build("mlp", classes, channels, size=size, width=width))


def resnet8(classes: int, channels: int, width: int, stem: str) -> nn.Module:
    """Make the network of the recipe `digits-resnet`."""
    return scaled(build("resnet8", classes, channels, width=width, stem=stem))


def resnet18(classes: int, channels: int, width: int, stem: str) -> nn.Module:
    """Make the network of the recipes `cifar10-cpu` and `cifar100-cpu`."""
    return scaled(build("resnet18", classes, channels, width=width, stem=stem))


def scaled(network: nn.Module) -> nn.Module:
    """Freeze the last Linear of a network, and put the number behind it."""
    named: dict[str, Any] = dict(network.named_modules())
    last = [name for name, module in named.items() if isinstance(module, nn.Linear)][-1]
    network.set_submodule(last, Scaled(named[last]))
    return network
