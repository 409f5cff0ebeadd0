"""Batches in a reproducible order, changed at random for training."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from plures.errors import PluresError
from plures.lab.data.split import Rows, Split
from plures.seeding import derived_seed, permutation

LOG_ASPECT = 0.28768207  # log(4/3): random resized crops are between 3:4 and 4:3


@dataclass(frozen=True)
class Augment:
    """How training images are changed at random: by default not at all.

        Augment(crop=4, flip=True)                        # CIFAR, as in the ResNet paper
        Augment(resized_crop=(0.25, 1.0), flip=True)      # photographs

    `crop` pads with that many pixels of the mean colour (zero after normalisation) and cuts a square out at random;
    `resized_crop` cuts out a random fraction of the area, between the two given, and resizes it; `flip` mirrors half of
    the images left to right. Images that are larger in the cache are always cut at a random place.
    """

    crop: int = 0
    flip: bool = False
    resized_crop: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise PluresError(f"Augment.crop is a number of pixels, zero or more, but {self.crop} was given")
        if self.resized_crop is not None:
            low, high = self.resized_crop
            if not 0 < low <= high <= 1:
                raise PluresError(
                    f"Augment.resized_crop takes fractions of the area, 0 < low <= high <= 1, but got {low} and {high}"
                )
            if self.crop:
                raise PluresError("Augment takes crop or resized_crop, but both were given")

    def __call__(self, images: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Change normalised images [batch, channels, height, width] and bring them to size x size.

            Augment(crop=2)(images, 16, torch.Generator().manual_seed(0))

        Random numbers are drawn on the CPU, so that every device sees the same images.
        """
        mirrored = (
            torch.rand(len(images), generator=generator) < 0.5
            if self.flip
            else torch.zeros(len(images), dtype=torch.bool)
        )
        if self.resized_crop is not None:
            return _resized_crops(images, size, self.resized_crop, mirrored, generator)
        return _crops(images, size, self.crop, mirrored, generator)


def _crops(images: Tensor, size: int, padding: int, mirrored: Tensor, generator: torch.Generator) -> Tensor:
    """Cut a square out of every padded image; without padding the place is random only if the image is larger."""
    batch, channels, height, width = images.shape
    top = torch.randint(height + 2 * padding - size + 1, (batch, 1), generator=generator) - padding
    left = torch.randint(width + 2 * padding - size + 1, (batch, 1), generator=generator) - padding
    along = torch.arange(size)
    y = top + along
    x = left + torch.where(mirrored[:, None], along.flip(0), along)
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    image = torch.arange(batch)[:, None, None] * (height * width)
    pixel = image + y[:, :, None] * width + x[:, None, :]
    # One table of all pixels with a zero at the end, which stands for everything outside: a single gather does it all.
    pixel = pixel.masked_fill_(~inside, batch * height * width).to(images.device)
    table = F.pad(images.permute(0, 2, 3, 1).reshape(-1, channels), (0, 0, 0, 1))
    return table.index_select(0, pixel.view(-1)).view(batch, size, size, channels).permute(0, 3, 1, 2)


def _resized_crops(
    images: Tensor, size: int, area: tuple[float, float], mirrored: Tensor, generator: torch.Generator
) -> Tensor:
    """Cut a random rectangle out of every image and resize it; sides longer than the image are clipped."""
    batch = len(images)
    area_drawn, aspect, y, x = torch.rand(4, batch, generator=generator)
    area_drawn = area[0] + (area[1] - area[0]) * area_drawn
    aspect = torch.exp(LOG_ASPECT * (2 * aspect - 1))
    height = (area_drawn / aspect).sqrt().clamp(max=1)
    width = (area_drawn * aspect).sqrt().clamp(max=1)
    # In the coordinates of grid_sample an image reaches from -1 to 1.
    transform = torch.zeros(batch, 2, 3)
    transform[:, 0, 0] = torch.where(mirrored, -width, width)
    transform[:, 1, 1] = height
    transform[:, 0, 2] = (1 - width) * (2 * x - 1)
    transform[:, 1, 2] = (1 - height) * (2 * y - 1)
    grid = F.affine_grid(transform.to(images.device), [batch, images.shape[1], size, size], align_corners=False)
    sampled = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return sampled.contiguous(memory_format=torch.channels_last)


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
    """Return how many batches one process takes per epoch."""
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
