"""The image cache: images are decoded once, into files that are mapped into memory.

    <cache>/surveys/<hash>.json      what a source holds, by the names, sizes and times of its files
    <cache>/<hash>/train-images.npy  decoded pictures, by the bytes of the pictures and their preparation

Both are written beside and renamed, so they are there completely or not at all. Checksums are compared on opening: what
is damaged is made again. While pictures are decoded, their bytes are compared with the survey.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from plures.errors import PluresError
from plures.files import digest, write
from plures.lab.data.pictures import Contents, Picture, Pictures, decode, is_grey, open_picture, to_pixels, to_square
from plures.lab.data.sources import Source, expanded

FORMAT = 1  # counts changes of what the files hold
CHUNK = 256  # pictures that are decoded before they are written,
CHUNK_BYTES = 2**25  # or fewer where these are too many bytes


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


def cache_folder(given: str | Path | None = None) -> Path:
    """Return where decoded pictures are kept: as given, as PLURES_CACHE says, or where the system keeps caches.

    cache_folder()  # ~/.cache/plures on Linux
    """
    chosen = given or os.environ.get("PLURES_CACHE")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("plures", appauthor=False)


def survey(source: Source, cache: Path) -> Survey:
    """Look at every picture of a source once, and remember what was seen."""
    file = _survey_file(source, cache)
    try:
        stored = json.loads(file.read_bytes())
        if stored["checksum"] == _seal(stored["survey"]):
            return Survey(**stored["survey"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # missing or damaged
    seen = _look(source.name, source.read())
    with _writing(cache):
        write(file, json.dumps({"survey": asdict(seen), "checksum": _seal(asdict(seen))}).encode())
    return seen


def open_cache(source: Source, seen: Survey, cache: Path, size: int, channels: int) -> dict[str, CachedSplit]:
    """Return the decoded pictures of a source by split; decode them first if that was not done before.

        open_cache(source, survey(source, cache), cache, size=32, channels=3)["train"].images

    Of several processes that ask at the same time one decodes and the others wait.
    """
    shape = (size, size, channels)
    folder = cache / _hash(f"{FORMAT} {seen.content} {size} {channels}")
    entry = _open(folder, seen, shape)
    if entry is not None:
        return entry
    with _writing(cache):
        entry = _open(folder, seen, shape)  # another process may have been faster
        if entry is None:
            _check_room(source.name, cache, sum(seen.rows.values()) * size * size * channels)
            with _replacing(folder) as beside:
                if _decode(source, beside, shape) != seen.content:
                    _survey_file(source, cache).unlink(missing_ok=True)
                    raise PluresError(f"the images of {source.name} changed while they were read: start again")
            entry = _open(folder, seen, shape)
    if entry is None:
        raise PluresError(f"the image cache at {cache} loses what is written to it: give another cache_dir")
    return entry


class _Content:
    """A hash of encoded pictures, their labels and their order."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def of(self, contents: Contents) -> Iterator[tuple[str, Iterator[Picture]]]:
        """Give the splits in alphabetical order, and take in every picture that is passed on."""
        for split in sorted(contents.splits):
            yield split, self._pictures(split, contents.splits[split])

    def _pictures(self, split: str, pictures: Pictures) -> Iterator[Picture]:
        self._total.update(f"{split} {len(pictures)}\n".encode())
        for picture in pictures:
            self._total.update(f"{picture.label} {len(picture.encoded)}\n".encode())
            self._total.update(picture.encoded)
            yield picture

    def __str__(self) -> str:
        return self._total.hexdigest()


def _look(name: str, contents: Contents) -> Survey:
    content, grey = _Content(), True
    sides: set[int] = set()
    for _, pictures in content.of(contents):
        for encoded, _, origin in pictures:
            picture = open_picture(encoded, origin)
            grey = grey and is_grey(picture)
            sides.update(picture.size)
    if not sides:
        raise PluresError(f"{name} contains no images")
    rows = {split: len(pictures) for split, pictures in contents.splits.items()}
    return Survey(str(content), list(contents.classes), rows, grey, min(sides), max(sides))


