"""One split of a data set: its rows, their preprocessing, and augmented batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from plures.checks import whole_number
from plures.errors import PluresError
from plures.lab.fields import check_fields
from plures.seeding import derived_seed, permutation

Rows = npt.NDArray[np.int64]
MOST_PIXELS_PER_SIDE = 8192  # of what a network is given


@dataclass(frozen=True)
class DataInfo:
    """How the images of a data set are prepared: enough to prepare other images in the same way.

    `mean` and `std` are per channel, for pixels between 0 and 1; both are empty for data without training images.
    """

    name: str
    classes: Sequence[str]
    channels: Annotated[int, Meta(ge=1, le=3)]
    size: Annotated[int, Meta(ge=1, le=MOST_PIXELS_PER_SIDE)]  # pixels per side that the network sees
    cache_size: int  # pixels per side in the cache; larger than `size` leaves room for random crops
    resize: bool  # whether images of other sizes are resized
    mean: Sequence[Annotated[float, Meta(ge=-1e300, le=1e300)]]
    std: Sequence[Annotated[float, Meta(gt=0, le=1e300)]]

    def __post_init__(self) -> None:
        for field in ("classes", "mean", "std"):  # JSON has lists, which are not equal to tuples
            object.__setattr__(self, field, tuple(getattr(self, field)))
        check_fields(self, DataInfo)
        whole_number("cache_size", self.cache_size, least=self.size, most=MOST_PIXELS_PER_SIDE)
        for field in ("mean", "std"):
            values = getattr(self, field)
            if len(values) not in (0, self.channels):
                raise PluresError(f"{field} must have a number for each of the {self.channels} channels, not {values}")

    def normalise(self, images: Tensor) -> Tensor:
        """Turn uint8 pixels [batch, height, width, channels] into network input [batch, channels, height, width].

        Subtracts the mean and divides by the standard deviation of the training images; the result is float32 in the
        channels_last memory format.
        """
        if not self.mean:
            raise PluresError(
                f"{self.name} has no training images to take mean and standard deviation from: "
                "open it with like=info of the data that the network was trained on"
            )
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != self.channels:
            raise PluresError(
                f"normalise takes uint8 images of shape [batch, height, width, {self.channels}], "
                f"but was given {images.dtype} of shape {list(images.shape)}"
            )
        batch, height, width, channels = images.shape
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        # One long row of pixels and channels: arithmetic over three channels alone would not vectorise.
        scale = (1 / (255 * std)).float().repeat(width).to(images.device)
        shift = (-mean / std).float().repeat(width).to(images.device)
        rows = images.reshape(batch, height, width * channels).float()
        return rows.mul_(scale).add_(shift).view(batch, height, width, channels).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class DataSplit:
    """The train, validation or test part of a data set.

    `pixels` are the images of all parts, and `rows` are those of this one, in ascending order.
    """

    name: str
    info: DataInfo
    pixels: npt.NDArray[np.uint8]  # [images, height, width, channels]
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]  # one per row of the split

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> npt.NDArray[np.uint8]:
        """A copy of the images, [N, height, width, channels]."""
        return self.pixels[self.rows]

    def seen(self, chosen: slice | Rows) -> npt.NDArray[np.uint8]:
        """Return the network's view of some images, [N, size, size, channels]: the middle of what is cached."""
        margin = (self.info.cache_size - self.info.size) // 2
        middle = slice(margin, margin + self.info.size)
        return self.pixels[self.rows[chosen]][:, middle, middle]


