"""The image cache: images are decoded once, into files that are mapped into memory.

    <cache>/<hash>/images.npy  decoded images; the hash is of the source's files and of the preparation
    <cache>/<hash>/entry.json  classes, sizes, and checksums of the other files

A folder is written beside and renamed, so it is there completely or not at all. Checksums are compared on opening, and
a damaged folder is written again.
"""

import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import platformdirs
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from plures.errors import PluresError
from plures.files import digest, sealed, unsealed
from plures.lab.data.images import GREY_MODES, EncodedImage, decode, open_image, to_pixels, to_square
from plures.lab.data.sources import Source, expanded
from plures.lab.data.split import MOST_PIXELS_PER_SIDE

FORMAT = 3  # counts changes of the files' contents


class Entry(msgspec.Struct):
    """The contents of entry.json; `content` is a hash of the encoded images, their labels and their order."""

    content: str
    classes: list[str]
    splits: dict[str, tuple[int, int]]  # the first row of each, and the one after its last
    size: int
    channels: int
    checksums: dict[str, int]  # by file


class Cached(NamedTuple):
    """The decoded images of all splits, mapped into memory.

    `moments` are the sums of the pixels and of their squares, per image and channel: [N, 2, channels].
    """

    entry: Entry
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    moments: npt.NDArray[np.int64]


def cache_folder(given: str | Path | None = None) -> Path:
    """Return the folder of decoded images: as given, from PLURES_CACHE, or the system's folder for caches."""
    chosen = given or os.environ.get("PLURES_CACHE")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("plures", appauthor=False)


def open_cache(source: Source, cache: Path, size: int | None, channels: int | None) -> Cached:
    """Return the decoded images of a source; decode them first if that was not done before.

    If `size` is None, all images must have the same one. If `channels` is None, images are grey if all of them are.
    If several processes ask at the same time, one decodes and the others wait.
    """
    key = f"{FORMAT} {size} {channels} {source.signature}"
    folder = cache / digest(key.encode(errors="surrogateescape"), length=32)  # paths need not be UTF-8
    if found := _open(folder):
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            if not (found := _open(folder)):  # another process may have been faster
                _write(source, folder, size, channels)
                found = _open(folder)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PluresError(
            f"the image cache at {cache} cannot be written ({getattr(error, 'strerror', None) or error}): "
            "free some space, or choose another folder with cache_dir or PLURES_CACHE"
        ) from error
    if found is None:
        raise PluresError(f"the image cache at {cache} loses what is written to it: give another cache_dir")
    return found


def _open(folder: Path) -> Cached | None:
    """Map a folder into memory; return None if it is missing, incomplete or damaged."""
    try:
        entry = msgspec.json.decode(unsealed((folder / "entry.json").read_text()) or "", type=Entry)
        if any(_checksum(folder / name) != checksum for name, checksum in entry.checksums.items()):
            return None
        images = np.load(folder / "images.npy", mmap_mode="r")
        return Cached(entry, images, np.load(folder / "labels.npy"), np.load(folder / "moments.npy"))
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def _checksum(file: Path) -> int:
    return zlib.crc32(np.memmap(file, mode="r").data)


def _write(source: Source, folder: Path, size: int | None, channels: int | None) -> None:
    """Decode a source into a folder, which takes the place of a missing or damaged one when it is complete."""
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    beside.mkdir()
    try:
        entry = _decode(source, beside, size, channels)
        (beside / "entry.json").write_text(sealed(msgspec.json.encode(entry).decode()))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _decode(source: Source, folder: Path, given: int | None, channels: int | None) -> Entry:
    """Decode all splits, one after the other, into the files of a folder."""
    name, (classes, found) = source.name, source.read()
    for one in classes:
        try:
            one.encode()
        except UnicodeEncodeError:
            raise PluresError(f"the class name {one!r} is not written in UTF-8: rename the class") from None
    total, splits, number = hashlib.sha256(), {}, 0
    for split, images in sorted(found.items()):
        splits[split] = number, number + images.number
        number += images.number

    def encoded() -> Iterator[EncodedImage]:
        return (image for split in splits for image in found[split].read())

    first = next(encoded(), None)
    if first is None:
        raise PluresError(f"{name} contains no images")
    size = given or open_image(first.encoded, first.origin).width
    if size > MOST_PIXELS_PER_SIDE:
        raise PluresError(
            f"the images of {name} have {size:,} pixels per side, but at most {MOST_PIXELS_PER_SIDE:,} are possible: "
            "give a size"
        )
    if channels is None:
        grey = all(open_image(image.encoded, image.origin).mode in GREY_MODES for image in encoded())
        channels = 1 if grey else 3
    shape = number, size, size, channels
    needed, free = math.prod(shape), shutil.disk_usage(folder).free
    if needed > free:
        raise PluresError(
            f"decoded, {name} takes {needed:,} bytes, and the disk of {folder.parent} has {free:,} left: choose a "
            "smaller size, or another place with cache_dir or PLURES_CACHE"
        )

    def decoded() -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
        for split in splits:
            total.update(f"{split} {found[split].number}\n".encode())
            for image in found[split].read():
                total.update(f"{image.label} {len(image.encoded)}\n".encode())
                total.update(image.encoded)
                opened = open_image(image.encoded, image.origin)
                if given is None and opened.size != (size, size):
                    raise PluresError(
                        f"the images of {name} are not all square and of one size ({image.origin} has {opened.width} x "
                        f"{opened.height} pixels, the first image is {size} wide): give a size, "
                        f"such as size={min(size, 64)}"
                    )
                yield to_pixels(to_square(decode(opened, channels, image.origin), size)), image.label

    console, labels, moments = Console(stderr=True), [], []
    # Written piece by piece, not through a memory map: a full disk is then an error and not the end of the process.
    with (folder / "images.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for pixels, label in track(
            decoded(), f"Decoding {name}", number, console=console, transient=True, disable=not console.is_terminal
        ):
            file.write(pixels.tobytes())
            labels.append(label)
            flat = pixels.reshape(-1, channels)
            moments.append([flat.sum(0, dtype=np.int64), np.square(flat, dtype=np.uint16).sum(0, dtype=np.int64)])
    np.save(folder / "labels.npy", np.array(labels, np.int64))
    np.save(folder / "moments.npy", np.array(moments, np.int64))
    checksums = {file.name: _checksum(file) for file in sorted(folder.glob("*.npy"))}
    return Entry(total.hexdigest(), classes, splits, size, channels, checksums)
