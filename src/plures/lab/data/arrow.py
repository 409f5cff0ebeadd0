"""Images in Arrow tables in the Hugging Face layout: Parquet files and data sets of the hub."""

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plures.errors import PluresError
from plures.lab.data.pictures import SPLIT_NAMES, Contents, Picture, by_split, folders_in, ordinary, read_file, reading

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 2**28  # at most, even if all rows repeat one large cell, which a file stores only once
MOST_CLASSES = 100_000  # bounds what a wrong label costs; ImageNet-21k has 21,841


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
        names = self.schema.names
        for name in accepted:
            if names.count(name) > 1:
                raise PluresError(f"{self.origin} has {names.count(name)} columns called {name!r}: keep one of them")
            if name in names:
                return name
        raise PluresError(
            f"{self.origin} has the columns {', '.join(names)}, but needs one called {' or '.join(accepted)}"
        )

    def class_names(self) -> list[str] | None:
        """Return the class names that the Hugging Face metadata gives to the label column."""
        metadata = (self.schema.metadata or {}).get(b"huggingface")
        if metadata is None:
            return None
        try:
            found = json.loads(metadata)
            for key in ("info", "features", self.column_called(LABEL_COLUMNS)):
                found = found.get(key) or {}
            names = found.get("names")
            if names is None:
                return None
            if not isinstance(names, list) or not all(isinstance(name, str | int | float) for name in names):
                raise TypeError(f"class names of type {type(names).__name__}")
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise PluresError(
                f"the Hugging Face metadata of {self.origin} is not understood ({first_line(error)}): "
                "write the file again with datasets, or without metadata"
            ) from error
        if len(names) > MOST_CLASSES:
            raise PluresError(f"{self.origin} has {len(names):,} classes, but at most {MOST_CLASSES:,} are possible")
        return [str(name) for name in names]

    def cells(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the cells of some columns, row by row."""
        rows = 0
        try:
            for batch in self.read(list(columns)):
                rows += batch.num_rows
                for row in zip(*(batch.column(name) for name in columns), strict=True):
                    yield tuple(cell.as_py() for cell in row)  # one by one: a cell may be large, and repeated
        except MemoryError as error:
            raise PluresError(f"{self.origin} has cells or pages that are too large for the free memory") from error
        except Exception as error:  # pyarrow raises nearly anything on damaged tables
            raise PluresError(f"{self.origin} is damaged ({first_line(error)}): copy it again") from error
        if rows != self.rows:
            raise PluresError(f"{self.origin} is damaged ({rows:,} rows instead of {self.rows:,}): copy it again")

    def labels(self) -> Iterator[Hashable]:
        """Yield the label column as it stands in the table."""
        column = self.column_called(LABEL_COLUMNS)
        for (value,) in self.cells(column):
            if not isinstance(value, Hashable):
                raise PluresError(
                    f"the column {column!r} of {self.origin} holds {self.schema.field(column).type}, "
                    "but labels must be integers or strings"
                )
            yield value


@dataclass(frozen=True)
class ArrowPictures:
    """The pictures of one or more tables, in row order."""

    tables: Sequence[ArrowTable]
    codes: Mapping[Any, int]  # from what stands in the table to the class index

    def __len__(self) -> int:
        return sum(table.rows for table in self.tables)

    def __iter__(self) -> Iterator[Picture]:
        for table in self.tables:
            columns = table.column_called(IMAGE_COLUMNS), table.column_called(LABEL_COLUMNS)
            for row, (cell, value) in enumerate(table.cells(*columns)):
                origin = f"row {row} of {table.origin}"
                code = self.codes.get(value) if isinstance(value, Hashable) else None
                if code is None:
                    raise PluresError(
                        f"{origin} has the label {value!r}, which is not one of the {len(self.codes)} classes: "
                        "remove such rows"
                    )
                yield Picture(_encoded(cell, origin), code, origin)


def arrow_contents(splits: Mapping[str, Sequence[ArrowTable]]) -> Contents:
    """Find classes and pictures in tables.

        arrow_contents({"train": [table], "test": [table]})

    Class names come from the Hugging Face metadata; without it, words are classes in alphabetical order and numbers
    are their own names.
    """
    tables = [table for part in splits.values() for table in part]
    named = {table.origin: names for table in tables if (names := table.class_names()) is not None}
    (first, names), *others = named.items() or [("", [])]
    for other, its_names in others:
        if its_names != names:
            raise PluresError(f"{first} and {other} have different class names: write both with the same classes")
    if not named:
        values = {value for table in tables for value in table.labels()}
        names = sorted(value for value in values if isinstance(value, str))
        if names:
            return Contents(names, _coded(splits, {word: index for index, word in enumerate(names)}))
        largest = max((value for value in values if isinstance(value, int)), default=-1)
        if largest >= MOST_CLASSES:
            raise PluresError(
                f"{tables[0].origin} has the label {largest}, but labels are numbers from 0 to {MOST_CLASSES - 1:,}: "
                "number the classes 0, 1, 2 and so on"
            )
        names = [str(index) for index in range(largest + 1)]
    return Contents(names, _coded(splits, {index: index for index in range(len(names))}))


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Find the Parquet files of a folder by split.

        parquet_files(Path("birds"))  # {"train": [birds/train-00000-of-00001.parquet], "test": [birds/test.parquet]}

    Empty when there are none. Files may also stand in the one subfolder that has any, as in a clone from the hub.
    """
    files = _tables_in(folder)
    if not files:
        homes = [home for home in folders_in(folder) if _tables_in(home)]
        if len(homes) > 1:
            raise PluresError(
                f"{folder} contains Parquet files in {', '.join(home.name for home in homes)}: give the path of one"
            )
        files = _tables_in(homes[0]) if homes else []
    found: dict[str, list[Path]] = {}
    for file in files:
        # train.parquet, train-00000-of-00002.parquet, train_0.parquet
        found.setdefault(_first_word(file), []).append(file)
    return by_split(found, str(folder)) if found else {}


def split_of_file(file: Path) -> str:
    """Return the split that a single Parquet file is: test if its name says so, otherwise train.

    split_of_file(Path("svhn/test.parquet"))  # "test"
    """
    return "train" if SPLIT_NAMES.get(_first_word(file).lower(), "train") == "train" else "test"


def read_parquet(files: Mapping[str, Sequence[Path]]) -> Contents:
    """Open Parquet files, split by split."""
    return arrow_contents({split: [_parquet_table(file) for file in part] for split, part in files.items()})


def _parquet_table(file: Path) -> ArrowTable:
    try:
        with pq.ParquetFile(ordinary(file)) as parquet:
            schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
            at_once = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // _largest_cell(parquet.metadata)))
    except PluresError:
        raise
    except Exception as error:  # as above
        raise PluresError(f"{file} cannot be read as Parquet ({first_line(error)}): copy it again") from error

    def read(columns: list[str]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(batch_size=at_once, columns=columns)

    return ArrowTable(str(file), schema, rows, read)


def _largest_cell(metadata: pq.FileMetaData) -> int:
    """Return a bound on the bytes of one cell: no cell is larger than its column in a group of rows."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return (
        max(
            (group.column(index).total_uncompressed_size for group in groups for index in range(metadata.num_columns)),
            default=1,
        )
        or 1
    )


def _tables_in(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(file for file in folder.iterdir() if file.suffix == ".parquet")


def _first_word(file: Path) -> str:
    return re.split(r"[-_.]", file.name)[0]


def _coded(splits: Mapping[str, Sequence[ArrowTable]], codes: Mapping[Any, int]) -> dict[str, ArrowPictures]:
    return {split: ArrowPictures(part, codes) for split, part in splits.items()}


def _encoded(cell: object, origin: str) -> bytes:
    """Return the bytes of an image cell: a struct of bytes and path, or plain bytes."""
    if isinstance(cell, Mapping):
        path = cell.get("path")
        if cell.get("bytes") is None and isinstance(path, str) and path:
            try:
                return read_file(path)
            except PluresError as error:
                raise PluresError(f"{origin} points to a file: {error}") from error
        cell = cell.get("bytes")
    if not isinstance(cell, bytes):
        raise PluresError(f"{origin} has no encoded image: the image column must contain PNG or JPEG bytes")
    return cell


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, to put into a sentence.

    first_line(OSError("no such file.\\nTry again."))  # "no such file"
    """
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