def _decode(source: Source, folder: Path, shape: tuple[int, int, int]) -> str:
    """Decode all splits into the files of a folder; return their content."""
    contents, content = source.read(), _Content()
    checksums: dict[str, int] = {}
    for split, pictures in content.of(contents):
        count = len(contents.splits[split])
        chunks = _progress(pictures, count, f"Decoding {source.name} ({split})", bytes_each=int(np.prod(shape)))
        checksums |= _write_split(folder, split, chunks, (count, *shape))
    (folder / "checksums.json").write_text(json.dumps(checksums))
    return str(content)


def _write_split(
    folder: Path, split: str, chunks: Iterable[list[Picture]], shape: tuple[int, int, int, int]
) -> dict[str, int]:
    """Decode one split chunk by chunk; return the checksums of its files by name."""
    _, size, _, channels = shape

    def pixels_of(picture: Picture) -> npt.NDArray[np.uint8]:
        decoded = decode(open_picture(picture.encoded, picture.origin), channels, picture.origin)
        return to_pixels(to_square(decoded, size))

    labels, moments = [np.empty(0, np.int64)], [np.empty((0, 2, channels), np.int64)]
    # Written piece by piece, not through a memory map: a full disk is then an error and not the end of the process.
    with (folder / f"{split}-images.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for chunk in chunks:
            images = np.stack([pixels_of(picture) for picture in chunk])
            file.write(images.tobytes())
            labels.append(np.array([picture.label for picture in chunk], np.int64))
            rows = images.reshape(len(images), -1, channels)
            squares = np.square(rows, dtype=np.uint16)
            moments.append(np.stack([rows.sum(1, dtype=np.int64), squares.sum(1, dtype=np.int64)], axis=1))
    np.save(folder / f"{split}-labels.npy", np.concatenate(labels))
    np.save(folder / f"{split}-moments.npy", np.concatenate(moments))
    return {name: _checksum(folder / name) for name in _names(split)}


def _open(folder: Path, seen: Survey, shape: tuple[int, int, int]) -> dict[str, CachedSplit] | None:
    """Map an entry into memory; None if it is missing, incomplete or damaged."""
    try:
        checksums = json.loads((folder / "checksums.json").read_bytes())
        entry = {}
        for split, rows in seen.rows.items():
            names = _names(split)
            if any(_checksum(folder / name) != checksums[name] for name in names):
                return None
            images = np.load(folder / names[0], mmap_mode="r")
            labels, moments = (np.load(folder / name) for name in names[1:])
            if (images.shape, len(labels), len(moments)) != ((rows, *shape), rows, rows):
                return None
            entry[split] = CachedSplit(images, labels, moments)
        return entry
    except (OSError, ValueError, TypeError, LookupError, EOFError, RecursionError):
        return None


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Give a folder beside to fill, which then takes the place of a missing or damaged one."""
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    try:
        beside.mkdir(parents=True)
        yield beside
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_room(name: str, cache: Path, needed: int) -> None:
    """Refuse to fill a disk for hours when it is known from the start that it has no room."""
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise PluresError(
            f"decoded, {name} takes {needed:,} bytes, and the disk of {cache} has {free:,} left: choose a smaller "
            "size, or another place with cache_dir or PLURES_CACHE"
        )


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Let one process write at a time, and put what the disk says into a sentence."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PluresError(
            f"the image cache at {cache} cannot be written ({getattr(error, 'strerror', None) or error}): "
            "free some space, or choose another folder with cache_dir or PLURES_CACHE"
        ) from error


def _progress(pictures: Iterator[Picture], count: int, description: str, bytes_each: int) -> Iterable[list[Picture]]:
    """Take pictures chunk by chunk under a bar that vanishes when it is done and is shown to people only."""
    size = max(1, min(CHUNK, CHUNK_BYTES // bytes_each))
    console = Console(stderr=True)
    chunks = iter(lambda: list(islice(pictures, size)), [])
    total = -(-count // size)
    return track(chunks, description, total, console=console, transient=True, disable=not console.is_terminal)


def _names(split: str) -> list[str]:
    return [f"{split}-{kind}.npy" for kind in ("images", "labels", "moments")]


def _survey_file(source: Source, cache: Path) -> Path:
    return cache / "surveys" / f"{_hash(f'{FORMAT} {source.signature}')}.json"


def _seal(survey: dict[str, Any]) -> str:
    return digest(json.dumps(survey, sort_keys=True).encode(), length=32)


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            total = zlib.crc32(piece, total)
    return total


def _hash(text: str) -> str:
    return digest(text.encode(errors="surrogateescape"), length=32)  # paths need not be UTF-8
