"""Networks whose last layer is frozen except for one learned number: the fixed classifier with a scale.

They are ordinary networks for the method: the frozen weights are shared, and the number is private to each member.
`docs/make/classifiers.py` compares them with what plures offers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plures.lab.models import build

START = 5.0  # torch's own initial scale is too small by about this factor to become confident in few epochs


class Scaled(nn.Module):
    """A frozen layer whose outputs are multiplied by a learned number.

    The number is START * exp(x), and x is learned: weight decay pulls it to its start, not to zero.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.exponent = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layer(x) * (START * self.exponent.exp())


def mlp(classes: int, channels: int, size: int, width: int) -> nn.Module:
    """Return the perceptron of the recipe `digits`."""
    return scaled(build("mlp", classes, channels, size=size, width=width))


def resnet8(classes: int, channels: int, width: int, stem: str) -> nn.Module:
    """Return the network of the recipe `digits-resnet`."""
    return scaled(build("resnet8", classes, channels, width=width, stem=stem))


def resnet18(classes: int, channels: int, width: int, stem: str) -> nn.Module:
    """Return the network of the recipes `cifar10-cpu` and `cifar100-cpu`."""
    return scaled(build("resnet18", classes, channels, width=width, stem=stem))


def scaled(network: nn.Module) -> nn.Module:
    """Freeze the last Linear of a network, and multiply its outputs by a learned number."""
    named: dict[str, Any] = dict(network.named_modules())
    last = [name for name, module in named.items() if isinstance(module, nn.Linear)][-1]
    network.set_submodule(last, Scaled(named[last]))
    return network
