"""Pictures in folders: one folder per class."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plures.errors import PluresError
from plures.lab.data.contents import SPLIT_NAMES, Contents, Picture, by_split

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


@dataclass(frozen=True)
class FolderPictures:
    """Picture files with their classes, in a fixed order.

    FolderPictures(files=[Path("train/cat/1.png")], labels=[0])
    """

    files: Sequence[Path]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Picture]:
        for file, label in zip(self.files, self.labels, strict=True):
            try:
                encoded = file.read_bytes()
            except OSError as error:
                raise PluresError(f"{file} cannot be read ({error.strerror}).") from error
            yield Picture(encoded, label, str(file))


def image_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Find the picture files of a folder by split and class.

        image_files(Path("birds"))  # {"train": {"wren": [birds/train/wren/1.png, ...], ...}, "test": {...}}

    Empty when there are none. Without a folder called train or test, the folders are the classes of a train split.
    Classes and, within a class, files stand in alphabetical order.
    """
    parts = {entry.name: entry for entry in _folders(folder) if entry.name.lower() in SPLIT_NAMES}
    splits = by_split(parts, str(folder)) if parts else {"train": folder}
    found: dict[str, dict[str, list[Path]]] = {}
    for split, part in splits.items():
        classes = {entry.name: files for entry in _folders(part) if (files := _pictures(entry))}
        if classes:
            found[split] = classes
    return found


def read_image_folder(found: Mapping[str, Mapping[str, Sequence[Path]]], place: str) -> Contents:
    """Label the picture files: the classes are the folders of the train split, numbered alphabetically.

    read_image_folder(image_files(Path("birds")), "birds")
    """
    first = next(split for split in ("train", "validation", "test") if split in found)
    classes = sorted(found[first])
    splits = {}
    for split, by_class in found.items():
        unknown = sorted(set(by_class) - set(classes))
        if unknown:
            raise PluresError(
                f"{place} has the class folder {unknown[0]!r} in its {split} split, but not in its {first} split: "
                "name the class folders of all splits alike."
            )
        rows = [(file, label) for label, name in enumerate(classes) for file in by_class.get(name, ())]
        splits[split] = FolderPictures([file for file, _ in rows], [label for _, label in rows])
    return Contents(classes, splits)


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.suffix.lower() in EXTENSIONS and not file.name.startswith("."))
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
