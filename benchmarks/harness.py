"""Ratios measured in turn, and the networks that they are measured on."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble
from plures.fitting import lay_out
from plures.lab.costs import Action, timed
from plures.lab.models import WideResNet, resnet18
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.stage import Stage

CLASSES = 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ratio:
    """One measured ratio: the median of the rounds, the least and the largest, and the target it should not exceed."""

    name: str
    setting: str
    value: float
    low: float
    high: float
    bar: float | None = None

    @classmethod
    def of(cls, name: str, setting: str, samples: Sequence[float], bar: float | None = None) -> "Ratio":
        """Return the ratio of several rounds."""
        return cls(name, setting, statistics.median(samples), min(samples), max(samples), bar)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.bar is None else self.value <= self.bar

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"; target {self.bar:g}{'' if self.met else ' missed'}"
        return f"{self.name} ({self.setting}): {self.value:.3g}, {self.low:.3g} to {self.high:.3g}{bar}"


def race(
    setting: str, baseline: Action, rivals: Mapping[str, Action], rounds: int, bars: Mapping[str, float] | None = None
) -> Iterator[Ratio]:
    """Time rivals against one baseline, round by round.

        race("ResNet18, batch 64", plain_step, {"masked step / plain step": masked_step}, rounds=5)

    The baseline runs before and after each rival, and the rival is divided by the mean of the two: a machine that
    becomes slower or faster meanwhile does so for both.
    """
    lineup = [baseline, *(action for rival in rivals.values() for action in (rival, baseline))]
    found = timed(lineup, rounds, clock=time.perf_counter)
    for place, name in enumerate(rivals):
        before, taken, after = found[2 * place : 2 * place + 3]
        samples = [2 * t / (b + a) for b, t, a in zip(before, taken, after, strict=True)]
        yield Ratio.of(name, setting, samples, (bars or {}).get(name))


class VisionTransformer(nn.Module):
    """A transformer of the size of ViT-S (21 M weights) for 32-pixel images, in plain torch."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(1))


def perceptron() -> nn.Module:
    """Make a perceptron of the size that tables of numbers take."""
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, size: int, stride: int) -> None:
        super().__init__()
        wide, self.adds = inputs * expansion, stride == 1 and inputs == outputs
        first = [nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()] if expansion > 1 else []
        depthwise = nn.Conv2d(wide, wide, size, stride, size // 2, groups=wide, bias=False)
        last = [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*first, depthwise, nn.BatchNorm2d(wide), nn.ReLU6(), *last)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made + x if self.adds else made


def efficientnet_lite0() -> nn.Module:
    """Make EfficientNet-Lite0 after its published table: mostly 1x1 and depthwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    inputs = 32
    for expansion, outputs, count, stride, size in (
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
        *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    ):
        for turn in range(count):
            layers.append(_Inverted(inputs, outputs, expansion, size, stride if turn == 0 else 1))
            inputs = outputs
    layers += [nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES))


def transformers_vit() -> nn.Module:
    """Make a vision transformer of the package transformers, of the size of ViT-S, for 32-pixel images."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    made: nn.Module = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=CLASSES, **sizes))
    return made


@dataclass(frozen=True)
class Subject:
    """A network to measure: its name, the function that makes it, and the shape of a sample."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels."""
        inputs = torch.randn(size, *self.shape, generator=torch.Generator().manual_seed(0))
        return inputs, torch.arange(size) % CLASSES


RESNET18 = Subject("ResNet18", lambda: resnet18(classes=CLASSES))
QUARTER = Subject(
    "ResNet18 of a quarter of the width, 16 pixels", lambda: resnet18(classes=CLASSES, width=16), (3, 16, 16)
)
WIDE_RESNET = Subject("WRN28-10", lambda: WideResNet(classes=CLASSES))
TRANSFORMER = Subject("ViT-S", VisionTransformer)
TRANSFORMERS_VIT = Subject("ViT-S of transformers", transformers_vit)
PERCEPTRON = Subject("perceptron 64-256-256-10", perceptron, (64,))
LITE = Subject("EfficientNet-Lite0 (rebuilt), 224 pixels", efficientnet_lite0, (3, 224, 224))


def finished(network: nn.Module, members: int = 5, granularity: str = "weight") -> OrthogonalDropout:
    """Return a complete ensemble that was not trained: speed and size do not depend on the values of weights."""
    ensemble = OrthogonalDropout(network, members, optimize_masks=False, granularity=granularity)
    for _ in ensemble.stages():
        pass
    return ensemble


def reordered(inputs: Tensor) -> Tensor:
    """Return images in channels_last, and other inputs as they are."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


def training_step(stage: Stage, images: Tensor, targets: Tensor, precision: str) -> Action:
    """Return an action that trains a stage by one step of SGD with momentum."""
    lay_out(stage, len(images), images.device, mixed=precision in DTYPES)
    images = reordered(images)
    optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=5e-4), lr=1e-3, momentum=0.9, nesterov=True)

    def step() -> None:
        optimizer.zero_grad()
        with _autocast(images, precision):
            loss = stage(images, targets)
        loss.backward()
        optimizer.step()
        _finish(images)

    return step


def prediction(function: Callable[[Tensor], Any], images: Tensor, precision: str = "no") -> Action:
    """Return an action that predicts."""

    def predict() -> None:
        with torch.no_grad(), _autocast(images, precision):
            function(images)
        _finish(images)

    return predict


def _autocast(images: Tensor, precision: str) -> torch.autocast:
    return torch.autocast(images.device.type, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES)


def _finish(tensor: Tensor) -> None:
    """Wait until the device has finished: it only queues its work."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


def first_step(ensemble: Ensemble, subject: Subject, batch: int, precision: str) -> Action:
    """Return a training step of an ensemble's first stage."""
    return training_step(ensemble.open(ensemble.plan()[0]), *subject.batch(batch), precision)
