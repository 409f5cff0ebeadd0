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
from plures.lab.data.cache import cache_folder, decoded_images
from plures.lab.data.images import read_image
from plures.lab.data.sources import expanded, find_data
from plures.lab.data.split import MOST_PIXELS_PER_SIDE, Augment, DataInfo, DataSplit, Rows, batches, random_rows, steps

__all__ = ["Augment", "Data", "DataInfo", "DataSplit", "batches", "cache_folder", "open_data", "read_image", "steps"]

HELD_OUT = 0.2  # of the training images, if there are no test images

log = logging.getLogger("plures")


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, ready to train on: three splits, each with `.images`, `.labels` and a length.

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
    seed: int = 0,
    validation: float = 0.1,
    size: int | None = None,
    cache_size: int | None = None,
    limit: int | None = None,
    like: DataInfo | None = None,
) -> Data:
    """Open a data set, and keep its decoded images in the cache.

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
    if like is not None and (size is not None or cache_size is not None):
        raise PluresError("open_data takes either a size or like=info, which already has one, but both were given")
    if size is not None:
        whole_number("size", size, most=MOST_PIXELS_PER_SIDE)
    if cache_size is not None:
        if size is None:
            raise PluresError(f"cache_size={cache_size} needs a size: the pixels per side of the network's input")
        whole_number("cache_size", cache_size, least=size, most=MOST_PIXELS_PER_SIDE)
    folder = data_dir or os.environ.get("PLURES_DATA")
    contents = find_data(name, expanded(folder) if folder else None)
    stored_size, channels = (like.cache_size, like.channels) if like else (cache_size or size, None)
    content, classes, splits, pixels, labels = decoded_images(name, contents, cache_folder(), stored_size, channels)
    stored, channels = pixels.shape[-2:]
    first, _ = splits.get("train", (0, 0))
    train, test, own = (np.arange(*splits.get(split, (0, 0))) for split in ("train", "test", "validation"))
    if like is not None and not len(test):  # nothing is trained on these
        train, test = test, train
    elif len(train) and not len(test):
        count = max(1, round(HELD_OUT * len(train)))
        if count == len(train):
            raise PluresError(f"{name} contains a single image: give more, for training and for testing")
        log.warning("%s has no test images: %d of its %d training images are held out", name, count, len(train))
        train, test = _parted(labels, train, count, seed=0)
    if limit is not None:
        train = train[random_rows(labels[train], limit, seed, balanced=True)]
    count = 0 if len(own) else round(validation * len(train)) if validation < 1 else int(validation)
    if count and count >= len(train) > 0:
        raise PluresError(
            f"validation={validation} cannot be held out from the {len(train)} training images of {name}: "
            "give a fraction, such as 0.1, or a smaller number"
        )
    train, carved = _parted(labels, train, count, seed)
    mean, std = (like.mean, like.std) if like else _mean_and_std(pixels, train)
    size = like.size if like else size or stored
    info = DataInfo(name, classes, channels, size, stored, stored_size is not None, mean, std)
    parts = (f" {len(rows)} ".encode() + (rows - first).astype("<i8").tobytes() for rows in (train, carved))

    def split(kind: str, rows: Rows) -> DataSplit:
        return DataSplit(kind, info, pixels, rows, labels[rows])

    return Data(
        info=info,
        train=split("train", train),
        validation=split("validation", own if len(own) else carved),
        test=split("test", test),
        fingerprint=digest(f"{content} {size} {stored} {channels}".encode(), *parts, length=32),
    )


def _parted(labels: Rows, rows: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Return the rows that remain, and the `count` rows that are held out, class by class."""
    chosen = random_rows(labels[rows], count, seed)
    return np.delete(rows, chosen), rows[chosen]


def _mean_and_std(pixels: npt.NDArray[np.uint8], rows: Rows) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, from sums of whole numbers: exact in any order."""
    if not len(rows):
        return [], []
    total = np.zeros((2, pixels.shape[-1]), np.int64)
    for start in range(0, len(rows), 256):
        flat = pixels[rows[start : start + 256]].reshape(-1, pixels.shape[-1])
        total += [flat.sum(0, dtype=np.int64), np.square(flat, dtype=np.uint16).sum(0, dtype=np.int64)]
    mean, squares = total / (len(rows) * pixels[0, ..., 0].size)
    # A channel that never changes is only shifted.
    std = np.sqrt(np.maximum(squares - mean**2, 0))
    return (mean / 255).tolist(), (np.where(std > 0, std, 255) / 255).tolist()
