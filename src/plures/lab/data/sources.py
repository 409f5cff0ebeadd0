"""Find a data set by its name: embedded, in a local folder or on the Hugging Face hub."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from plures.errors import PluresError
from plures.lab.data.arrow import parquet_files, read_parquet, split_of_file
from plures.lab.data.contents import Contents, Picture, Source
from plures.lab.data.folder import image_files, read_image_folder
from plures.lab.data.hub import read_hub
from plures.lab.data.selection import stratified

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


def find_source(name: str, data_dir: Path | None) -> Source:
    """Find a data set: first `data_dir/name`, then a path, then the embedded digits or the hub.

        find_source("cifar10", Path("data"))

    A built-in name is never taken for a path in the working directory (a run folder may be called digits): write
    `./cifar10` for that.
    """
    places = [data_dir / name] if data_dir is not None else []
    if name != "digits" and name not in HUB_IDS:
        places.append(Path(name).expanduser())
    for place in places:
        if place.exists():
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
            lambda: read_hub(hub_id, configuration, lambda answer: _missing(name, data_dir, looked, answer)),
        )
    near = difflib.get_close_matches(name, ["digits", *HUB_IDS], n=2)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise PluresError(
        f"There are no data called {name!r}: looked for {looked}; accepted are {', '.join(['digits', *HUB_IDS])}, "
        f"a folder, a .parquet file or a hub id owner/name{hint}."
    )


def _missing(name: str, data_dir: Path | None, looked: str, answer: str) -> str:
    """Tell in one sentence where a data set was looked for, what the hub said, and where to put it."""
    home = str(data_dir / name) if data_dir is not None else f"a folder {name!r} below the one that PLURES_DATA names"
    local = f"looked for {looked}" if looked else "no data folder was given (--data-dir or PLURES_DATA)"
    return (
        f"The data {name!r} were not found: {local}, and {answer}; "
        f"put train.parquet and test.parquet (or train/CLASS/*.png and test/CLASS/*.png) into {home}."
    )


def _local_source(name: str, place: Path) -> Source:
    if place.is_file():
        if place.suffix != ".parquet":
            raise PluresError(f"{place} is neither a folder nor a .parquet file.")
        files = {split_of_file(place): [place]}
        return Source(name, _signature("parquet", [place]), lambda: read_parquet(files))
    if tables := parquet_files(place):
        signature = _signature("parquet", (file for part in tables.values() for file in part))
        return Source(name, signature, lambda: read_parquet(tables))
    if found := image_files(place):
        every = (file for classes in found.values() for files in classes.values() for file in files)
        return Source(name, _signature("image folder", every), lambda: read_image_folder(found, str(place)))
    raise PluresError(
        f"{place} holds neither train.parquet or test.parquet nor class folders of pictures (train/CLASS/*.png)."
    )


def _signature(kind: str, files: Iterable[Path]) -> str:
    """Name the state of files without reading them: path, size and time of change."""
    lines = [kind]
    for file in files:
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
