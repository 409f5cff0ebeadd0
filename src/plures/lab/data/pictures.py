"""Image files: what a source provides, and how a file becomes the pixels of a network's input.

Files may come from anywhere: what is not a regular file is not opened, sizes are bounded before anything is decoded,
and whatever goes wrong is one sentence about the file.
"""

import io
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from plures.errors import PluresError, visible
from plures.lab.data.split import DataInfo

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Formats that are nothing but pixels. Pillow knows others, and starts a program for some of them (EPS).
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MOST_BYTES = 2**28  # of a picture file
MOST_PIXELS = 89_478_485  # of a picture; where Pillow begins to warn, too
GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F")  # 16-bit, 32-bit and float pixels, which 8 bits cannot hold

log = logging.getLogger("plures")

T = TypeVar("T")

# The names that people give to the three parts of a data set.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "test": "test",
}


class TooLarge(PluresError):  # noqa: N818 (it says it)
    """A picture of more bytes or pixels than are read."""


class Picture(NamedTuple):
    """One labelled picture, still encoded.

        Picture(encoded=file.read_bytes(), label=3, origin="birds/train/wren/07.jpg")

    `origin` is what an error message calls it.
    """

    encoded: bytes
    label: int
    origin: str


class Pictures(Protocol):
    """The pictures of one split in a fixed order, to be read as often as needed.

    for encoded, label, origin in contents.splits["train"]: ...
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Picture]: ...


@dataclass(frozen=True)
class Contents:
    """The class names and the splits of a data set."""

    classes: Sequence[str]
    splits: Mapping[str, Pictures]

    def __post_init__(self) -> None:
        for name in self.classes:
            try:
                name.encode()
            except UnicodeEncodeError:
                raise PluresError(f"the class name {name!r} is not written in UTF-8: rename the class") from None


def by_split(found: Mapping[str, T], place: str) -> dict[str, T]:
    """Sort the parts of a data set into train, validation and test by their names.

        by_split({"train": a, "valid": b}, "birds")  # {"train": a, "test": b}

    Parts with other names are left out. A validation split without a test split is the test split: Tiny-ImageNet keeps
    its test labels secret, and everybody reports figures for its validation pictures.
    """
    splits: dict[str, T] = {}
    for name, part in found.items():
        split = SPLIT_NAMES.get(name.lower())
        if split is None:
            continue
        if split in splits:
            raise PluresError(f"{place} has two folders or files that could be its {split} split: keep one of them")
        splits[split] = part
    if not splits:
        parts = ", ".join(sorted(found)) or "(none)"
        raise PluresError(f"{place} has the splits {parts}, but needs one called train or test")
    if "validation" in splits and "test" not in splits:
        splits["test"] = splits.pop("validation")
    return splits


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn what the file system says of a path into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PluresError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def ordinary(path: str | Path) -> Path:
    """Refuse a path that is not one of an ordinary file: a folder, a pipe, which would keep us waiting, a device."""
    with reading(path):
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise PluresError(f"{path} is not a regular file")
    return Path(path)


def read_file(path: str | Path) -> bytes:
    """Read a picture file, if it is an ordinary one of a sensible size."""
    with reading(path), ordinary(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        encoded = file.read(MOST_BYTES + 1) if size <= MOST_BYTES else b""
    if max(size, len(encoded)) > MOST_BYTES:
        raise TooLarge(f"{path} is too large: image files may have at most {MOST_BYTES:,} bytes")
    return encoded


def folders_in(folder: Path) -> list[Path]:
    """Find the folders in a folder, by name; hidden ones are left out."""
    with reading(folder):
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def pictures_below(folder: Path) -> list[Path]:
    """Find the picture files in a folder and the folders below, by name; hidden ones are left out."""
    found, waiting = [], [folder]
    while waiting:
        here = waiting.pop()
        with reading(here), os.scandir(here) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif path.suffix.lower() in EXTENSIONS and not path.name.startswith("."):
                    found.append(path)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def open_picture(encoded: bytes, origin: str) -> Image.Image:
    """Read the head of a picture: size and mode are known, pixels are not decoded yet."""
    too_large = f"{origin} is too large: images may have at most {MOST_PIXELS:,} pixels; make it smaller"
    try:
        picture = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(too_large) from error
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise PluresError(f"{origin} is damaged or not an image: remove it or save it again as PNG or JPEG") from error
    if picture.width * picture.height > MOST_PIXELS:
        raise TooLarge(too_large)
    if min(picture.size) < 1:
        raise PluresError(f"{origin} is an image without pixels: remove it or save it again as PNG or JPEG")
    if picture.mode.startswith(DEEP_MODES):
        raise PluresError(f"{origin} has pixels of more than 8 bits (mode {picture.mode}): convert it to 8 bits")
    return picture


def is_grey(picture: Image.Image) -> bool:
    """Say whether a picture is stored without colour."""
    return picture.mode in GREY_MODES


def decode(picture: Image.Image, channels: int, origin: str) -> Image.Image:
    """Decode the pixels: upright, on white where transparent, grey (1 channel) or RGB (3 channels)."""
    try:
        ImageOps.exif_transpose(picture, in_place=True)
        if "A" in picture.getbands() or "transparency" in picture.info:
            layer = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        picture.load()
        mode = "L" if channels == 1 else "RGB"
        return picture if picture.mode == mode else picture.convert(mode)
    except MemoryError as error:
        raise TooLarge(f"{origin} is too large for the free memory: make it smaller") from error
    except Exception as error:  # as above: a truncated file shows itself only now
        raise PluresError(f"{origin} is damaged: remove it or save it again as PNG or JPEG") from error


def to_square(picture: Image.Image, size: int) -> Image.Image:
    """Bring a picture to size x size.

        to_square(picture, 16)

    A square picture whose side is a multiple of `size` is averaged down, pixel block by pixel block. Otherwise the
    shorter side is resized to `size` (bicubic, antialiased) and the middle of the longer one is kept.
    """
    width, height = picture.size
    if width == height and width % size == 0:
        return picture.reduce(width // size) if width > size else picture
    shorter = min(width, height)
    resized = max(size, round(width * size / shorter)), max(size, round(height * size / shorter))
    if resized[0] * resized[1] > MOST_PIXELS:  # a ribbon: cut the middle out first, at the cost of the last bit
        left, top = (width - shorter) / 2, (height - shorter) / 2
        return picture.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + shorter, top + shorter))
    return centre(picture.resize(resized, Image.Resampling.BICUBIC), size)


def centre(picture: Image.Image, size: int) -> Image.Image:
    """Keep the middle size x size pixels."""
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    return picture.crop((left, top, left + size, top + size))


def to_pixels(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """Return the pixels as [height, width, channels], also for a grey picture.

    to_pixels(picture).shape  # (32, 32, 3)
    """
    pixels = np.asarray(picture)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def read_image(path: str | Path, info: DataInfo) -> npt.NDArray[np.uint8]:
    """Read a picture file and prepare it as the pictures of a data set were: uint8 [size, size, channels].

        pixels = read_image("wren.jpg", data.info)
        images = data.normalise(torch.from_numpy(pixels)[None])  # what a network takes

    Pictures of any size are brought to the size of the data set and cut to the middle; grey and colour become what the
    data set has. What the data set's own pictures did not need is logged as a warning.
    """
    origin = str(path)
    picture = open_picture(read_file(path), origin)
    changes = ["converted to grey"] if info.channels == 1 and not is_grey(picture) else []
    picture = decode(picture, info.channels, origin)
    if not info.resize and picture.size != (info.size, info.size):
        changes.append(f"brought from {picture.width} x {picture.height} to {info.size} x {info.size} pixels")
    if changes:
        log.warning("%s was %s, as the network needs it", visible(origin), " and ".join(changes))
    return to_pixels(centre(to_square(picture, info.cache_size), info.size)).copy()
