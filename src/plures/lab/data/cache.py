"""The image cache: images are decoded once, into files that are mapped into memory.

    <cache>/<hash>/train-images.npy  decoded images; the hash is of the source's files and of the preparation
    <cache>/<hash>/entry.json        classes, sizes, and checksums of the other files

A folder is written beside and renamed, so it is there completely or not at all. Checksums are compared on opening, and
a damaged folder is written again.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import platformdirs
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from plures.errors import PluresError
from plures.files import digest, sealed, unsealed
from plures.lab.data.images import (
    GREY_MODES,
    Contents,
    EncodedImage,
    Source,
    decode,
    open_image,
    to_pixels,
    to_square,
)
from plures.lab.data.sources import expanded
from plures.lab.data.split import MOST_PIXELS_PER_SIDE

FORMAT = 2  # counts changes of the files' contents
CHUNK = 256  # images that are decoded before they are written,
CHUNK_BYTES = 2**25  # or fewer, if they have more bytes than this

T = TypeVar("T")


class Entry(msgspec.Struct):
    """The contents of entry.json.

    `content` is a hash of the encoded images, their labels and their order.
    """

    content: str
    classes: list[str]
    rows: dict[str, int]  # by split
    size: int
    channels: int
    checksums: dict[str, int]  # by file


@dataclass(frozen=True, eq=False)
class CachedSplit:
    """The decoded images of one split, mapped into memory.

        cached.splits["train"].images.shape  # (50000, 32, 32, 3)

    `moments` are the sums of the pixels and of their squares, per image and channel: [N, 2, channels].
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    moments: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CachedData:
    """A decoded data set.

    open_cache(find_source("digits", None), cache, size=None, channels=None).entry.size  # 8
    """

    entry: Entry
    splits: dict[str, CachedSplit]


class _HasColour(Exception):  # noqa: N818 (not an error)
    """An image has colour, and all were expected to be grey."""


def cache_folder(given: str | Path | None = None) -> Path:
    """Return the folder of decoded images: as given, from PLURES_CACHE, or the system's folder for caches.

    cache_folder()  # ~/.cache/plures on Linux
    """
    chosen = given or os.environ.get("PLURES_CACHE")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("plures", appauthor=False)


def open_cache(source: Source, cache: Path, size: int | None, channels: int | None) -> CachedData:
    """Return the decoded images of a source; decode them first if that was not done before.

        open_cache(source, cache, size=32, channels=3).splits["train"].images

    If `size` is None, all images must have the same one. If `channels` is None, images are grey if all of them are.
    If several processes ask at the same time, one decodes and the others wait.
    """
    key = f"{FORMAT} {size} {channels} {source.signature}"
    folder = cache / digest(key.encode(errors="surrogateescape"), length=32)  # paths need not be UTF-8
    found = _open(folder)
    if found is not None:
        return found
    with _writing(cache):
        found = _open(folder)  # another process may have been faster
        if found is None:
            contents = source.read()
            with _replacing(folder) as beside:
                try:
                    entry = _decode(source.name, contents, beside, size, channels or 1, only_grey=channels is None)
                except _HasColour:
                    entry = _decode(source.name, contents, beside, size, 3)
                (beside / "entry.json").write_text(sealed(msgspec.json.encode(entry).decode()))
            found = _open(folder)
    if found is None:
        raise PluresError(f"the image cache at {cache} loses what is written to it: give another cache_dir")
    return found


