"""Batches in a reproducible order."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from plures.errors import PluresError
from plures.lab.data.augment import Augment
from plures.lab.data.split import Rows, Split
from plures.seeding import derived_seed, permutation


def batches(
    split: Split,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    augment: Augment | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images [batch, channels, size, size] in channels_last and int64 labels [batch].

        for images, labels in batches(data.train, 128, seed=0, epoch=3, augment=Augment(crop=4, flip=True)): ...
        for images, labels in batches(data.test, 500, shuffle=False): ...  # the last, smaller batch is kept

    Order and augmentation depend on seed, epoch, rank and world alone. Of `world` processes, each takes every world-th
    sample, `batch_size` at a time; where `world` does not divide the number of samples, the order wraps around to its
    start, so that all take equally many steps: to gather results from all ranks, interleave them and keep the first
    `len(split)`. Without `augment`, images that are larger in the cache are cut to their middle.
    """
    count = steps(split, batch_size, drop_last=drop_last, world=world)
    if not 0 <= rank < world:
        raise PluresError(f"rank must be between 0 and {world - 1} in a world of {world}, but is {rank}")
    order = permutation(len(split), "order", seed, epoch) if shuffle else np.arange(len(split), dtype=np.int64)
    share = np.resize(order, -(-len(order) // world) * world)[rank::world]
    generator = torch.Generator().manual_seed(derived_seed("augmentation", seed, epoch, rank))
    return _generate(split, share[: count * batch_size], batch_size, augment, generator, torch.device(device))


def steps(split: Split, batch_size: int, *, drop_last: bool = False, world: int = 1) -> int:
    """Return how many batches one process takes per epoch.

    steps(data.train, 128, drop_last=True, world=2)
    """
    if not len(split):
        raise PluresError(f"{split.info.name} has no {split.name} images: give data with a {split.name} split")
    if batch_size < 1:
        raise PluresError(f"batch_size must be at least 1, but is {batch_size}")
    share = -(-len(split) // world)
    count = share // batch_size if drop_last else -(-share // batch_size)
    if not count:
        raise PluresError(
            f"a batch of {batch_size} is larger than the {share} {split.name} images of a process: take a smaller one"
        )
    return count


def _generate(
    split: Split,
    order: Rows,
    batch_size: int,
    augment: Augment | None,
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    size, margin = split.info.size, (split.info.cache_size - split.info.size) // 2
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        pixels = torch.from_numpy(split.pixels[split.rows[chosen]]).to(device)
        labels = torch.from_numpy(split.labels[chosen]).to(device)
        if augment is None:
            pixels = pixels[:, margin : margin + size, margin : margin + size]
            yield split.info.normalise(pixels), labels
        else:
            yield augment(split.info.normalise(pixels), size, generator), labels
