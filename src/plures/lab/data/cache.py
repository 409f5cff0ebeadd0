"""Read a data set and decode its images; the pixels are kept in a cache, because photographs take long to decode.

The cache has one file per data set and size, named by a hash of the encoded images. Without a place for it, the images
are decoded each time.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import platformdirs
from rich.console import Console
from rich.progress import track

from plures.errors import PluresError
from plures.files import digest, replacing
from plures.lab.data.images import GREY_MODES, Contents, Images, decode, open_image, to_pixels, to_square
from plures.lab.data.sources import expanded
from plures.lab.data.split import MOST_PIXELS_PER_SIDE

log = logging.getLogger("plures")


class Decoded(NamedTuple):
    """The images of all splits: their classes, pixels [images, size, size, channels] and labels.

    `content` is a hash of the encoded images, their labels and their order.
    """

    content: str
    classes: list[str]
    splits: dict[str, tuple[int, int]]  # the first row of each, and the one after its last
    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def cache_folder() -> Path:
    """Return the folder of decoded images: PLURES_CACHE, or the system's folder for caches."""
    chosen = os.environ.get("PLURES_CACHE")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("plures", appauthor=False)


def decoded_images(name: str, contents: Contents, cache: Path, given: int | None, channels: int | None) -> Decoded:
    """Read a data set, and decode its images to the size that is given if they are not in the cache.

    Without a size, all images must have the same one. If `channels` is None, images are grey if all of them are.
    """
    classes, found = contents
    for one in classes:
        try:
            one.encode()
        except UnicodeEncodeError:
            raise PluresError(f"the class name {one!r} is not written in UTF-8: rename the class") from None
    total, grey, size = hashlib.sha256(), True, given
    labels: list[int] = []
    splits: dict[str, tuple[int, int]] = {}
    for split, images in sorted(found.items()):
        first = len(labels)
        total.update(f"{split} {images.number}\n".encode())
        for image in images.read():
            total.update(f"{image.label} {len(image.encoded)}\n".encode())
            total.update(image.encoded)
            labels.append(image.label)
            if given is not None and (channels is not None or not grey):
                continue  # nothing is to be learned from its header
            opened = open_image(image.encoded, image.origin)
            grey &= opened.mode in GREY_MODES
            size = size or opened.width
            if given is None and opened.size != (size, size):
                raise PluresError(
                    f"the images of {name} are not all square and of one size ({image.origin} has {opened.width} x "
                    f"{opened.height} pixels, the first image is {size} wide): give a size, "
                    f"such as size={min(size, 64)}"
                )
        splits[split] = first, len(labels)
    if size is None or not labels:
        raise PluresError(f"{name} contains no images")
    if size > MOST_PIXELS_PER_SIDE:
        raise PluresError(
            f"the images of {name} have {size:,} pixels per side, but at most {MOST_PIXELS_PER_SIDE:,} are possible: "
            "give a size"
        )
    content, shape = total.hexdigest(), (len(labels), size, size, channels or (1 if grey else 3))
    path = cache / f"{digest(f'{content} {shape}'.encode(), length=32)}.npy"
    try:
        pixels = np.load(path, mmap_mode="r")
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise ValueError("it has other pixels")
    except (OSError, ValueError, EOFError):  # missing or damaged
        pixels = _decoded(name, [found[split] for split in splits], shape)
        try:
            with replacing(path) as beside, beside.open("wb") as file:
                np.save(file, pixels)
        except PluresError as error:
            log.warning("the decoded images are not kept; choose another folder with PLURES_CACHE: %s", error)
    return Decoded(content, classes, splits, pixels, np.array(labels, np.int64))


def _decoded(name: str, parts: list[Images], shape: tuple[int, int, int, int]) -> npt.NDArray[np.uint8]:
    try:
        pixels = np.empty(shape, np.uint8)
    except (MemoryError, ValueError) as error:
        raise PluresError(f"decoded, {name} does not fit into the memory: choose a smaller size, or a part") from error
    console = Console(stderr=True)
    images, hidden = (image for part in parts for image in part.read()), not console.is_terminal
    for row, image in enumerate(
        track(images, f"Decoding {name}", len(pixels), console=console, transient=True, disable=hidden)
    ):
        opened = open_image(image.encoded, image.origin)
        pixels[row] = to_pixels(to_square(decode(opened, shape[3], image.origin), shape[1]))
    return pixels
