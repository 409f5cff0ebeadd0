"""Wide residual networks (Zagoruyko and Komodakis, 2016): few layers, many channels, activation before convolution."""

from torch import Tensor, nn

from plures.errors import PluresError
from plures.lab.models.resnet import Stem, check_sizes, kaiming_init, stem_layers


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, beside a shortcut.

        PreActivationBlock(inputs=160, width=320, stride=2)

    `between` stands before conv2 and does nothing: it is a place for a dropout layer.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.between = nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.changes_shape = inputs != width or stride != 1
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if self.changes_shape else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolved images to the shortcut."""
        activated = self.relu(self.bn1(x))
        out = self.relu(self.bn2(self.conv1(activated)))
        out = self.conv2(self.between(out))
        # A shortcut that must change the shape starts from the activated images, as in the authors' code.
        return out + self.shortcut(activated if self.changes_shape else x)  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """A stem, three stages of pre-activation blocks, mean pooling and a classifier."""

    def __init__(self, depth: int, widen: int, classes: int, channels: int, width: int, stem: Stem) -> None:
        super().__init__()
        check_sizes(widen=widen, classes=classes, channels=channels, width=width)
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise PluresError(f"the depth of a wide ResNet must be 10, 16, 22, 28, ... (6 n + 4), but is {depth}")
        self.conv1, self.maxpool = stem_layers(stem, channels, width)
        self.layer1 = _stage(width, width * widen, blocks, stride=1)
        self.layer2 = _stage(width * widen, 2 * width * widen, blocks, stride=2)
        self.layer3 = _stage(2 * width * widen, 4 * width * widen, blocks, stride=2)
        self.bn = nn.BatchNorm2d(4 * width * widen)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width * widen, classes)
        kaiming_init(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        out = self.layer3(self.layer2(self.layer1(self.maxpool(self.conv1(images)))))
        return self.fc(self.avgpool(self.relu(self.bn(out))).flatten(1))  # type: ignore[no-any-return]


def wide_resnet(
    classes: int, channels: int = 3, depth: int = 28, widen: int = 10, width: int = 16, stem: Stem = "cifar"
) -> WideResNet:
    """Make a wide ResNet of any depth (6 n + 4).

        network = wide_resnet(classes=10, depth=16, widen=4)

    The three stages have width x widen channels, twice and four times as many.
    """
    return WideResNet(depth, widen, classes, channels, width, stem)


def wide_resnet28_10(classes: int, channels: int = 3, width: int = 16, stem: Stem = "cifar") -> WideResNet:
    """Make the wide ResNet that papers compare on CIFAR.

    network = wide_resnet28_10(classes=10)   # 36,479,194 parameters
    """
    return WideResNet(28, 10, classes, channels, width, stem)


def wide_resnet10_2(classes: int, channels: int = 3, width: int = 16, stem: Stem = "cifar") -> WideResNet:
    """Make the smallest wide ResNet, for machines without a GPU."""
    return WideResNet(10, 2, classes, channels, width, stem)


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = PreActivationBlock(inputs, width, stride)
    return nn.Sequential(first, *(PreActivationBlock(width, width, 1) for _ in range(blocks - 1)))
