"""The cost of runs relative to one network: files and times, and the machine that measured them."""

import copy
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from timeit import Timer
from typing import Any

import msgspec
import torch
from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.lab.data import DataInfo
from plures.lab.recipes import Recipe
from plures.lab.runs.folder import Number, read_object
from plures.lab.runs.open import device_for
from plures.methods.deterministic import Deterministic
from plures.prediction import Predictor
from plures.storage import save
from plures.version import __version__

Action = Callable[[], object]
Clock = Callable[[], float]

ROUNDS = 9
SHORTEST = 0.02  # seconds: an action that takes less is repeated, because clocks are coarse
PREDICTED = 64  # images at a time
FEW = 8  # images of a step that is only timed


@dataclass(frozen=True)
class Costs:
    """The cost of a run relative to one network of its recipe."""

    size: Number  # of the file
    prediction: Number | None = None  # time, by the fastest engine that the method has; None if not measured
    epochs: Number | None = None  # training, in epochs of one network; None if not measured


def kept_costs(folder: Path) -> Costs | None:
    """Return the costs that are stored with a run, or None."""
    path = folder / "costs.json"
    return msgspec.convert(read_object(path, Costs, "remove it"), Costs) if files.is_file(path) else None


def costs_of(ensemble: Ensemble, predictor: Predictor, network: nn.Module, info: DataInfo, epochs: float) -> Costs:
    """Return the costs of a trained ensemble whose training took some epochs of one network."""
    if isinstance(ensemble, Deterministic):  # the yardstick itself
        return Costs(size=1.0, prediction=1.0, epochs=epochs)
    device = device_for()
    single = Deterministic(network).to(device)
    inputs = torch.randn(PREDICTED, info.channels, info.size, info.size, device=device)
    inputs = inputs.contiguous(memory_format=torch.channels_last)

    def predict(asked: Predictor) -> None:
        asked.predict(inputs)
        if device.type != "cpu":
            torch.accelerator.synchronize()  # it only queues its work

    time_of_one = relative(partial(predict, predictor), partial(predict, single))
    return Costs(file_size(ensemble) / file_size(single), time_of_one, epochs)


def epochs_of(records: Sequence[Mapping[str, Any]], plain: float) -> float:
    """Return the training of a log in epochs of one network, which cost `plain` seconds of the processor each.

    The cheapest epoch of a stage counts for all its epochs: other processes make some slower, and none faster. Records
    of 0.1 have a time instead of a cost.
    """
    costs: dict[str, list[float]] = {}
    for record in records:
        costs.setdefault(record["stage"], []).append(record.get("cost") or record["seconds"])
    return sum(len(stage) * min(stage) / plain for stage in costs.values())


def plain_step(network: nn.Module, info: DataInfo, recipe: Recipe, device: torch.device) -> float:
    """Return the seconds of a training step of the plain network, on a CPU by those of a few images."""
    stage = next(iter(Deterministic(network).to(device).stages()))
    count = min(recipe.batch_size, FEW if device.type == "cpu" else recipe.batch_size)
    images = torch.randn(count, info.channels, info.size, info.size, device=device)
    labels = torch.zeros(count, dtype=torch.long, device=device)

    def step() -> None:
        stage(images, labels).backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    (found,) = quickest([step], 3)
    return found * recipe.batch_size / count


def relative(action: Action, baseline: Action) -> float:
    """Return the time of an action divided by that of another."""
    own, other = quickest([action, baseline], ROUNDS, SHORTEST)
    return own / other


def quickest(actions: Sequence[Action], rounds: int, shortest: float = 0.0) -> list[float]:
    """Return the seconds of the quickest round of each action: other processes make some longer, and none shorter.

    They run on one thread, as runs are trained. On a CPU, only the time of this process counts.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clock = time.perf_counter if torch.accelerator.is_available() else time.process_time
        return list(map(min, timed(actions, rounds, clock=clock, shortest=shortest)))
    finally:
        torch.set_num_threads(before)


def timed(actions: Sequence[Action], rounds: int, *, clock: Clock, shortest: float = 0.0) -> list[list[float]]:
    """Return the seconds of actions that run in turn, one figure per action and round: a busy machine slows all alike.

    An action that takes less than `shortest` seconds is repeated within its round: clocks are coarse.
    """
    for action in dict.fromkeys(actions):
        action()  # to warm up
    timers = [Timer(action, timer=clock) for action in actions]
    counts = [max(1, round(shortest / max(timer.timeit(1), 1e-6))) if shortest else 1 for timer in timers]
    found = [[timer.timeit(count) / count for timer, count in zip(timers, counts, strict=True)] for _ in range(rounds)]
    return [list(own) for own in zip(*found, strict=True)]


def file_size(ensemble: Ensemble) -> int:
    """Return the bytes of the file that an ensemble is saved in, without its calibration."""
    plain = copy.copy(ensemble)
    plain.calibration = None
    with tempfile.TemporaryDirectory() as folder:
        save(plain, Path(folder) / "single")
        return (Path(folder) / "single").stat().st_size


def machine() -> dict[str, str | int]:
    """Return the processor and the versions that measure."""
    about = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", about.read_text("utf-8") if about.exists() else "", re.MULTILINE)
    return {
        "plures": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": model[1] if model else platform.processor() or "unknown",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
    }
