"""The timing harness, and the networks that it times.

Actions run in turn, round by round, so that a busy machine slows them alike.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble, Stage
from plures.lab.models import resnet18, wide_resnet28_10
from plures.lab.training.loop import lay_out
from plures.methods.orthogonal_dropout.method import OrthogonalDropout

Action = Callable[[], object]
Clock = Callable[[], float]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def timed(
    actions: Sequence[Action],
    rounds: int,
    *,
    clock: Clock = time.perf_counter,
    warm_up: bool = True,
    shortest: float = 0.0,
) -> list[list[float]]:
    """Run actions in turn and return the seconds of each, one figure per round.

        plain, masked = timed([plain_step, masked_step], rounds=5)
        min(masked) / min(plain)

    What takes less than `shortest` seconds is repeated within its round: clocks are coarse. What takes many seconds
    needs no `warm_up`.
    """
    if warm_up:
        for action in dict.fromkeys(actions):
            action()
    times = [max(1, round(shortest / max(_seconds(one, 1, clock), 1e-6))) if shortest else 1 for one in actions]
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, count, own in zip(actions, times, found, strict=True):
            own.append(_seconds(action, count, clock))
    return found


def _seconds(action: Action, count: int, clock: Clock) -> float:
    start = clock()
    for _ in range(count):
        action()
    return (clock() - start) / count


@contextmanager
def one_thread() -> Iterator[Clock]:
    """Let torch use one thread on the CPU, and afterwards as many as before; gives the clock to measure with.

        with one_thread() as clock:
            (found,) = timed([step], rounds=3, clock=clock)

    On a CPU it is the time that this process was at work: other processes do not show in the figures.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield time.perf_counter if torch.accelerator.is_available() else time.process_time
    finally:
        torch.set_num_threads(before)


def training_step(stage: Stage, images: Tensor, targets: Tensor, precision: str) -> Action:
    """Make one training step of a stage: forward, backward, SGD with momentum."""
    lay_out(stage, len(images), images.device, mixed=precision in DTYPES)
    images = images.contiguous(memory_format=torch.channels_last)
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
    """Make an action that predicts."""

    def predict() -> None:
        with torch.no_grad(), _autocast(images, precision):
            function(images)
        _finish(images)

    return predict


def _autocast(images: Tensor, precision: str) -> torch.autocast:
    return torch.autocast(images.device.type, DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES)


def _finish(tensor: Tensor) -> None:
    """Wait until the device has done its work: it only queues what it is asked."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


@dataclass(frozen=True)
class Ratio:
    """Keep one measured ratio, with the spread over the rounds and the target that it should not exceed.

        >>> str(Ratio("masked step / plain step", "ResNet18", 1.02, 1.01, 1.04, bar=1.05))
        'masked step / plain step (ResNet18): 1.02, 1.01 to 1.04; target 1.05'

    `value` is the median of the rounds' ratios, `low` and `high` are the least and the largest.
    """

    name: str
    setting: str
    value: float
    low: float
    high: float
    bar: float | None = None

    @classmethod
    def of(cls, name: str, setting: str, samples: Sequence[float], bar: float | None = None) -> "Ratio":
        """Make a ratio of the samples of several rounds."""
        return cls(name, setting, statistics.median(samples), min(samples), max(samples), bar)

    @property
    def met(self) -> bool | None:
        """Return whether the target is met, or None if there is none."""
        return None if self.bar is None else self.value <= self.bar

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"; target {self.bar:g}"
        return f"{self.name} ({self.setting}): {self.value:.3g}, {self.low:.3g} to {self.high:.3g}{bar}"


@dataclass(frozen=True)
class LeftOut:
    """Keep what was not measured, and why.

    >>> str(LeftOut("prediction", "WRN28-10, batch 128, float32", "a pass would take 70 s"))
    'prediction (WRN28-10, batch 128, float32): left out, a pass would take 70 s'
    """

    name: str
    setting: str
    why: str
    met: None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.setting}): left out, {self.why}"


def race(
    setting: str,
    baseline: Action,
    rivals: Mapping[str, Action],
    rounds: int,
    bars: Mapping[str, float] | None = None,
    *,
    warm_up: bool = True,
) -> Iterator[Ratio]:
    """Time rivals against one baseline, round by round, and give the median of the rounds' ratios.

        race("ResNet18, batch 64", plain_step, {"masked step / plain step": masked_step}, rounds=5)

    In every round the baseline runs before and after each rival, and the rival is divided by the mean of the two: a
    machine that grows slower or faster meanwhile does so for both.
    """
    lineup = [baseline, *(action for rival in rivals.values() for action in (rival, baseline))]
    found = timed(lineup, rounds, warm_up=warm_up)
    for place, name in enumerate(rivals):
        before, taken, after = found[2 * place : 2 * place + 3]
        samples = [2 * t / (b + a) for b, t, a in zip(before, taken, after, strict=True)]
        yield Ratio.of(name, setting, samples, (bars or {}).get(name))


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
