"""The networks and ensembles that are measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble
from plures.lab.models import resnet18, wide_resnet28_10
from plures.lab.timing.measure import Action, training_step
from plures.methods.orthogonal_dropout.method import OrthogonalDropout

CLASSES = 10


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
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


@dataclass(frozen=True)
class Subject:
    """A network to measure: its name and how to make it."""

    name: str
    make: Callable[[], nn.Module]


RESNET18 = Subject("ResNet18", lambda: resnet18(classes=CLASSES))
WIDE_RESNET = Subject("WRN28-10", lambda: wide_resnet28_10(classes=CLASSES))
TRANSFORMER = Subject("ViT-S", VisionTransformer)


def finished(network: nn.Module, members: int = 5, granularity: str = "weight") -> OrthogonalDropout:
    """Make a complete ensemble without training it: speed and size do not depend on what the weights are."""
    ensemble = OrthogonalDropout(network, members, optimize_masks=False, granularity=granularity)  # type: ignore[arg-type]
    for _ in ensemble.stages():
        pass
    return ensemble


def images(batch: int) -> tuple[Tensor, Tensor]:
    """Make random 32-pixel images and their labels."""
    inputs = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(batch) % CLASSES


def first_step(ensemble: Ensemble, batch: int, precision: str) -> Action:
    """Make a training step of an ensemble's first stage on random images."""
    return training_step(ensemble.open(ensemble.plan()[0]), *images(batch), precision)
