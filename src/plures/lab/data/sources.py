"""Find a data set by its name: embedded, in a local folder or on the Hugging Face hub.

Adding a data set is one line in `HUB_IDS`: the name that people type and where the hub has it. Without the hub, a
folder of that name below the data directory does: train.parquet and test.parquet, or pictures in train/CLASS/ and
test/CLASS/. `python -c "from plures.lab.data import open_data; print(open_data('NAME').info)"` shows what was found.

Folders and Parquet files are read here and not by `datasets`: it would keep a second copy of all pictures, promises
neither their order nor a bound on memory, and opens pipes and devices that a folder may hold.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plures.checks import nearest
from plures.errors import PluresError
from plures.lab.data import arrow, pictures
from plures.lab.data.pictures import Contents, Picture
from plures.lab.data.split import stratified

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# Built-in names: hub id and, where the repository has several, the configuration.
HUB_IDS: dict[str, tuple[str, str | None]] = {
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "cub200": ("bentrevett/caltech-ucsd-birds-200-2011", None),
    "tiny-imagenet": ("zh-plus/tiny-imagenet", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "fashion-mnist": ("zalando-datasets/fashion_mnist", None),
    "mnist": ("ylecun/mnist", None),
}
DIGITS_TEST = 450  # a quarter of the 1,797
PATIENCE = 10  # seconds to wait for the first answer of the hub


@dataclass(frozen=True)
class Source:
    """A data set that has been found, but not read yet.

        Source(name="birds", signature="image folder ...", read=lambda: read_image_folder(folder))

    The signature is cheap to make and changes whenever the pictures may have changed.
    """

    name: str
    signature: str
    read: Callable[[], Contents]


def find_source(name: str, data_dir: Path | None) -> Source:
    """Find a data set: first `data_dir/name`, then a path, then the embedded digits or the hub.

        find_source("cifar10", Path("data"))

    A built-in name is never taken for a path in the working directory (a run folder may be called digits): write
    `./cifar10` for that.
    """
    built_in = ["digits", *HUB_IDS]
    accepted = f"use one of {', '.join(built_in)}, a folder, a .parquet file or a hub id owner/name"
    if not name:
        raise PluresError(f"no data is given: {accepted}")
    places = [data_dir / name] if data_dir is not None else []
    if name != "digits" and name not in HUB_IDS:
        places.append(expanded(name))
    for place in places:
        if _exists(place):
            return _local_source(name, place)
    looked = " and ".join(dict.fromkeys(str(place) for place in places))
    if name == "digits":
        return Source(name, "scikit-learn digits", _read_digits)
    hub_id, configuration = HUB_IDS.get(name, (name, None))
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", hub_id):
        # The signature is the name alone: once decoded, a hub set is opened without asking the hub again.
        return Source(
            name,
            f"hub {hub_id} {configuration}",
            lambda: _read_hub(hub_id, configuration, lambda answer: _missing(name, data_dir, looked, answer)),
        )
    near = nearest(name, built_in)
    raise PluresError(f"there is no data set {name!r}: looked for {looked}; {accepted}{near}")


def expanded(path: str | Path) -> Path:
    """Replace a leading ~ by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # a user who does not exist
        raise PluresError(f"{path} has no home folder: give the full path") from error


def _exists(place: Path) -> bool:
    with pictures.reading(place):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _missing(name: str, data_dir: Path | None, looked: str, answer: str) -> str:
    """Say in one sentence where a data set was looked for, what the hub said, and where to put it."""
    home = str(data_dir / name) if data_dir is not None else f"a folder {name!r} below the one that PLURES_DATA names"
    local = f"looked for {looked}" if looked else "no data folder was given (--data-dir or PLURES_DATA)"
    return (
        f"the data {name!r} were not found: {local}, and {answer}; "
        f"put train.parquet and test.parquet (or train/CLASS/*.png and test/CLASS/*.png) into {home}"
    )


def _local_source(name: str, place: Path) -> Source:
    if not place.is_dir():
        if not place.is_file() or place.suffix != ".parquet":
            raise PluresError(f"{place} is neither a folder nor a .parquet file")
        files = {arrow.split_of_file(place): [place]}
        return Source(name, _signature("parquet", [place]), lambda: arrow.read_parquet(files))
    if tables := arrow.parquet_files(place):
        signature = _signature("parquet", (file for part in tables.values() for file in part))
        return Source(name, signature, lambda: arrow.read_parquet(tables))
    if found := image_files(place):
        every = (file for classes in found.values() for files in classes.values() for file in files)
        return Source(name, _signature("image folder", every), lambda: read_image_folder(found, str(place)))
    raise PluresError(
        f"{place} contains neither train.parquet or test.parquet nor class folders of images: "
        "put images into train/CLASS/ and test/CLASS/, or only into CLASS/"
    )


