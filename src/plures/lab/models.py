"""Network architectures: functions that return modules, and the names that recipes give to them.

Residual networks (He et al., 2016), and wide ones with pre-activation (Zagoruyko and Komodakis, 2016), have the tensor
names of torchvision, so that its weights can be loaded.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from plures.checks import one_of, unknown, whole_number
from plures.errors import PluresError
from plures.lab.method_names import imported, is_code

Stem = Literal["cifar", "imagenet"]
COPIES = 4  # weights, gradients, momentum and a copy: the least that training needs


def stem_layers(stem: Stem, channels: int, width: int) -> tuple[nn.Conv2d, nn.Module]:
    """Return the first convolution and the pooling layer after it.

    "cifar" keeps small images at their size (3x3, no pooling); "imagenet" divides the sides by four (7x7 stride 2,
    then 3x3 maximum stride 2).
    """
    one_of("stem", stem, get_args(Stem))
    if stem == "cifar":
        return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
    conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    return conv, nn.MaxPool2d(3, stride=2, padding=1)


def check_sizes(**sizes: int) -> None:
    """Raise an error for numbers below one."""
    for name, value in sizes.items():
        whole_number(name, value)


def kaiming_init(network: nn.Module) -> None:
    """Initialise convolutions as in He et al. (2015), so that gradients keep their scale through ReLUs."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResidualBlock(nn.Module):
    """Convolutions beside a shortcut; `between` is a place for a dropout layer.

    Two convolutions of 3x3 or, with an `expansion` of the width at the end, a bottleneck of 1x1, 3x3 and 1x1.
    """

    def __init__(self, inputs: int, width: int, stride: int, expansion: int = 1) -> None:
        super().__init__()
        deep, outputs = expansion > 1, width * expansion
        first, second = ((1, 1, 0), (3, stride, 1)) if deep else ((3, stride, 1), (3, 1, 1))
        self.conv1 = nn.Conv2d(inputs, width, *first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.between = nn.Identity()
        self.conv2 = nn.Conv2d(width, width, *second, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        if deep:
            self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()
        self.deep = deep

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions and the shortcut."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(self.between(out)))
        if self.deep:
            out = self.bn3(self.conv3(self.relu(out)))
        return self.relu(out + self.downsample(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem, stages of residual blocks that halve the image and double the width, mean pooling and a classifier."""

    def __init__(
        self,
        blocks: Sequence[int],
        classes: int,
        channels: int = 3,
        width: int = 64,
        stem: Stem = "cifar",
        expansion: int = 1,
    ) -> None:
        super().__init__()
        check_sizes(classes=classes, channels=channels, width=width)
        self.conv1, self.maxpool = stem_layers(stem, channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        block = partial(ResidualBlock, expansion=expansion)
        for name, stage in zip(self.stages, _stages(block, blocks, width, width, expansion), strict=True):
            self.add_module(name, stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear((width << len(blocks) - 1) * expansion, classes)
        kaiming_init(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        out = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self.stages:
            out = self.get_submodule(stage)(out)
        return self.fc(self.avgpool(out).flatten(1))  # type: ignore[no-any-return]


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, beside a shortcut."""

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
        """Return the sum of the convolutions and the shortcut."""
        activated = self.relu(self.bn1(x))
        out = self.relu(self.bn2(self.conv1(activated)))
        out = self.conv2(self.between(out))
        # A shortcut that changes the shape starts after the activation, as in the authors' code.
        return out + self.shortcut(activated if self.changes_shape else x)  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """A stem, three stages of pre-activation blocks, mean pooling and a classifier; the depth is 6 n + 4.

    The stages have 1, 2 and 4 times width x widen channels.
    """

    def __init__(
        self, classes: int, channels: int = 3, depth: int = 28, widen: int = 10, width: int = 16, stem: Stem = "cifar"
    ) -> None:
        super().__init__()
        check_sizes(widen=widen, classes=classes, channels=channels, width=width)
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise PluresError(f"the depth of a wide ResNet must be 10, 16, 22, 28, ... (6 n + 4), but is {depth}")
        self.conv1, self.maxpool = stem_layers(stem, channels, width)
        self.layer1, self.layer2, self.layer3 = _stages(PreActivationBlock, [blocks] * 3, width, width * widen)
        self.bn = nn.BatchNorm2d(4 * width * widen)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width * widen, classes)
        kaiming_init(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, classes]."""
        out = self.layer3(self.layer2(self.layer1(self.maxpool(self.conv1(images)))))
        return self.fc(self.avgpool(self.relu(self.bn(out))).flatten(1))  # type: ignore[no-any-return]


def _stages(
    block: Callable[..., nn.Module], blocks: Sequence[int], inputs: int, width: int, expansion: int = 1
) -> Iterator[nn.Sequential]:
    """Yield the stages; all but the first begin with a block that halves the image."""
    for index, count in enumerate(blocks):
        layers = []
        for position in range(count):
            layers.append(block(inputs, width << index, stride=2 if index > 0 and position == 0 else 1))
            inputs = (width << index) * expansion
        yield nn.Sequential(*layers)


# Shortcuts that change the width are 1x1 convolutions with batch norm (option B of the ResNet paper), so resnet20 has
# 2,752 parameters more than there, which pads (option A).
resnet8 = partial(ResNet, (1, 1, 1), width=16)
resnet18 = partial(ResNet, (2, 2, 2, 2))
resnet20 = partial(ResNet, (3, 3, 3), width=16)
resnet50 = partial(ResNet, (3, 4, 6, 3), stem="imagenet", expansion=4)


def mlp(classes: int, channels: int = 1, size: int = 8, width: int = 128, depth: int = 2) -> nn.Sequential:
    """Return a network with `depth` hidden layers of `width` units, for images of size x size pixels."""
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


def _accepted(model: str, function: Callable[..., nn.Module], options: dict[str, object]) -> dict[str, object]:
    """Return the options that a function accepts besides `classes` and `channels`, which it must accept."""
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        chosen = {name: value for name, value in options.items() if takes_all or name in parameters}
        signature.bind(classes=0, channels=0, **chosen)
    except (TypeError, ValueError) as error:
        raise PluresError(
            f"the model {model!r} must be a function or class that takes classes= and channels=, "
            f"and needs nothing else: {error}"
        ) from None
    return chosen


def _check_memory(model: str, sketch: nn.Module) -> None:
    """Raise an error if this machine has too little memory: the system would kill the process without a message."""
    needed = COPIES * sum(parameter.nbytes for parameter in sketch.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if needed > there:
        raise PluresError(
            f"training the model {model!r} of this width and size takes {needed:,} bytes, but this machine "
            f"has {there:,}: choose a smaller width, or smaller images"
        )


BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "wide_resnet10_2": partial(WideResNet, depth=10, widen=2),
    "wide_resnet28_10": WideResNet,
    "wide_resnet": WideResNet,  # the same: a name that earlier runs may have
    "mlp": mlp,
}


def build(model: str, classes: int, channels: int, **options: object) -> nn.Module:
    """Return a network by its built-in name or by any importable `module:function`.

        build("resnet18", classes=10, channels=3, width=16)
        build("mypackage.networks:small", classes=10, channels=3, size=32)

    The function is called with `classes` and `channels`, and with those options that its signature accepts. The module
    may be in the working directory.
    """
    if not is_code(model) and model not in BUILT_IN:
        raise unknown("model", model, [*BUILT_IN, "module:function"])
    function = imported("model", model) if is_code(model) else BUILT_IN[model]
    chosen = _accepted(model, function, options)
    try:
        if not is_code(model):
            with torch.device("meta"):  # on which weights take no memory
                _check_memory(model, function(classes=classes, channels=channels, **chosen))
        network = function(classes=classes, channels=channels, **chosen)
    except (RuntimeError, MemoryError) as error:  # such as too little memory
        raise PluresError(f"the model {model!r} cannot be built: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(network, nn.Module):
        raise PluresError(f"the model {model!r} must return a torch.nn.Module, but returned {type(network).__name__}")
    return network
