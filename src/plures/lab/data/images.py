"""Image files, and how a file becomes the pixels of a network's input.

Files may come from anywhere: only regular files are opened, sizes are bounded before anything is decoded, and every
failure is one sentence that names the file.
"""

import io
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from plures.errors import PluresError, visible
from plures.files import told
from plures.lab.data.split import DataInfo

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Formats that contain nothing but pixels. Pillow knows others, and starts a program for some of them (EPS).
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MOST_BYTES = 2**28  # of an image file
MOST_PIXELS = 89_478_485  # of an image; Pillow, too, begins to warn here
GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F")  # 16-bit, 32-bit and float pixels, which do not fit into 8 bits

log = logging.getLogger("plures")


class TooLarge(PluresError):  # noqa: N818 (the name says it)
    """An image has more bytes or pixels than are read."""


class EncodedImage(NamedTuple):
    """One labelled image, still encoded; `origin` is its name in error messages."""

    encoded: bytes
    label: int
    origin: str


class Images(NamedTuple):
    """The images of one split, in a fixed order; `read` starts from the first each time."""

    number: int
    read: Callable[[], Iterator[EncodedImage]]


Contents = tuple[list[str], dict[str, Images]]  # the class names of a data set, and its images by split


def ordinary(path: str | Path) -> Path:
    """Return the path of a regular file; raise an error for a folder, a device or a pipe, which would block."""
    with told("read", path):
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise PluresError(f"{path} is not a regular file")
    return Path(path)


def read_file(path: str | Path) -> bytes:
    """Read an image file, if it is a regular file of at most MOST_BYTES."""
    with told("read", path), ordinary(path).open("rb") as file:
        encoded = file.read(MOST_BYTES + 1)
    if len(encoded) > MOST_BYTES:
        raise TooLarge(f"{path} is too large: image files may have at most {MOST_BYTES:,} bytes")
    return encoded


def images_below(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders in alphabetical order, without hidden files."""

    def refuse(error: OSError) -> None:
        raise PluresError(f"cannot read {error.filename or folder}: {error.strerror}") from error

    found = [Path(here, name) for here, _, names in os.walk(folder, onerror=refuse) for name in names]
    images = (file for file in found if file.suffix.lower() in EXTENSIONS and not file.name.startswith("."))
    return sorted(images, key=lambda file: file.relative_to(folder).as_posix())


def open_image(encoded: bytes, origin: str) -> Image.Image:
    """Read the header of an image: size and mode are known then, but no pixel is decoded."""
    too_large = f"{origin} is too large: images may have at most {MOST_PIXELS:,} pixels; make it smaller"
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(too_large) from error
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise PluresError(f"{origin} is damaged or not an image: remove it or save it again as PNG or JPEG") from error
    if image.width * image.height > MOST_PIXELS:
        raise TooLarge(too_large)
    if image.mode.startswith(DEEP_MODES):
        raise PluresError(f"{origin} has pixels of more than 8 bits (mode {image.mode}): convert it to 8 bits")
    return image


def decode(image: Image.Image, channels: int, origin: str) -> Image.Image:
    """Decode the pixels: upright, transparent parts on white, grey (1 channel) or RGB (3 channels)."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
        if "A" in image.getbands() or "transparency" in image.info:
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        image.load()
        mode = "L" if channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)
    except MemoryError as error:
        raise TooLarge(f"{origin} is too large for the free memory: make it smaller") from error
    except Exception as error:  # as above: a truncated file is only noticed here
        raise PluresError(f"{origin} is damaged: remove it or save it again as PNG or JPEG") from error


def to_square(image: Image.Image, size: int) -> Image.Image:
    """Resize an image to size x size.

    A square image whose side is a multiple of `size` is averaged down, block by block. Otherwise the shorter side is
    resized to `size` (bicubic, antialiased), and the middle of the longer side is kept.
    """
    width, height = image.size
    if width == height and width % size == 0:
        return image.reduce(width // size) if width > size else image
    shorter = min(width, height)
    resized = max(size, round(width * size / shorter)), max(size, round(height * size / shorter))
    if resized[0] * resized[1] > MOST_PIXELS:  # very long: cut out the middle first, at the cost of the last bit
        return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return centre(image.resize(resized, Image.Resampling.BICUBIC), size)


def centre(image: Image.Image, size: int) -> Image.Image:
    """Return the middle size x size pixels."""
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def to_pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Return the pixels as [height, width, channels], also for a grey image."""
    return np.asarray(image).reshape(image.height, image.width, -1)


def fitted(image: Image.Image, info: DataInfo) -> npt.NDArray[np.uint8]:
    """Return the pixels of a decoded image as a network of some data takes them."""
    return to_pixels(centre(to_square(image, info.cache_size), info.size)).copy()


def read_image(path: str | Path, info: DataInfo) -> npt.NDArray[np.uint8]:
    """Read an image file and prepare it like the images of a data set: uint8 [size, size, channels].

    Images of any size are resized and cut to the middle, and converted to grey or colour as the data set is. A warning
    is logged for each change that the data set's own images did not need.
    """
    origin = str(path)
    image = open_image(read_file(path), origin)
    changes = ["converted to grey"] if info.channels == 1 and image.mode not in GREY_MODES else []
    image = decode(image, info.channels, origin)
    if not info.resize and image.size != (info.size, info.size):
        changes.append(f"brought from {image.width} x {image.height} to {info.size} x {info.size} pixels")
    if changes:
        log.warning("%s was %s, as the network needs it", visible(origin), " and ".join(changes))
    return fitted(image, info)