def _signature(kind: str, files: Iterable[Path]) -> str:
    """Name the state of files without reading them: path, size and time of change."""
    lines = [kind]
    for file in files:
        with pictures.reading(file):
            state = file.stat()
        lines.append(f"{os.path.abspath(file)} {state.st_size} {state.st_mtime_ns}")  # noqa: PTH100 (keeps links)
    return "\n".join(lines)


def _read_digits() -> Contents:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # 0..16 becomes 0..255. PGM is the picture format that is nothing but a line of text before the pixels.
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    test = stratified(labels, DIGITS_TEST, seed=0)
    train = np.setdiff1d(np.arange(len(labels)), test)

    def pictures(rows: np.ndarray) -> list[Picture]:
        return [Picture(b"P5 8 8 255\n" + pixels[row].tobytes(), int(labels[row]), f"digit {row}") for row in rows]

    return Contents([str(digit) for digit in range(10)], {"train": pictures(train), "test": pictures(test)})


# --- a folder per class -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderPictures:
    """Picture files with their classes, in a fixed order."""

    files: Sequence[Path]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Picture]:
        for file, label in zip(self.files, self.labels, strict=True):
            yield Picture(pictures.read_file(file), label, str(file))


def image_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Find the picture files of a folder by split and class.

        image_files(Path("birds"))  # {"train": {"wren": [birds/train/wren/1.png, ...], ...}, "test": {...}}

    Empty when there are none. Without a folder called train or test, the folders are the classes of a train split.
    Classes and, within a class, files stand in alphabetical order.
    """
    parts = {entry.name: entry for entry in pictures.folders_in(folder) if entry.name.lower() in pictures.SPLIT_NAMES}
    splits = pictures.by_split(parts, str(folder)) if parts else {"train": folder}
    found: dict[str, dict[str, list[Path]]] = {}
    for split, part in splits.items():
        folders = {entry.name: pictures.pictures_below(entry) for entry in pictures.folders_in(part)}
        classes = {name: files for name, files in folders.items() if files}
        if classes:
            found[split] = classes
    return found


def read_image_folder(found: Mapping[str, Mapping[str, Sequence[Path]]], place: str) -> Contents:
    """Label the picture files: the classes are the folders of the train split, numbered alphabetically."""
    first = next(split for split in ("train", "validation", "test") if split in found)
    classes = sorted(found[first])
    splits = {}
    for split, by_class in found.items():
        unknown = sorted(set(by_class) - set(classes))
        if unknown:
            raise PluresError(
                f"{place} has the class folder {unknown[0]!r} in its {split} split, but not in its {first} split: "
                "use the same class folders in all splits"
            )
        rows = [(file, label) for label, name in enumerate(classes) for file in by_class.get(name, ())]
        splits[split] = FolderPictures([file for file, _ in rows], [label for _, label in rows])
    return Contents(classes, splits)


# --- the hub ----------------------------------------------------------------------------------------------------------


def _read_hub(hub_id: str, configuration: str | None, missing: Callable[[str], str]) -> Contents:
    """Load a data set from the hub, or from what `datasets` has downloaded before when HF_HUB_OFFLINE is set.

    `missing` makes the sentence for the case that it cannot be had, from what the hub answered.
    """
    import datasets

    _ask_hub(hub_id, missing)
    try:
        loaded = datasets.load_dataset(hub_id, configuration)
    except Exception as error:  # from http libraries to file systems: everything that can go wrong in a download
        answer = f"{hub_id} on the Hugging Face hub cannot be loaded ({arrow.first_line(error)})"
        raise PluresError(missing(answer)) from None
    splits = pictures.by_split(dict(loaded), hub_id)
    return arrow.arrow_contents({split: [_hub_table(f"{hub_id} ({split})", part)] for split, part in splits.items()})


def _ask_hub(hub_id: str, missing: Callable[[str], str]) -> None:
    """Fail at once when there is no network: `datasets` alone would try again and again first."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(hub_id, timeout=PATIENCE)
    except HfHubHTTPError:
        answer = f"the Hugging Face hub has no public data set {hub_id} (or you need to log in)"
        raise PluresError(missing(answer)) from None
    except Exception:  # the exception classes of connections differ between versions of the hub client
        raise PluresError(missing(f"the Hugging Face hub cannot be reached for {hub_id}")) from None


def _hub_table(origin: str, part: "datasets.Dataset") -> arrow.ArrowTable:
    def read(columns: list[str]) -> "Iterator[pa.Table]":
        yield from part.select_columns(columns).with_format("arrow").iter(batch_size=arrow.ROWS_AT_ONCE)

    return arrow.ArrowTable(origin, part.features.arrow_schema, len(part), read)