def _decode(
    name: str, contents: Contents, folder: Path, given: int | None, channels: int, *, only_grey: bool = False
) -> Entry:
    """Decode all splits into the files of a folder."""
    splits = dict(sorted(contents.splits.items()))
    first = next((image for images in splits.values() for image in images.read()), None)
    if first is None:
        raise PluresError(f"{name} contains no images")
    size = given or _own_size(name, first)
    rows = {split: images.count for split, images in splits.items()}
    _check_room(name, folder, sum(rows.values()) * size * size * channels)
    total = hashlib.sha256()
    checksums: dict[str, int] = {}

    def decoded(image: EncodedImage) -> tuple[npt.NDArray[np.uint8], int]:
        total.update(f"{image.label} {len(image.encoded)}\n".encode())
        total.update(image.encoded)
        opened = open_image(image.encoded, image.origin)
        if only_grey and opened.mode not in GREY_MODES:
            raise _HasColour
        if given is None and opened.size != (size, size):
            raise PluresError(
                f"the images of {name} are not all square and of one size ({image.origin} has {opened.width} x "
                f"{opened.height} pixels, the first image {size} x {size}): give a size, such as size={min(size, 64)}"
            )
        return to_pixels(to_square(decode(opened, channels, image.origin), size)), image.label

    for split, images in splits.items():
        total.update(f"{split} {images.count}\n".encode())
        at_once = max(1, min(CHUNK, CHUNK_BYTES // (size * size * channels)))
        every = _progress(map(decoded, images.read()), images.count, f"Decoding {name} ({split})")
        shape = images.count, size, size, channels
        labels, moments = [np.empty(0, np.int64)], [np.empty((0, 2, channels), np.int64)]
        # Written piece by piece, not through a memory map: a full disk is then an error and not the end of the process.
        with (folder / f"{split}-images.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            while chunk := list(islice(every, at_once)):
                pixels = np.stack([image for image, _ in chunk])
                file.write(pixels.tobytes())
                labels.append(np.array([label for _, label in chunk], np.int64))
                flat = pixels.reshape(len(pixels), -1, channels)
                squares = np.square(flat, dtype=np.uint16)
                moments.append(np.stack([flat.sum(1, dtype=np.int64), squares.sum(1, dtype=np.int64)], axis=1))
        np.save(folder / f"{split}-labels.npy", np.concatenate(labels))
        np.save(folder / f"{split}-moments.npy", np.concatenate(moments))
        checksums |= {file: _checksum(folder / file) for file in _names(split)}
    return Entry(total.hexdigest(), list(contents.classes), rows, size, channels, checksums)


def _own_size(name: str, first: EncodedImage) -> int:
    """Return the side of the first image, which all others must have."""
    width, height = open_image(first.encoded, first.origin).size
    if width != height:
        raise PluresError(
            f"the images of {name} are not all square and of one size ({first.origin} has {width} x {height} pixels): "
            f"give a size, such as size={min(width, height, 64)}"
        )
    if width > MOST_PIXELS_PER_SIDE:
        raise PluresError(
            f"the images of {name} have {width:,} pixels per side, but at most {MOST_PIXELS_PER_SIDE:,} are possible: "
            "give a size"
        )
    return width


def _open(folder: Path) -> CachedData | None:
    """Map a folder into memory; return None if it is missing, incomplete or damaged."""
    try:
        entry = msgspec.json.decode(unsealed((folder / "entry.json").read_text()) or "", type=Entry)
        splits = {}
        for split, rows in entry.rows.items():
            names = _names(split)
            if any(_checksum(folder / name) != entry.checksums[name] for name in names):
                return None
            images = np.load(folder / names[0], mmap_mode="r")
            labels, moments = (np.load(folder / name) for name in names[1:])
            if (images.shape, len(labels)) != ((rows, entry.size, entry.size, entry.channels), rows):
                return None
            splits[split] = CachedSplit(images, labels, moments)
        return CachedData(entry, splits)
    except (OSError, ValueError, LookupError, EOFError, msgspec.DecodeError):
        return None


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then takes the place of a missing or damaged one."""
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    try:
        beside.mkdir(parents=True)
        yield beside
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_room(name: str, folder: Path, needed: int) -> None:
    """Raise an error at the start if the disk has too little room, rather than fill it first."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PluresError(
            f"decoded, {name} takes {needed:,} bytes, and the disk of {folder.parent} has {free:,} left: choose a "
            "smaller size, or another place with cache_dir or PLURES_CACHE"
        )


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Let one process write at a time, and turn errors of the disk into one sentence."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PluresError(
            f"the image cache at {cache} cannot be written ({getattr(error, 'strerror', None) or error}): "
            "free some space, or choose another folder with cache_dir or PLURES_CACHE"
        ) from error


def _progress(images: Iterable[T], count: int, description: str) -> Iterator[T]:
    """Return an iterator with a progress bar, if standard error is a terminal."""
    console = Console(stderr=True)
    return iter(track(images, description, count, console=console, transient=True, disable=not console.is_terminal))


def _names(split: str) -> list[str]:
    return [f"{split}-{kind}.npy" for kind in ("images", "labels", "moments")]


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            total = zlib.crc32(piece, total)
    return total
