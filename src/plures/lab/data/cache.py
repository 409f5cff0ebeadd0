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
from itertools import islice
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
from plures.lab.data.images import GREY_MODES, Contents, EncodedImage, decode, open_image, to_pixels, to_square
from plures.lab.data.sources import Source, expanded
from plures.lab.data.split import MOST_PIXELS_PER_SIDE

FORMAT = 2  # counts changes of the files' contents
KINDS = ("images", "labels", "moments")  # one file of each per split
CHUNK = 256  # images that are decoded before they are written,
CHUNK_BYTES = 2**25  # or fewer, if they have more bytes than this


class Entry(msgspec.Struct):
    """The contents of entry.json; `content` is a hash of the encoded images, their labels and their order."""

    content: str
    classes: list[str]
    rows: dict[str, int]  # by split
    size: int
    channels: int
    checksums: dict[str, int]  # by file


class CachedSplit(NamedTuple):
    """The decoded images of one split, mapped into memory.

    `moments` are the sums of the pixels and of their squares, per image and channel: [N, 2, channels].
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    moments: npt.NDArray[np.int64]


Cached = tuple[Entry, dict[str, CachedSplit]]


class _HasColour(Exception):  # noqa: N818 (not an error)
    """An image has colour, and all were expected to be grey."""


def cache_folder(given: str | Path | None = None) -> Path:
    """Return the folder of decoded images: as given, from PLURES_CACHE, or the system's folder for caches.

    cache_folder()  # ~/.cache/plures on Linux
    """
    chosen = given or os.environ.get("PLURES_CACHE")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("plures", appauthor=False)


def open_cache(source: Source, cache: Path, size: int | None, channels: int | None) -> Cached:
    """Return the decoded images of a source; decode them first if that was not done before.

    If `size` is None, all images must have the same one. If `channels` is None, images are grey if all of them are.
    If several processes ask at the same time, one decodes and the others wait.
    """
    key = f"{FORMAT} {size} {channels} {source.signature}"
    folder = cache / digest(key.encode(errors="surrogateescape"), length=32)  # paths need not be UTF-8
    found = _open(folder)
    if found is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            found = _open(folder)  # another process may have been faster
            if found is None:
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
        splits = {}
        for split in entry.rows:
            images, labels, moments = (folder / f"{split}-{kind}.npy" for kind in KINDS)
            splits[split] = CachedSplit(np.load(images, mmap_mode="r"), np.load(labels), np.load(moments))
        return entry, splits
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def _checksum(file: Path) -> int:
    return zlib.crc32(np.memmap(file, mode="r").data)


def _write(source: Source, folder: Path, size: int | None, channels: int | None) -> None:
    """Decode a source into a folder, which takes the place of a missing or damaged one when it is complete."""
    contents = source.read()
    for name in contents[0]:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise PluresError(f"the class name {name!r} is not written in UTF-8: rename the class") from None
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    beside.mkdir()
    try:
        try:
            entry = _decode(source.name, contents, beside, size, channels or 1, only_grey=channels is None)
        except _HasColour:
            entry = _decode(source.name, contents, beside, size, 3)
        (beside / "entry.json").write_text(sealed(msgspec.json.encode(entry).decode()))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _decode(
    name: str, contents: Contents, folder: Path, given: int | None, channels: int, *, only_grey: bool = False
) -> Entry:
    """Decode all splits into the files of a folder."""
    classes, splits = contents[0], dict(sorted(contents[1].items()))
    first = next((image for images in splits.values() for image in images.read()), None)
    if first is None:
        raise PluresError(f"{name} contains no images")
    size = given or open_image(first.encoded, first.origin).width
    if size > MOST_PIXELS_PER_SIDE:
        raise PluresError(
            f"the images of {name} have {size:,} pixels per side, but at most {MOST_PIXELS_PER_SIDE:,} are possible: "
            "give a size"
        )
    rows = {split: images.number for split, images in splits.items()}
    needed, free = sum(rows.values()) * size * size * channels, shutil.disk_usage(folder).free
    if needed > free:
        raise PluresError(
            f"decoded, {name} takes {needed:,} bytes, and the disk of {folder.parent} has {free:,} left: choose a "
            "smaller size, or another place with cache_dir or PLURES_CACHE"
        )
    total, console = hashlib.sha256(), Console(stderr=True)

    def decoded(image: EncodedImage) -> tuple[npt.NDArray[np.uint8], int]:
        total.update(f"{image.label} {len(image.encoded)}\n".encode())
        total.update(image.encoded)
        opened = open_image(image.encoded, image.origin)
        if only_grey and opened.mode not in GREY_MODES:
            raise _HasColour
        if given is None and opened.size != (size, size):
            raise PluresError(
                f"the images of {name} are not all square and of one size ({image.origin} has {opened.width} x "
                f"{opened.height} pixels, the first image is {size} wide): give a size, such as size={min(size, 64)}"
            )
        return to_pixels(to_square(decode(opened, channels, image.origin), size)), image.label

    for split, images in splits.items():
        total.update(f"{split} {images.number}\n".encode())
        at_once = max(1, min(CHUNK, CHUNK_BYTES // (size * size * channels)))
        every = track(
            map(decoded, images.read()),
            f"Decoding {name} ({split})",
            images.number,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        every = iter(every)
        shape = images.number, size, size, channels
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
    checksums = {file.name: _checksum(file) for file in sorted(folder.glob("*.npy"))}
    return Entry(total.hexdigest(), classes, rows, size, channels, checksums)
