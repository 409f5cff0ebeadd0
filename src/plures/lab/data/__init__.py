"""Image data sets behind one small interface.

from plures.lab.data import Augment, batches, open_data

data = open_data("cifar10", data_dir="data", size=16)
for images, labels in batches(data.train, 128, seed=0, epoch=3, augment=Augment(crop=2, flip=True)):
    ...
"""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plures.checks import whole_number
from plures.errors import PluresError
from plures.files import digest
from plures.lab.data.cache import CachedSplit, cache_folder, open_cache
from plures.lab.data.images import read_image
from plures.lab.data.sources import expanded, find_source
from plures.lab.data.split import (
    MOST_PIXELS_PER_SIDE,
    Augment,
    DataInfo,
    DataSplit,
    Rows,
    batches,
    random_rows,
    steps,
)

__all__ = [
    "Augment",
    "Data",
    "DataInfo",
    "DataSplit",
    "batches",
    "cache_folder",
    "open_data",
    "read_image",
    "steps",
]

HELD_OUT = 0.2  # of the training images, if there are no test images

log = logging.getLogger("plures")


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, ready to train on.

        data = open_data("cifar10", data_dir="data")
        data.train, data.validation, data.test           # each a DataSplit: .images, .labels, len()
        data.info.classes, data.info.channels, data.info.size, data.info.mean, data.info.std

    A missing split is empty, but data for training always have test images. The fingerprint is a hash of all images and
    labels, of their preprocessing and of the choice of rows.
    """

    info: DataInfo
    train: DataSplit
    validation: DataSplit
    test: DataSplit
    fingerprint: str


def open_data(
    name: str = "digits",
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    validation: float = 0.1,
    size: int | None = None,
    cache_size: int | None = None,
    limit: int | None = None,
    like: DataInfo | None = None,
) -> Data:
    """Open a data set, decoding it into the cache the first time.

        data = open_data("cifar10", data_dir="data", size=16, limit=10_000)
        birds = open_data("birds", data_dir="data", size=64, cache_size=73)     # room for random crops
        other = open_data("svhn", data_dir="data", like=data.info)              # prepared for a network of `data`

    - `name`: a built-in name, a folder below `data_dir` (or PLURES_DATA), a path to a folder or .parquet file, or a hub
      id. A folder contains train.parquet and test.parquet, images in train/CLASS/ and test/CLASS/, or only in CLASS/.
      If there are no test images, a fifth of the training images is held out, always the same.
    - `size`: resize all images to size x size; `cache_size` keeps larger ones for random crops.
    - `limit`: keep at most this many training images, balanced over the classes, chosen by `seed`.
    - `validation`: hold out this fraction (below 1) or number of them, class by class. Data that have their own
      validation and test images keep both.
    - `like`: prepare the images as for a network of other data, for evaluation; without test images, all are test
      images.
    """
    whole_number("seed", seed, least=0)
    if limit is not None:
        whole_number("limit", limit)
    if not math.isfinite(validation) or validation < 0 or (validation >= 1 and validation != int(validation)):
        raise PluresError(f"validation={validation}; use a fraction below 1 or a whole number of images, 0 or more")
    _check_sizes(size, cache_size, like)
    folder = data_dir or os.environ.get("PLURES_DATA")
    source = find_source(name, expanded(folder) if folder else None)
    stored_size, channels = (like.cache_size, like.channels) if like else (cache_size or size, None)
    entry, splits = open_cache(source, cache_folder(cache_dir), stored_size, channels)

    nothing = CachedSplit(
        images=np.empty((0, entry.size, entry.size, entry.channels), np.uint8),
        labels=np.empty(0, np.int64),
        moments=np.empty((0, 2, entry.channels), np.int64),
    )
    train, test, validating = (splits.get(split, nothing) for split in ("train", "test", "validation"))
    train_rows, test_rows, rows = (np.arange(len(part.labels)) for part in (train, test, validating))
    if len(train_rows) and not len(test_rows):
        test, (train_rows, test_rows) = train, _hold_out(name, train.labels, everything=like is not None)
    train_rows, carved = _choose(name, train.labels, train_rows, limit, 0 if len(rows) else validation, seed)
    if not len(rows):
        validating, rows = train, carved
    mean, std = (like.mean, like.std) if like else _mean_and_std(train.moments[train_rows], entry.size)
    size = like.size if like else size or entry.size
    info = DataInfo(name, entry.classes, entry.channels, size, entry.size, stored_size is not None, mean, std)
    parts = (f" {len(chosen)} ".encode() + chosen.astype("<i8").tobytes() for chosen in (train_rows, carved))
    return Data(
        info=info,
        train=DataSplit("train", info, train.images, train_rows, train.labels[train_rows]),
        validation=DataSplit("validation", info, validating.images, rows, validating.labels[rows]),
        test=DataSplit("test", info, test.images, test_rows, test.labels[test_rows]),
        fingerprint=digest(f"{entry.content} {size} {entry.size} {entry.channels}".encode(), *parts, length=32),
    )


def _check_sizes(size: int | None, cache_size: int | None, like: DataInfo | None) -> None:
    if like is not None and (size is not None or cache_size is not None):
        raise PluresError("open_data takes either a size or like=info, which already has one, but both were given")
    if size is None and cache_size is not None:
        raise PluresError(f"cache_size={cache_size} needs a size: the pixels per side of the network's input")
    if size is not None:
        whole_number("size", size, most=MOST_PIXELS_PER_SIDE)
    if size is not None and cache_size is not None:
        whole_number("cache_size", cache_size, least=size, most=MOST_PIXELS_PER_SIDE)


def _hold_out(name: str, labels: Rows, everything: bool) -> tuple[Rows, Rows]:
    """Return the rows to train on and the rows to test on of data without test images."""
    count = len(labels) if everything else max(1, round(HELD_OUT * len(labels)))
    if count == len(labels) and not everything:
        raise PluresError(f"{name} contains a single image: give more, for training and for testing")
    test = random_rows(labels, count, seed=0)
    if not everything:
        log.warning("%s has no test images: %d of its %d training images are held out", name, count, len(labels))
    return np.delete(np.arange(len(labels), dtype=np.int64), test), test


def _choose(name: str, labels: Rows, rows: Rows, limit: int | None, validation: float, seed: int) -> tuple[Rows, Rows]:
    """Return the rows to train on and the rows to validate on."""
    if limit is not None:
        rows = rows[random_rows(labels[rows], limit, seed, balanced=True)]
    count = round(validation * len(rows)) if validation < 1 else int(validation)
    if count and count >= len(rows) > 0:
        raise PluresError(
            f"validation={validation} cannot be held out from the {len(rows)} training images of {name}: "
            "give a fraction, such as 0.1, or a smaller number"
        )
    held_out = random_rows(labels[rows], count, seed)
    return np.delete(rows, held_out), rows[held_out]


def _mean_and_std(moments: npt.NDArray[np.int64], side: int) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, from sums of whole numbers: exact in any order."""
    if not len(moments):
        return [], []
    pixels = len(moments) * side * side
    sums, squares = moments.sum(0).astype(np.float64)
    mean = sums / pixels
    # A channel that never changes is only shifted.
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
    return (mean / 255).tolist(), (np.where(std > 0, std, 255) / 255).tolist()
