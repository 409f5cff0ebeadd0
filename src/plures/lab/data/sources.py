"""Find a data set by its name: embedded, in a local folder or on the Hugging Face hub.

Adding a data set is one line in `HUB_IDS`: its name and its id on the hub. Without the hub, a folder of that name below
the data directory suffices, with train.parquet and test.parquet, or with images in train/CLASS/ and test/CLASS/.

The Parquet files of a hub data set are downloaded, and read like local ones. The package `datasets` is not used: it
would keep a second copy of all images, and promises neither their order nor a bound on memory.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import TypeVar

import numpy as np

from plures.checks import nearest
from plures.errors import PluresError, brief
from plures.files import told
from plures.lab.data.images import Contents, EncodedImage, Images, images_below, read_file
from plures.lab.data.parquet import parquet_contents
from plures.lab.data.split import Rows, random_rows

# Built-in names: hub id and, if the repository has several, the configuration.
HUB_IDS: dict[str, tuple[str, str | None]] = {
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "cub200": ("bentrevett/caltech-ucsd-birds-200-2011", None),
    "tiny-imagenet": ("zh-plus/tiny-imagenet", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "fashion-mnist": ("zalando-datasets/fashion_mnist", None),
    "mnist": ("ylecun/mnist", None),
}
# Names of the three splits, as folders, files and hub data sets have them.
SPLIT_NAMES = {
    **{"train": "train", "training": "train", "test": "test"},
    **{"valid": "validation", "validation": "validation", "val": "validation"},
}
DIGITS_TEST = 450  # a quarter of the 1,797
PATIENCE = 10  # seconds to wait for the first answer of the hub

T = TypeVar("T")


def find_data(name: str, data_dir: Path | None) -> Contents:
    """Find a data set: first `data_dir/name`, then a path, then the embedded digits or the hub.

    A built-in name is never a path in the working directory (a run folder may be called digits): write `./cifar10` for
    that.
    """
    built_in = ["digits", *HUB_IDS]
    accepted = f"use one of {', '.join(built_in)}, a folder, a .parquet file or a hub id owner/name"
    if not name:
        raise PluresError(f"no data is given: {accepted}")
    places = [data_dir / name] if data_dir is not None else []
    if name not in built_in:
        places.append(expanded(name))
    for place in places:
        if _exists(place):
            return _local_data(place)
    if name == "digits":
        return _read_digits()
    looked = " and ".join(dict.fromkeys(str(place) for place in places))
    hub_id, configuration = HUB_IDS.get(name, (name, None))
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", hub_id):
        raise PluresError(f"there is no data set {name!r}: looked for {looked}; {accepted}{nearest(name, built_in)}")
    import huggingface_hub

    files = f"{configuration or ''}*.parquet"
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, repo_type="dataset", allow_patterns=files, etag_timeout=PATIENCE
        )
    except Exception as error:  # from http libraries to file systems: everything that can go wrong in a download
        local = f"looked for {looked}" if looked else "no data folder was given (--data-dir or PLURES_DATA)"
        raise PluresError(
            f"the data {name!r} were not found: {local}, and {hub_id} cannot be loaded from the Hugging Face hub "
            f"({brief(error)}); put train.parquet and test.parquet (or train/CLASS/*.png and test/CLASS/*.png) "
            f"into {(data_dir or Path('$PLURES_DATA')) / name}"
        ) from None
    return _local_data(Path(folder, configuration or ""))


def local_path(name: str, data_dir: Path | None) -> Path | None:
    """Return the path that a data set is named by; None if it has a built-in name, a hub id or is in `data_dir`."""
    if name == "digits" or name in HUB_IDS or (data_dir is not None and _exists(data_dir / name)):
        return None
    path = expanded(name)
    return path if _exists(path) else None


def expanded(path: str | Path) -> Path:
    """Replace a leading ~ by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # a user who does not exist
        raise PluresError(f"{path} has no home folder: give the full path") from error


