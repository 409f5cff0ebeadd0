"""What every source of pictures hands over, whatever format it reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from plures.errors import PluresError

T = TypeVar("T")

# The names that people give to the three parts of a data set.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "test": "test",
}


class Picture(NamedTuple):
    """One labelled picture, still encoded.

        Picture(encoded=file.read_bytes(), label=3, origin="birds/train/wren/07.jpg")

    `origin` is what an error message calls it.
    """

    encoded: bytes
    label: int
    origin: str


class Pictures(Protocol):
    """The pictures of one split in a fixed order, to be read as often as needed.

    for encoded, label, origin in contents.splits["train"]: ...
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Picture]: ...


@dataclass(frozen=True)
class Contents:
    """The class names and the splits of a data set."""

    classes: Sequence[str]
    splits: Mapping[str, Pictures]

    def __post_init__(self) -> None:
        for name in self.classes:
            try:
                name.encode()
            except UnicodeEncodeError:
                raise PluresError(f"the class name {name!r} is not written in UTF-8: rename the class") from None


def by_split(found: Mapping[str, T], place: str) -> dict[str, T]:
    """Sort the parts of a data set into train, validation and test by their names.

        by_split({"train": a, "valid": b}, "birds")  # {"train": a, "test": b}

    Parts with other names are left out. A validation split without a test split is the test split: Tiny-ImageNet keeps
    its test labels secret, and everybody reports figures for its validation pictures.
    """
    splits: dict[str, T] = {}
    for name, part in found.items():
        split = SPLIT_NAMES.get(name.lower())
        if split is None:
            continue
        if split in splits:
            raise PluresError(f"{place} has two parts that could be its {split} split: keep one of them")
        splits[split] = part
    if not splits:
        parts = ", ".join(sorted(found)) or "(none)"
        raise PluresError(f"{place} holds the parts {parts}, but needs one called train or test")
    if "validation" in splits and "test" not in splits:
        splits["test"] = splits.pop("validation")
    return splits
