"""Estimate how long a recipe takes on this machine, from a few steps on random images; estimates are stored.

Kept estimates are read without torch, so that the command line lists recipes at once.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from plures import files
from plures.errors import PluresError
from plures.lab.recipes import Recipe
from plures.lab.runs.schemas import misfit
from plures.lab.timing.machine import processor
from plures.version import __version__

PROBE = 8  # images of the first, small step
PATIENCE = 1.0  # seconds: a step that takes longer is computed from the small one
ROUNDS = 5
SAVING = 0.03  # seconds that an epoch takes besides its steps, with the smallest networks


@dataclass(frozen=True)
class Shape:
    """What one must know of data to know what training on them costs."""

    images: int
    size: int
    channels: int
    classes: int


# The data of the recipes; sizes are those of the data where the recipe gives none.
SHAPES = {
    "digits": Shape(images=1_347, size=8, channels=1, classes=10),
    "cifar10": Shape(images=50_000, size=32, channels=3, classes=10),
    "cifar100": Shape(images=50_000, size=32, channels=3, classes=100),
    "cub200": Shape(images=5_994, size=224, channels=3, classes=200),
    "cub200-30": Shape(images=900, size=64, channels=3, classes=30),
    "tiny-imagenet": Shape(images=100_000, size=64, channels=3, classes=200),
    "tiny-imagenet-20": Shape(images=10_000, size=64, channels=3, classes=20),
}


@dataclass(frozen=True)
class Estimate:
    """What a run would take on this machine: on one core, or on its accelerator."""

    epochs: int
    seconds: float
    bytes: int  # of the finished ensemble


def kept_estimate(recipe: Recipe, method: str = "orthogonal-dropout", settings: Sequence[str] = ()) -> Estimate | None:
    """Give the estimate that was made on this machine before, if there is one."""
    found = _read(_file()).get(_key(recipe, method, settings))
    if found is None or misfit(found, {"epochs": int, "seconds": float, "bytes": int}):  # none, or broken: measure
        return None
    return Estimate(found["epochs"], found["seconds"], found["bytes"])


def estimate(
    recipe: Recipe, method: str = "orthogonal-dropout", settings: Sequence[str] = (), *, again: bool = False
) -> Estimate | None:
    """Estimate what a run takes here; None where the data is not known by name.

        estimate(get_recipe("cifar10-cpu"), "deep-ensemble").seconds

    An estimate is measured once for each machine, version of torch, recipe and method, and kept in the cache folder;
    `again` measures once more. Steps run on one thread and count processor time, each at its best of several: a busy
    machine changes nothing.
    """
    if recipe.data not in SHAPES:
        return None
    known = None if again else kept_estimate(recipe, method, settings)
    if known is not None:
        return known
    found = _measure(recipe, method, settings, SHAPES[recipe.data])
    path = _file()
    with contextlib.suppress(PluresError, OSError):  # a folder that cannot be written to: measure again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _read(path) | {_key(recipe, method, settings): asdict(found)}
        files.write_json(path, kept)
    return found


def _measure(recipe: Recipe, method: str, settings: Sequence[str], shape: Shape) -> Estimate:
    from plures.lab.runs.open import device_for, ensemble_for, network_for

    size = recipe.size or shape.size
    network = network_for(recipe, shape.classes, shape.channels, size)
    ensemble = ensemble_for(recipe, method, settings, network)
    stored = sum(tensor.nbytes for tensor in ensemble.tensors().values())
    ensemble.to(device_for())
    plan = ensemble.plan()
    epochs = sum(recipe.epochs.of(step.phase) for step in plan)
    images = min(shape.images, recipe.limit or shape.images)
    images -= round(recipe.validation * images) if recipe.validation < 1 else int(recipe.validation)
    per_step = seconds_per_step(ensemble.open(plan[0]), recipe, shape.channels, size)
    return Estimate(epochs, epochs * (images / recipe.batch_size * per_step + SAVING), stored)


def seconds_per_step(stage: Any, recipe: Recipe, channels: int, size: int) -> float:
    """Time a training step of a stage: the best of several, in time that the processor was at work for it."""
    import torch

    from plures.lab.runs.open import device_for
    from plures.lab.timing.harness import one_thread, timed, training_step
    from plures.lab.training.distributed import resolve

    with one_thread() as clock:

        def best(batch: int, rounds: int) -> float:
            images = torch.randn(batch, channels, size, size, device=device_for())
            targets = torch.zeros(batch, dtype=torch.long, device=images.device)
            step = training_step(stage, images, targets, resolve(recipe.precision, device_for()))
            return min(timed([step], rounds, clock=clock)[0])

        probe = min(PROBE, recipe.batch_size)
        full = best(probe, rounds=2) * recipe.batch_size / probe
        return full if full > PATIENCE else best(recipe.batch_size, ROUNDS)


def _file() -> Path:
    # As `plures.lab.data.cache.cache_folder` has it, which needs torch.
    given = os.environ.get("PLURES_CACHE") or platformdirs.user_cache_path("plures", appauthor=False)
    return Path(given).expanduser() / "estimates.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # nothing was kept, or it is broken: measure
        return {}
    return found if isinstance(found, dict) else {}


def _key(recipe: Recipe, method: str, settings: Sequence[str]) -> str:
    """Name what an estimate depends on: the machine, the versions, the recipe but for its seed, the method."""
    versions = [__version__, importlib.metadata.version("torch")]
    here = [platform.node(), processor(), os.environ.get("CUDA_VISIBLE_DEVICES"), *versions]
    numbers = recipe.as_json() | {"seed": None}
    return files.digest(json.dumps([here, numbers, method, list(settings)]).encode())