def _exists(place: Path) -> bool:
    with told("read", place):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _read_digits() -> Contents:
    # What load_digits() of scikit-learn reads: to import that takes a second.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")
    # 0..16 becomes 0..255. PGM is an image format that is one line of text before the pixels.
    pixels = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    test = random_rows(labels, DIGITS_TEST, seed=0)

    def images(rows: Rows) -> Images:
        found = [
            EncodedImage(b"P5 8 8 255\n" + pixels[row].tobytes(), int(labels[row]), f"digit {row}") for row in rows
        ]
        return Images(len(found), lambda: iter(found))

    train = np.setdiff1d(np.arange(len(labels)), test)
    return [str(digit) for digit in range(10)], {"train": images(train), "test": images(test)}


# --- local folders and files ------------------------------------------------------------------------------------------


def _local_data(place: Path) -> Contents:
    """Return the data set in a folder or Parquet file."""
    if place.is_dir():
        tables = _parquet_files(place)
    elif place.is_file() and place.suffix == ".parquet":
        tables = {"train" if SPLIT_NAMES.get(_first_word(place), "train") == "train" else "test": [place]}
    else:
        raise PluresError(f"{place} is neither a folder nor a .parquet file")
    if tables:
        return parquet_contents(tables)
    if found := _image_files(place):
        return _read_folders(found, place)
    raise PluresError(
        f"{place} contains neither train.parquet or test.parquet nor class folders of images: "
        "put images into train/CLASS/ and test/CLASS/, or only into CLASS/"
    )


def _by_split(found: Mapping[str, T], place: object) -> dict[str, T]:
    """Sort the parts of a data set into train, validation and test by their names; leave out parts with other names.

    A validation split without a test split becomes the test split: Tiny-ImageNet keeps its test labels secret, and
    papers report figures for its validation images.
    """
    splits: dict[str, T] = {}
    for name, part in found.items():
        split = SPLIT_NAMES.get(name.lower())
        if split in splits:
            raise PluresError(f"{place} has two folders or files that could be its {split} split: keep one of them")
        if split is not None:
            splits[split] = part
    if not splits:
        parts = ", ".join(sorted(found)) or "(none)"
        raise PluresError(f"{place} has the splits {parts}, but needs one called train or test")
    if "validation" in splits and "test" not in splits:
        splits["test"] = splits.pop("validation")
    return splits


def _folders_in(folder: Path) -> list[Path]:
    with told("read", folder):
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def _parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of a folder by split; in a clone from the hub, they are in a subfolder."""
    homes = {home: files for home in (folder, *_folders_in(folder)) if (files := sorted(home.glob("*.parquet")))}
    if folder not in homes and len(homes) > 1:
        raise PluresError(
            f"{folder} contains Parquet files in {', '.join(home.name for home in homes)}: give the path of one"
        )
    found: dict[str, list[Path]] = {}
    for file in next(iter(homes.values()), []):
        found.setdefault(_first_word(file), []).append(file)
    return _by_split(found, folder) if found else {}


def _first_word(file: Path) -> str:
    """Return the split in a name like train.parquet, train-00000-of-00002.parquet or train_0.parquet."""
    return re.split(r"[-_.]", file.name)[0].lower()


def _image_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the image files of a folder by split and class; without split folders, all are in the train split."""
    parts = {entry.name: entry for entry in _folders_in(folder) if entry.name.lower() in SPLIT_NAMES}
    splits = _by_split(parts, folder) if parts else {"train": folder}
    found = {
        split: {entry.name: files for entry in _folders_in(part) if (files := images_below(entry))}
        for split, part in splits.items()
    }
    return {split: classes for split, classes in found.items() if classes}


def _read_folders(found: Mapping[str, Mapping[str, Sequence[Path]]], place: Path) -> Contents:
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

    return classes, {split: images(by_class) for split, by_class in found.items()}
