"""Times, measured in turn so that a busy machine slows all of them alike, and the machine that they are measured on."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plures.lab.training.loop import lay_out
from plures.stage import Stage
from plures.version import __version__

Action = Callable[[], object]
Clock = Callable[[], float]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def timed(actions: Sequence[Action], rounds: int, *, clock: Clock, shortest: float = 0.0) -> list[list[float]]:
    """Return the seconds of actions that run in turn, one figure per action and round.

        plain, masked = timed([plain_step, masked_step], rounds=5, clock=time.perf_counter)
        min(masked) / min(plain)

    An action that takes less than `shortest` seconds is repeated within its round: clocks are coarse.
    """
    for action in dict.fromkeys(actions):
        action()  # to warm up
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
    """Let torch use one thread on the CPU, and yield the clock to measure with.

        with one_thread() as clock:
            (found,) = timed([step], rounds=3, clock=clock)

    On a CPU it counts the time of this process alone: other processes do not change the figures.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield time.perf_counter if torch.accelerator.is_available() else time.process_time
    finally:
        torch.set_num_threads(before)


def training_step(stage: Stage, images: Tensor, targets: Tensor, precision: str) -> Action:
    """Return an action that trains a stage by one step of SGD with momentum."""
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


def machine() -> dict[str, str | int]:
    """Return the processor and the versions that measure.

    >>> machine()["plures"] == plures.__version__
    True
    """
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "plures": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": next(models, platform.processor() or "unknown"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
    }
