"""Find a data set by its name: embedded, in a local folder or on the Hugging Face hub.

Adding a data set is one line in `HUB_IDS`: its name and its id on the hub. Without the hub, a folder of that name below
the data directory suffices, with train.parquet and test.parquet, or with images in train/CLASS/ and test/CLASS/.
`python -c "from plures.lab.data import open_data; print(open_data('NAME').info)"` shows what was found.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plures.checks import nearest
from plures.errors import PluresError
from plures.lab.data import arrow
from plures.lab.data.folders import by_split, local_source
from plures.lab.data.images import Contents, EncodedImage, Images, Source, reading
from plures.lab.data.split import Rows, stratified

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

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
DIGITS_TEST = 450  # a quarter of the 1,797
PATIENCE = 10  # seconds to wait for the first answer of the hub


def find_source(name: str, data_dir: Path | None) -> Source:
    """Find a data set: first `data_dir/name`, then a path, then the embedded digits or the hub.

        find_source("cifar10", Path("data"))

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
            return local_source(name, place)
    if name == "digits":
        return Source(name, "scikit-learn digits", _read_digits)
    looked = " and ".join(dict.fromkeys(str(place) for place in places))
    hub_id, configuration = HUB_IDS.get(name, (name, None))
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", hub_id):
        # The signature is the name alone: once decoded, a hub set is opened without asking the hub again.
        return Source(
            name,
            f"hub {hub_id} {configuration}",
            lambda: _read_hub(hub_id, configuration, lambda answer: _missing(name, data_dir, looked, answer)),
        )
    raise PluresError(f"there is no data set {name!r}: looked for {looked}; {accepted}{nearest(name, built_in)}")


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
    with reading(place):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _missing(name: str, data_dir: Path | None, looked: str, answer: str) -> str:
    """Return a sentence that says where the data were looked for, what the hub answered, and where to put them."""
    home = str(data_dir / name) if data_dir is not None else f"a folder {name!r} below the one that PLURES_DATA names"
    local = f"looked for {looked}" if looked else "no data folder was given (--data-dir or PLURES_DATA)"
    return (
        f"the data {name!r} were not found: {local}, and {answer}; "
        f"put train.parquet and test.parquet (or train/CLASS/*.png and test/CLASS/*.png) into {home}"
    )


def _read_digits() -> Contents:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # 0..16 becomes 0..255. PGM is an image format that is one line of text before the pixels.
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    test = stratified(labels, DIGITS_TEST, seed=0)

    def images(rows: Rows) -> Images:
        encoded = [b"P5 8 8 255\n" + pixels[row].tobytes() for row in rows]
        found = [EncodedImage(one, int(labels[row]), f"digit {row}") for one, row in zip(encoded, rows, strict=True)]
        return Images(len(found), lambda: iter(found))

    splits = {"train": images(np.setdiff1d(np.arange(len(labels)), test)), "test": images(test)}
    return Contents([str(digit) for digit in range(10)], splits)


# --- the hub ----------------------------------------------------------------------------------------------------------


def _read_hub(hub_id: str, configuration: str | None, missing: Callable[[str], str]) -> Contents:
    """Load a data set from the hub, or from what `datasets` has downloaded before if HF_HUB_OFFLINE is set.

    `missing` makes the sentence for unavailable data from the answer of the hub.
    """
    import datasets

    _ask_hub(hub_id, missing)
    try:
        loaded = datasets.load_dataset(hub_id, configuration)
    except Exception as error:  # from http libraries to file systems: everything that can go wrong in a download
        answer = f"{hub_id} on the Hugging Face hub cannot be loaded ({arrow.first_line(error)})"
        raise PluresError(missing(answer)) from None
    splits = by_split(dict(loaded), hub_id)
    return arrow.arrow_contents({split: [_hub_table(f"{hub_id} ({split})", part)] for split, part in splits.items()})


def _ask_hub(hub_id: str, missing: Callable[[str], str]) -> None:
    """Raise an error at once if there is no network: `datasets` alone would retry for a long time."""
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
