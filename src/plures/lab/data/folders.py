"""Data sets in local folders: Parquet files, or images in a folder per class.

They are not read by `datasets`: it would keep a second copy of all images, promises neither their order nor a bound on
memory, and opens pipes and devices in a folder.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from plures.errors import PluresError
from plures.lab.data import arrow
from plures.lab.data.images import Contents, EncodedImage, Images, Source, images_below, read_file, reading

# Names of the three splits, as folders, files and hub data sets have them.
SPLIT_NAMES = {
    **{"train": "train", "training": "train", "test": "test"},
    **{"valid": "validation", "validation": "validation", "val": "validation"},
}

T = TypeVar("T")


def local_source(name: str, place: Path) -> Source:
    """Return the data set in a folder or Parquet file.

    local_source("birds", Path("data/birds"))
    """
    if not place.is_dir():
        if not place.is_file() or place.suffix != ".parquet":
            raise PluresError(f"{place} is neither a folder nor a .parquet file")
        split = "train" if SPLIT_NAMES.get(_first_word(place), "train") == "train" else "test"
        return _parquet_source(name, {split: [place]})
    if tables := _parquet_files(place):
        return _parquet_source(name, tables)
    if found := _image_files(place):
        every = (file for classes in found.values() for files in classes.values() for file in files)
        return Source(name, _signature("image folder", every), lambda: _read_folders(found, str(place)))
    raise PluresError(
        f"{place} contains neither train.parquet or test.parquet nor class folders of images: "
        "put images into train/CLASS/ and test/CLASS/, or only into CLASS/"
    )


def by_split(found: Mapping[str, T], place: str) -> dict[str, T]:
    """Sort the parts of a data set into train, validation and test by their names.

        by_split({"train": a, "valid": b}, "birds")  # {"train": a, "test": b}

    Parts with other names are left out. A validation split without a test split becomes the test split: Tiny-ImageNet
    keeps its test labels secret, and papers report figures for its validation images.
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


def _signature(kind: str, files: Iterable[Path]) -> str:
    """Return a text that changes with the path, size or time of any file."""
    lines = [kind]
    for file in files:
        with reading(file):
            state = file.stat()
        lines.append(f"{os.path.abspath(file)} {state.st_size} {state.st_mtime_ns}")  # noqa: PTH100 (keeps links)
    return "\n".join(lines)


def _folders_in(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def _parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of a folder by split; in a clone from the hub, they are in a subfolder."""
    files = _tables_in(folder)
    if not files:
        homes = [home for home in _folders_in(folder) if _tables_in(home)]
        if len(homes) > 1:
            raise PluresError(
                f"{folder} contains Parquet files in {', '.join(home.name for home in homes)}: give the path of one"
            )
        files = _tables_in(homes[0]) if homes else []
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(_first_word(file), []).append(file)
    return by_split(found, str(folder)) if found else {}


def _parquet_source(name: str, files: Mapping[str, Sequence[Path]]) -> Source:
    def read() -> Contents:
        return arrow.arrow_contents({split: list(map(arrow.parquet_table, part)) for split, part in files.items()})

    return Source(name, _signature("parquet", (file for part in files.values() for file in part)), read)


def _tables_in(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(file for file in folder.iterdir() if file.suffix == ".parquet")


def _first_word(file: Path) -> str:
    """Return the split in a name like train.parquet, train-00000-of-00002.parquet or train_0.parquet."""
    return re.split(r"[-_.]", file.name)[0].lower()


def _image_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the image files of a folder by split and class; without split folders, all are in the train split."""
    parts = {entry.name: entry for entry in _folders_in(folder) if entry.name.lower() in SPLIT_NAMES}
    splits = by_split(parts, str(folder)) if parts else {"train": folder}
    found = {}
    for split, part in splits.items():
        classes = {entry.name: files for entry in _folders_in(part) if (files := images_below(entry))}
        if classes:
            found[split] = classes
    return found


def _read_folders(found: Mapping[str, Mapping[str, Sequence[Path]]], place: str) -> Contents:
    """Label the image files: the classes are the folders of the train split, in alphabetical order."""
    first = next(split for split in ("train", "validation", "test") if split in found)
    classes = sorted(found[first])
    for split, by_class in found.items():
        if unknown := sorted(set(by_class) - set(classes)):
            raise PluresError(
                f"{place} has the class folder {unknown[0]!r} in its {split} split, but not in its {first} split: "
                "use the same class folders in all splits"
            )

    def images(by_class: Mapping[str, Sequence[Path]]) -> Images:
        rows = [(file, label) for label, name in enumerate(classes) for file in by_class.get(name, ())]
        return Images(len(rows), lambda: (EncodedImage(read_file(file), label, str(file)) for file, label in rows))

    return Contents(classes, {split: images(by_class) for split, by_class in found.items()})
