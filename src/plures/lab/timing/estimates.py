"""How long a recipe takes on this machine, from a few steps on random images: before anybody waits."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plures.ensemble import Stage
from plures.lab.recipes import Recipe
from plures.lab.runs.open import device_for, ensemble_for, network_for
from plures.lab.training.distributed import resolve

PROBE = 8  # images of the first, small step
PATIENCE = 1.0  # seconds: a step that takes longer is computed from the small one
REPEATS = 3
SAVING = 0.03  # seconds that an epoch takes besides its steps, with the smallest networks


@dataclass(frozen=True)
class Shape:
    """What one must know of data to know what training on them costs.

    Shape(images=50_000, size=32, channels=3, classes=10)
    """

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
    """What a run would take on this machine.

    Estimate(epochs=315, seconds=1900.0, bytes=12_000_000)
    """

    epochs: int
    seconds: float
    bytes: int  # of the finished ensemble


def estimate(recipe: Recipe, method: str = "orthogonal-dropout", settings: Sequence[str] = ()) -> Estimate | None:
    """Estimate what a method takes here; None where the data are not known by name.

    estimate(get_recipe("cifar10-cpu"), "deep-ensemble").seconds
    """
    shape = SHAPES.get(recipe.data)
    if shape is None:
        return None
    size = recipe.size or shape.size
    network = network_for(recipe, shape.classes, shape.channels, size)
    ensemble = ensemble_for(recipe, method, settings, network)
    stored = sum(tensor.nbytes for tensor in ensemble.tensors().values())
    ensemble.to(device_for())
    plan = ensemble.plan()
    epochs = sum(recipe.epochs.of(step.phase) for step in plan)
    images = min(shape.images, recipe.limit or shape.images)
    images -= round(recipe.validation * images) if recipe.validation < 1 else int(recipe.validation)
    batches = images / recipe.batch_size
    per_step = _seconds_per_step(ensemble.open(plan[0]), recipe, shape.channels, size)
    return Estimate(epochs, epochs * (batches * per_step + SAVING), stored)


def training_step(stage: Stage, recipe: Recipe, channels: int, size: int) -> Callable[[int], float]:
    """Make a function that trains a stage on one batch of random images, so many as it is given, and times it.

    training_step(stage, recipe, channels=3, size=32)(128)
    """
    optimizer = torch.optim.SGD(stage.parameter_groups(), lr=0.0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(resolve(recipe.precision, device_for()))

    def step(batch: int) -> float:
        images = torch.randn(batch, channels, size, size, device=device_for())
        targets = torch.zeros(batch, dtype=torch.long, device=images.device)
        finish(images)
        # One thread's time at work is the time that it would take alone, however busy the machine is now.
        alone = images.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        started = clock()
        with torch.autocast(images.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = stage(images.contiguous(memory_format=torch.channels_last), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(images)
        return clock() - started

    return step


def finish(tensor: Tensor) -> None:
    """Wait until the device has done its work: it only queues what it is asked.

    finish(images)
    """
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


def _seconds_per_step(stage: Stage, recipe: Recipe, channels: int, size: int) -> float:
    step = training_step(stage, recipe, channels, size)
    probe = min(PROBE, recipe.batch_size)
    step(probe)  # the first step also allocates memory and chooses kernels
    full = step(probe) * recipe.batch_size / probe
    if full < PATIENCE:
        full = min(step(recipe.batch_size) for _ in range(REPEATS))
    return full


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread on the CPU, and afterwards as many as before.

    with one_thread(): network(images)
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
