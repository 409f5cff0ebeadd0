"""What the residual networks have in common: stem and initial weights."""

from typing import Literal

from torch import nn

from plures.errors import PluresError

Stem = Literal["cifar", "imagenet"]


def stem_layers(stem: Stem, channels: int, width: int) -> tuple[nn.Conv2d, nn.Module]:
    """Make the first convolution and the pooling after it.

        conv1, pool = stem_layers("imagenet", channels=3, width=64)

    "cifar" keeps small images at their size (3x3, no pooling); "imagenet" divides the sides by four (7x7 stride 2,
    then 3x3 maximum stride 2).
    """
    if stem == "cifar":
        return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
    if stem == "imagenet":
        conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        return conv, nn.MaxPool2d(3, stride=2, padding=1)
    raise PluresError(f"stem must be 'cifar' or 'imagenet', but is {stem!r}")


def check_sizes(**sizes: int) -> None:
    """Refuse numbers below one.

    check_sizes(classes=10, channels=3, width=64)
    """
    for name, value in sizes.items():
        if value < 1:
            raise PluresError(f"{name} must be a whole number of at least 1, but is {value}")


def kaiming_init(network: nn.Module) -> None:
    """Draw convolution weights as He et al. (2015) do, so that gradients keep their scale through ReLUs.

    kaiming_init(network)
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
