"""Pictures are decoded once, into files that are mapped into memory.

    <cache>/surveys/<hash>.json      what a source holds, by the names, sizes and times of its files
    <cache>/<hash>/train-images.npy  decoded pictures, by the bytes of the pictures and their preparation

A folder is written beside and renamed, so it is there completely or not at all. Checksums are compared on opening: a
damaged folder is written again.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from plures.errors import PluresError
from plures.lab.data.contents import Contents, Picture, Pictures, Source
from plures.lab.data.pictures import decode, is_grey, open_picture, to_pixels, to_square

FORMAT = 1  # counts changes of what the files hold
CHUNK = 256  # pictures that are decoded before they are written


@dataclass(frozen=True)
class Survey:
    """What stands in the heads of all pictures of a source.

        survey(find_source("cifar10", folder), cache).content

    `content` is a hash of the encoded pictures, their labels and their order; `shortest` and `longest` are the
    extreme sides in pixels.
    """

    content: str
    classes: list[str]
    rows: dict[str, int]
    grey: bool
    shortest: int
    longest: int


@dataclass(frozen=True, eq=False)
class CachedSplit:
    """The decoded pictures of one split, mapped into memory.

        cached["train"].images.shape  # (50000, 32, 32, 3)

    `moments` are the sums of the pixels and of their squares, per picture and channel: [N, 2, channels].
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    moments: npt.NDArray[np.int64]


def survey(source: Source, cache: Path) -> Survey:
    """Look at every picture of a source once, and remember what was seen.

    survey(source, Path("~/.cache/plures").expanduser())
    """
    file = cache / "surveys" / f"{_hash(f'{FORMAT} {source.signature}')}.json"
    try:
        return Survey(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        seen = _look(source.name, source.read())
    with _writing(cache):
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".partial")
        beside.write_text(json.dumps(asdict(seen)))
        beside.replace(file)
    return seen


def open_cache(source: Source, seen: Survey, cache: Path, size: int, channels: int) -> dict[str, CachedSplit]:
    """Return the decoded pictures of a source by split; decode them first if nobody has.

        open_cache(source, survey(source, cache), cache, size=32, channels=3)["train"].images

    Of several processes that ask at the same time one decodes and the others wait.
    """
    folder = cache / _hash(f"{FORMAT} {seen.content} {size} {channels}")
    entry = _open(folder)
    if entry is not None:
        return entry
    with _writing(cache):
        entry = _open(folder)  # another process may have been faster
        if entry is None:
            _build(source, folder, size, channels)
            entry = _open(folder)
    if entry is None:
        raise PluresError(f"The image cache at {cache} does not keep what is written to it: give another cache_dir.")
    return entry


def _look(name: str, contents: Contents) -> Survey:
    content, grey = hashlib.sha256(), True
    sides: set[int] = set()
    for split in sorted(contents.splits):
        content.update(f"{split} {len(contents.splits[split])}\n".encode())
        for encoded, label, origin in contents.splits[split]:
            content.update(f"{label} {len(encoded)}\n".encode())
            content.update(encoded)
            picture = open_picture(encoded, origin)
            grey = grey and is_grey(picture)
            sides.update(picture.size)
    if not sides:
        raise PluresError(f"{name} holds no pictures at all.")
    rows = {split: len(pictures) for split, pictures in contents.splits.items()}
    return Survey(content.hexdigest(), list(contents.classes), rows, grey, min(sides), max(sides))


def _build(source: Source, folder: Path, size: int, channels: int) -> None:
    """Write all splits into a folder beside, then put it in place of a missing or damaged one."""
    contents = source.read()
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    try:
        beside.mkdir(parents=True)
        checksums: dict[str, int] = {}
        for split, pictures in contents.splits.items():
            description = f"Decoding {source.name} ({split})"
            checksums |= _write_split(beside, split, pictures, size, channels, description)
        (beside / "checksums.json").write_text(json.dumps(checksums))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_split(
    folder: Path, split: str, pictures: Pictures, size: int, channels: int, description: str
) -> dict[str, int]:
    """Decode one split chunk by chunk; return the checksums of its files by name."""

    def pixels_of(picture: Picture) -> npt.NDArray[np.uint8]:
        decoded = decode(open_picture(picture.encoded, picture.origin), channels, picture.origin)
        return to_pixels(to_square(decoded, size))

    labels, moments = [np.empty(0, np.int64)], [np.empty((0, 2, channels), np.int64)]
    shape = (len(pictures), size, size, channels)
    name = f"{split}-images.npy"
    # Written piece by piece, not through a memory map: a full disk is then an error and not the end of the process.
    with (folder / name).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for chunk in _progress(_chunks(pictures), len(pictures), description):
            images = np.stack([pixels_of(picture) for picture in chunk])
            file.write(images.tobytes())
            labels.append(np.array([picture.label for picture in chunk], np.int64))
            wide = images.reshape(len(images), -1, channels).astype(np.int64)
            moments.append(np.stack([wide.sum(1), (wide * wide).sum(1)], axis=1))
    np.save(folder / f"{split}-labels.npy", np.concatenate(labels))
    np.save(folder / f"{split}-moments.npy", np.concatenate(moments))
    return {file.name: _checksum(file) for file in folder.glob(f"{split}-*.npy")}


def _open(folder: Path) -> dict[str, CachedSplit] | None:
    """Map an entry into memory; None if it is missing, incomplete or damaged."""
    try:
        checksums: dict[str, int] = json.loads((folder / "checksums.json").read_text())
        if any(_checksum(folder / name) != checksum for name, checksum in checksums.items()):
            return None
        splits = [name.removesuffix("-images.npy") for name in checksums if name.endswith("-images.npy")]
        return {
            split: CachedSplit(
                images=np.load(folder / f"{split}-images.npy", mmap_mode="r"),
                labels=np.load(folder / f"{split}-labels.npy"),
                moments=np.load(folder / f"{split}-moments.npy"),
            )
            for split in splits
        }
    except (OSError, ValueError):
        return None


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Let one process write at a time, and put what the disk says into a sentence."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            yield
    except OSError as error:
        raise PluresError(
            f"The image cache at {cache} cannot be written ({error.strerror or error}): "
            "make room or give another place with cache_dir or PLURES_CACHE."
        ) from error


def _chunks(pictures: Pictures) -> Iterator[list[Picture]]:
    remaining = iter(pictures)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def _progress(chunks: Iterator[list[Picture]], pictures: int, description: str) -> Iterable[list[Picture]]:
    """Show a bar that vanishes when it is done, to people only."""
    console = Console(stderr=True)
    total = -(-pictures // CHUNK)
    return track(chunks, description, total, console=console, transient=True, disable=not console.is_terminal)


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            total = zlib.crc32(piece, total)
    return total


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
