"""One part of a data set, what one must know to feed its pictures to a network, and how rows are chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plures.checks import whole_number
from plures.errors import PluresError
from plures.seeding import permutation

Rows = npt.NDArray[np.int64]
MOST_PIXELS_PER_SIDE = 8192  # of what a network is given


@dataclass(frozen=True)
class DataInfo:
    """How the pictures of a data set are prepared: enough to prepare others in the same way.

        info = data.info
        json.dumps(dataclasses.asdict(info))            # goes into a run folder ...
        info = DataInfo(**json.loads(text))             # ... and comes back equal
        unfamiliar = open_data("svhn", like=info)       # other data, prepared for the same network

    `mean` and `std` are per channel, for pixels between 0 and 1; both are empty for data without training images.
    """

    name: str
    classes: Sequence[str]
    channels: int
    size: int  # pixels per side that the network sees
    cache_size: int  # pixels per side in the cache; larger than `size` leaves room for random crops
    resize: bool  # whether pictures of other sizes are brought to `size`
    mean: Sequence[float]
    std: Sequence[float]
    most_channels: ClassVar[int] = 3

    def __post_init__(self) -> None:
        # JSON gives lists back; tuples make equal values equal again.
        for field in ("classes", "mean", "std"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        whole_number("size", self.size, most=MOST_PIXELS_PER_SIDE)
        whole_number("cache_size", self.cache_size, least=self.size, most=MOST_PIXELS_PER_SIDE)
        whole_number("channels", self.channels, most=self.most_channels)
        for field in ("mean", "std"):
            values = getattr(self, field)
            if len(values) not in (0, self.channels) or not all(map(_is_number, values)):
                raise PluresError(f"{field} must hold a number for each of the {self.channels} channels, not {values}")
        if not all(isinstance(name, str) for name in self.classes) or 0 in self.std:
            raise PluresError("the classes of data must be words, and their standard deviations above 0")

    def normalise(self, images: Tensor) -> Tensor:
        """Turn uint8 pixels [batch, height, width, channels] into network input [batch, channels, height, width].

            inputs = data.normalise(torch.from_numpy(data.test.images[:8]))

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
class Split:
    """The train, validation or test part of a data set.

        len(data.test), data.test.images[0], data.test.labels[0]

    `pixels` is the memory map of all that was decoded together, and `rows` says what of it belongs to the split.
    """

    name: str
    info: DataInfo
    pixels: npt.NDArray[Any]  # uint8 [pictures, height, width, channels]; float32 of a table
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]  # int64, one per row of the split; float32 [rows, targets] of a table

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> npt.NDArray[Any]:
        """The pictures, [N, height, width, channels]: the memory map itself, or a copy where only some are taken."""
        if np.array_equal(self.rows, np.arange(len(self.pixels))):
            return self.pixels
        return self.pixels[self.rows]


def stratified(labels: Rows, count: int, seed: int) -> Rows:
    """Choose `count` rows so that every class gives the same fraction, in ascending order."""
    shuffled = permutation(len(labels), "stratified", seed)
    place, size = _places(labels[shuffled])
    # The middle of a row's place on the way through its class, from 0 to 1.
    return _first(shuffled, (place + 0.5) / size, count)


def balanced(labels: Rows, count: int, seed: int) -> Rows:
    """Choose `count` rows, equally many of each class as far as the classes reach, in ascending order."""
    shuffled = permutation(len(labels), "balanced", seed)
    place, _ = _places(labels[shuffled])
    return _first(shuffled, place, count)


def _places(labels: Rows) -> tuple[Rows, Rows]:
    """Return for every row how many rows of its class stand before it, and how many there are in all."""
    grouped = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[grouped], return_index=True, return_counts=True)
    place, size = np.empty_like(labels), np.empty_like(labels)
    place[grouped] = np.arange(len(labels)) - np.repeat(starts, sizes)
    size[grouped] = np.repeat(sizes, sizes)
    return place, size


def _first(rows: Rows, keys: npt.NDArray[np.float64] | Rows, count: int) -> Rows:
    """Return the rows of the smallest keys; of equal keys the earlier row, which is a random one in a shuffled list."""
    return np.sort(rows[np.argsort(keys, kind="stable")[:count]])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
