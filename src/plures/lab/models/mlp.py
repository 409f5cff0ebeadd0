"""A multi-layer perceptron: the smallest network that can be split."""

from torch import nn

from plures.lab.models.blocks import check_sizes


def mlp(classes: int, channels: int = 1, size: int = 8, width: int = 128, depth: int = 2) -> nn.Sequential:
    """Make `depth` hidden layers of `width` units for images of size x size pixels.

    network = mlp(classes=10, channels=1, size=8)
    """
    check_sizes(classes=classes, channels=channels, size=size, width=width, depth=depth)
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = channels * size * size
    for _ in range(depth):
        hidden = nn.Linear(inputs, width)
        nn.init.kaiming_normal_(hidden.weight, nonlinearity="relu")
        nn.init.zeros_(hidden.bias)
        layers += [hidden, nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
