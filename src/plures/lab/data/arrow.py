"""Pictures in Arrow tables of the Hugging Face layout: Parquet files and data sets of the hub."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from plures.errors import PluresError
from plures.lab.data.contents import SPLIT_NAMES, Contents, Picture, by_split

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class ArrowTable:
    """A table that is read piece by piece.

        ArrowTable(origin="birds/train.parquet", schema=schema, rows=900, read=lambda columns: iter(batches))

    `read` is given column names and yields record batches or tables.
    """

    origin: str
    schema: pa.Schema
    rows: int
    read: Callable[[list[str]], Iterator[pa.RecordBatch | pa.Table]]

    def column_called(self, accepted: Sequence[str]) -> str:
        """Return the first of the accepted names that the table has."""
        for name in accepted:
            if name in self.schema.names:
                return name
        raise PluresError(
            f"{self.origin} has the columns {', '.join(self.schema.names)}, "
            f"but needs one called {' or '.join(accepted)}."
        )

    def class_names(self) -> list[str] | None:
        """Return the class names that the Hugging Face metadata gives to the label column."""
        metadata = (self.schema.metadata or {}).get(b"huggingface")
        if metadata is None:
            return None
        features = json.loads(metadata).get("info", {}).get("features", {})
        names = features.get(self.column_called(LABEL_COLUMNS), {}).get("names")
        return None if names is None else [str(name) for name in names]

    def labels(self) -> Iterator[int | str | None]:
        """Yield the label column as it stands in the table."""
        column = self.column_called(LABEL_COLUMNS)
        for batch in self.read([column]):
            yield from batch.column(column).to_pylist()


@dataclass(frozen=True)
class ArrowPictures:
    """The pictures of one or more tables, in row order.

    ArrowPictures(tables=[table], codes={0: 0, 1: 1})
    """

    tables: Sequence[ArrowTable]
    codes: Mapping[int | str | None, int]  # from what stands in the table to the class index

    def __len__(self) -> int:
        return sum(table.rows for table in self.tables)

    def __iter__(self) -> Iterator[Picture]:
        for table in self.tables:
            image, label = table.column_called(IMAGE_COLUMNS), table.column_called(LABEL_COLUMNS)
            row = 0
            for batch in table.read([image, label]):
                for cell, value in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True):
                    origin = f"row {row} of {table.origin}"
                    if value not in self.codes:
                        raise PluresError(
                            f"{origin} has the label {value!r}, which is none of the {len(self.codes)} classes: "
                            "remove such rows."
                        )
                    yield Picture(_encoded(cell, origin), self.codes[value], origin)
                    row += 1


def arrow_contents(splits: Mapping[str, Sequence[ArrowTable]]) -> Contents:
    """Find classes and pictures in tables.

        arrow_contents({"train": [table], "test": [table]})

    Class names come from the Hugging Face metadata; without it, words are classes in alphabetical order and numbers
    are their own names.
    """
    tables = [table for part in splits.values() for table in part]
    names = next((names for table in tables if (names := table.class_names()) is not None), None)
    codes: dict[int | str | None, int]
    if names is not None:
        codes = {index: index for index in range(len(names))}
    else:
        values = {value for table in tables for value in table.labels()}
        words = sorted(value for value in values if isinstance(value, str))
        if words:
            names, codes = words, {word: index for index, word in enumerate(words)}
        else:
            count = 1 + max((value for value in values if isinstance(value, int)), default=-1)
            names, codes = [str(index) for index in range(count)], {index: index for index in range(count)}
    return Contents(names, {split: ArrowPictures(part, codes) for split, part in splits.items()})


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Find the Parquet files of a folder by split.

        parquet_files(Path("birds"))  # {"train": [birds/train-00000-of-00001.parquet], "test": [birds/test.parquet]}

    Empty when there are none. Files may also stand in the one subfolder that has any, as in a clone from the hub.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        homes = sorted({file.parent for file in folder.glob("*/*.parquet")})
        if len(homes) > 1:
            raise PluresError(
                f"{folder} holds Parquet files in {', '.join(home.name for home in homes)}: give the path of one."
            )
        files = sorted(homes[0].glob("*.parquet")) if homes else []
    found: dict[str, list[Path]] = {}
    for file in files:
        # train.parquet, train-00000-of-00002.parquet, train_0.parquet
        found.setdefault(re.split(r"[-_.]", file.name)[0], []).append(file)
    return by_split(found, str(folder)) if found else {}


def split_of_file(file: Path) -> str:
    """Return the split that a single Parquet file is: test if its name says so, otherwise train.

    split_of_file(Path("svhn/test.parquet"))  # "test"
    """
    split = SPLIT_NAMES.get(re.split(r"[-_.]", file.name)[0].lower(), "train")
    return "train" if split == "train" else "test"


def read_parquet(files: Mapping[str, Sequence[Path]]) -> Contents:
    """Open Parquet files, split by split.

    read_parquet({"train": [Path("birds/train.parquet")], "test": [Path("birds/test.parquet")]})
    """
    return arrow_contents({split: [_parquet_table(file) for file in part] for split, part in files.items()})


def _parquet_table(file: Path) -> ArrowTable:
    try:
        with pq.ParquetFile(file) as parquet:
            schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise PluresError(f"{file} cannot be read as Parquet ({_first_line(error)}): copy it again.") from error

    def read(columns: list[str]) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(file) as parquet:
                yield from parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise PluresError(f"{file} is damaged ({_first_line(error)}): copy it again.") from error

    return ArrowTable(str(file), schema, rows, read)


def _encoded(cell: object, origin: str) -> bytes:
    """Return the bytes of an image cell: a struct of bytes and path, or plain bytes."""
    if isinstance(cell, Mapping):
        if cell.get("bytes") is None and cell.get("path"):
            try:
                return Path(cell["path"]).read_bytes()
            except OSError as error:
                raise PluresError(f"{origin} points to {cell['path']}, which cannot be read.") from error
        cell = cell.get("bytes")
    if not isinstance(cell, bytes):
        raise PluresError(f"{origin} holds no encoded picture: the image column must hold PNG or JPEG bytes.")
    return cell


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