def random_rows(labels: Rows, count: int, seed: int, *, balanced: bool = False) -> Rows:
    """Return `count` random rows in ascending order.

    They are the same fraction of every class or, if `balanced`, equally many of every class as far as possible.
    """
    shuffled = permutation(len(labels), "balanced" if balanced else "stratified", seed)
    grouped = np.argsort(labels[shuffled], kind="stable")
    _, starts, sizes = np.unique(labels[shuffled][grouped], return_index=True, return_counts=True)
    place = np.empty(len(labels))  # how many rows of its class come before a row
    place[grouped] = np.arange(len(labels)) - np.repeat(starts, sizes)
    if not balanced:
        # The middle of a row's place on the way through its class, from 0 to 1.
        place[grouped] = (place[grouped] + 0.5) / np.repeat(sizes, sizes)
    return np.sort(shuffled[np.argsort(place, kind="stable")[:count]])


@dataclass(frozen=True)
class Augment:
    """How training images are changed at random: by default not at all.

        Augment(crop=4, flip=True)  # CIFAR, as in the ResNet paper

    `crop` pads with that many pixels of the mean colour (zero after normalisation) and cuts a square out at random;
    `flip` mirrors half of the images left to right. Images that are larger in the cache are always cut at a random
    place.
    """

    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        whole_number("crop", self.crop, least=0)

    def __call__(self, images: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Change normalised images [batch, channels, height, width] and bring them to size x size.

        Random numbers are drawn on the CPU, so that every device sees the same images.
        """
        batch, channels, height, width = images.shape
        mirrored = torch.rand(batch, 1, generator=generator) < 0.5 if self.flip else torch.zeros(batch, 1).bool()
        top = torch.randint(height + 2 * self.crop - size + 1, (batch, 1), generator=generator) - self.crop
        left = torch.randint(width + 2 * self.crop - size + 1, (batch, 1), generator=generator) - self.crop
        along = torch.arange(size)
        y = top + along
        x = left + torch.where(mirrored, along.flip(0), along)
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
        image = torch.arange(batch)[:, None, None] * (height * width)
        pixel = image + y[:, :, None] * width + x[:, None, :]
        # One table of all pixels, with a zero at the end for everything outside: a single gather does it all.
        pixel = pixel.masked_fill_(~inside, batch * height * width).to(images.device)
        table = F.pad(images.permute(0, 2, 3, 1).reshape(-1, channels), (0, 0, 0, 1))
        return table.index_select(0, pixel.view(-1)).view(batch, size, size, channels).permute(0, 3, 1, 2)


def batches(
    split: DataSplit,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    augment: Augment | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images [batch, channels, size, size] in channels_last and int64 labels [batch].

        for images, labels in batches(data.train, 128, seed=0, epoch=3, augment=Augment(crop=4, flip=True)): ...
        for images, labels in batches(data.test, 500, shuffle=False): ...  # the last, smaller batch is kept

    Order and augmentation depend on seed and epoch alone. Without `augment`, images that are larger in the cache are
    cut to their middle.
    """
    count = steps(split, batch_size, drop_last=drop_last)
    order = permutation(len(split), "order", seed, epoch) if shuffle else np.arange(len(split), dtype=np.int64)
    order = order[: count * batch_size]
    generator = torch.Generator().manual_seed(derived_seed("augmentation", seed, epoch, 0))

    def batch(start: int) -> tuple[Tensor, Tensor]:
        chosen = order[start : start + batch_size]
        labels = torch.from_numpy(split.labels[chosen]).to(device)
        if augment is None:
            return split.info.normalise(torch.from_numpy(split.seen(chosen)).to(device)), labels
        pixels = torch.from_numpy(split.pixels[split.rows[chosen]]).to(device)
        return augment(split.info.normalise(pixels), split.info.size, generator), labels

    return map(batch, range(0, len(order), batch_size))


def steps(split: DataSplit, batch_size: int, *, drop_last: bool = False) -> int:
    """Return how many batches an epoch has."""
    if not len(split):
        raise PluresError(f"{split.info.name} has no {split.name} images: give data with a {split.name} split")
    whole_number("batch_size", batch_size)
    count = len(split) // batch_size if drop_last else -(-len(split) // batch_size)
    if not count:
        raise PluresError(
            f"a batch of {batch_size} is larger than the {len(split)} {split.name} images: use a smaller one"
        )
    return count
