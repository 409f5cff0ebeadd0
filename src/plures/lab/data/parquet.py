"""Images in Parquet files with the columns of Hugging Face data sets."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from plures.errors import PluresError, brief
from plures.lab.data.images import Contents, EncodedImage, Images, ordinary

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 2**28  # at most, even if all rows repeat one large cell, which a file stores only once
MOST_CLASSES = 100_000  # bounds the memory that a wrong label costs; ImageNet-21k has 21,841


@contextmanager
def _opened(file: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except MemoryError as error:
        raise PluresError(f"{file} has cells or pages that are too large for the free memory") from error
    except Exception as error:  # pyarrow raises nearly anything on damaged files
        raise PluresError(f"{file} cannot be read as Parquet ({brief(error)}): copy it again") from error


class ParquetTable:
    """A Parquet file, whose rows are read piece by piece."""

    def __init__(self, file: Path) -> None:
        self.file = ordinary(file)
        with _opened(file) as parquet:
            self.schema, metadata = parquet.schema_arrow, parquet.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            columns = [group.column(index) for group in groups for index in range(metadata.num_columns)]
        self.rows = metadata.num_rows
        # No cell is larger than its column in a group of rows.
        largest = max([1, *(int(column.total_uncompressed_size) for column in columns)])
        self._rows_at_once = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // largest))

    def column_called(self, accepted: Sequence[str]) -> str:
        """Return the first of the accepted names that the table has."""
        names = self.schema.names
        for name in accepted:
            if names.count(name) > 1:
                raise PluresError(f"{self.file} has {names.count(name)} columns called {name!r}: keep one of them")
            if name in names:
                return name
        raise PluresError(f"{self.file} has the columns {', '.join(names)}, but none called {' or '.join(accepted)}")

    def label_column(self) -> str:
        """Return the name of the label column."""
        name = self.column_called(LABEL_COLUMNS)
        kind = self.schema.field(name).type
        if pa.types.is_nested(kind):
            raise PluresError(f"the column {name!r} of {self.file} holds {kind}, but labels are integers or strings")
        return name

    def class_names(self) -> list[str] | None:
        """Return the class names that the Hugging Face metadata give to the label column, or None."""
        try:
            found = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
            for key in ("info", "features", self.label_column()):
                found = found.get(key) or {}
            names = msgspec.convert(found.get("names"), list[str | int | float] | None)
        except (ValueError, RecursionError, AttributeError, msgspec.ValidationError) as error:
            raise PluresError(
                f"the Hugging Face metadata of {self.file} are damaged ({brief(error)}): "
                "write the file again with datasets, or without metadata"
            ) from error
        if names is not None and len(names) > MOST_CLASSES:
            raise PluresError(f"{self.file} has {len(names):,} classes, but at most {MOST_CLASSES:,} are possible")
        return None if names is None else [str(name) for name in names]

    def cells(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the cells of some columns, row by row."""
        rows = 0
        with _opened(self.file) as parquet:
            for batch in parquet.iter_batches(batch_size=self._rows_at_once, columns=list(columns)):
                rows += batch.num_rows
                for row in zip(*(batch.column(name) for name in columns), strict=True):
                    yield tuple(cell.as_py() for cell in row)  # one by one: a cell may be large and repeated
        if rows != self.rows:
            raise PluresError(f"{self.file} is damaged ({rows:,} rows instead of {self.rows:,}): copy it again")


def parquet_contents(splits: Mapping[str, Sequence[Path]]) -> Contents:
    """Return the classes and images of files.

    Class names come from the Hugging Face metadata. Without them, strings are classes in alphabetical order, and
    integers are their own names.
    """
    parts = {split: list(map(ParquetTable, files)) for split, files in splits.items()}
    tables = [table for part in parts.values() for table in part]
    named = {table.file: names for table in tables if (names := table.class_names()) is not None}
    words: list[str] = []
    if named:
        (first, names), *others = named.items()
        if other := next((file for file, its_names in others if its_names != names), None):
            raise PluresError(f"{first} and {other} have different class names: write both with the same classes")
    else:
        values = {value for table in tables for (value,) in table.cells(table.label_column())}
        words = sorted(value for value in values if isinstance(value, str))
        largest = max((value for value in values if isinstance(value, int)), default=-1)
        if largest >= MOST_CLASSES:
            raise PluresError(
                f"{tables[0].file} has the label {largest}, but labels are integers from 0 to {MOST_CLASSES - 1:,}: "
                "number the classes 0, 1, 2 and so on"
            )
        names = words or [str(index) for index in range(largest + 1)]
    codes = {label: index for index, label in enumerate(words or range(len(names)))}

    def images(part: Sequence[ParquetTable]) -> Images:
        return Images(sum(table.rows for table in part), lambda: _encoded_images(part, codes))

    return names, {split: images(part) for split, part in parts.items()}


def _encoded_images(tables: Sequence[ParquetTable], codes: Mapping[Any, int]) -> Iterator[EncodedImage]:
    for table in tables:
        cells = table.cells(table.column_called(IMAGE_COLUMNS), table.label_column())
        for row, (cell, label) in enumerate(cells):
            origin = f"row {row} of {table.file}"
            if label not in codes:
                raise PluresError(
                    f"{origin} has the label {label!r}, which is not one of the {len(codes)} classes: remove the row"
                )
            yield EncodedImage(_encoded(cell, origin), codes[label], origin)


def _encoded(cell: object, origin: str) -> bytes:
    """Return the bytes of an image cell, which is a struct of bytes and path, or bytes."""
    encoded = cell.get("bytes") if isinstance(cell, Mapping) else cell
    if not isinstance(encoded, bytes):
        raise PluresError(f"{origin} has no encoded image: the image column must contain PNG or JPEG bytes")
    return encoded
