"""The table of a comparison: on the terminal, as Markdown, CSV and JSON."""

import csv
import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from plures import files
from plures.errors import PluresError, visible
from plures.lab import terminal
from plures.lab.compare.rows import EFFICIENT, Row
from plures.lab.costs import machine
from plures.lab.paper import Published
from plures.lab.training.progress import duration

# What the CSV and the JSON file hold of each run. The table shows `columns`.
FILED = (
    "accuracy",
    "nll",
    "ece",
    "brier",
    "calibrated_nll",
    "temperature",
    "aurc",
    "mean_member_accuracy",
    "agreement",
    "seconds",
    "calibrated_ece",
    "shift_accuracy",
    "shift_nll",
    "shift_ece",
    "ood_auroc",
    "ood_fpr95",
)

PAPER_TITLE = "paper: accuracy % / NLL / ECE"


@dataclass(frozen=True)
class Column:
    """One column of a comparison: the figure of a row, how it is written, and which end is better."""

    title: str
    value: Callable[[Row], float | None]
    cell: Callable[[Row], str]
    better: Literal["high", "low"] | None = None
    trust: bool = False  # of calibration, shift or other data: the report has a table for these

    def best(self, rows: Sequence[Row]) -> Row | None:
        """Return the best of the rows that have a figure; None if there are fewer than two."""
        known = [(value, row) for row in rows if (value := self.value(row)) is not None]
        if self.better is None or len(known) < 2:
            return None
        return (max if self.better == "high" else min)(known, key=lambda pair: pair[0])[1]

    def stressed(self, rows: Sequence[Row]) -> Row | None:
        """Return the row to print in bold: the best of those of about the size of one network, if sizes are known."""
        return self.best([row for row in rows if row.efficient] if any(row.costs for row in rows) else rows)


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a comparison, without those that no row has a figure for.

    What matters most comes first: a narrow screen shows no more than fits.
    """
    every = [
        _measured("accuracy %", "accuracy", "high", digits=1, scale=100),
        _measured("NLL", "nll", "low"),
        _measured("ECE", "ece", "low", digits=4),
        paper_column(PAPER_TITLE, "accuracy", "nll", "ece"),
        _cost("size", "size", "{:.2f} x"),
        _cost("prediction", "prediction", "{:.1f} x"),
        _cost("training epochs", "epochs", "{:.0f}"),
        _measured("calibrated NLL", "calibrated_nll", "low", trust=True),
        _measured("calibrated ECE", "calibrated_ece", "low", digits=4, trust=True),
        _measured("accuracy % under shift", "shift_accuracy", "high", digits=1, scale=100, trust=True),
        _measured("NLL under shift", "shift_nll", "low", trust=True),
        _measured("ECE under shift", "shift_ece", "low", digits=4, trust=True),
        _measured("AUROC % out of distribution", "ood_auroc", "high", digits=1, scale=100, trust=True),
        _measured("Brier", "brier", "low"),
        _measured("member accuracy %", "mean_member_accuracy", None, digits=1, scale=100),
        _measured("agreement", "agreement", None),
    ]
    return [column for column in every if any(column.value(row) is not None for row in rows)]


def _measured(
    title: str,
    key: str,
    better: Literal["high", "low"] | None,
    *,
    digits: int = 3,
    scale: float = 1,
    trust: bool = False,
) -> Column:
    """Return the column of a metric: its mean, and its standard deviation if there are several seeds."""

    def value(row: Row) -> float | None:
        mean = row.mean(key)
        return None if mean is None else scale * mean

    def cell(row: Row) -> str:
        deviation = row.deviation(key)
        spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
        return terminal.figure(value(row), digits) + spread

    return Column(title, value, cell, better, trust)


def _cost(title: str, key: str, pattern: str) -> Column:
    def value(row: Row) -> float | None:
        return None if row.costs is None else getattr(row.costs, key)

    return Column(title, value, lambda row: terminal.UNKNOWN if value(row) is None else pattern.format(value(row)))


def paper_column(title: str, *keys: str) -> Column:
    """Return a column of the paper's figures."""

    def word(paper: Published, key: str) -> str:
        value = getattr(paper, key)
        if value is None:
            return terminal.UNKNOWN
        return f"{100 * value:.1f}" if key.endswith("accuracy") else f"{value:.3g}"

    def cell(row: Row) -> str:
        return terminal.UNKNOWN if row.paper is None else " / ".join(word(row.paper, key) for key in keys)

    return Column(title, lambda row: row.paper.accuracy if row.paper else None, cell)


def write(
    folder: Path, name: str, rows: Sequence[Row], columns: Sequence[Column], about: Mapping[str, str]
) -> list[Path]:
    """Write NAME.json, NAME.md and NAME.csv into a folder, and return their paths."""
    contents = {
        "json": json.dumps(document(rows, about), indent=2, allow_nan=False) + "\n",
        "md": markdown(rows, columns, about),
        "csv": as_csv(rows),
    }
    paths = []
    for suffix, text in contents.items():
        paths.append(folder / f"{name}.{suffix}")
        files.write(paths[-1], text.encode())
    return paths


def document(rows: Sequence[Row], about: Mapping[str, str]) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    found = [
        {
            "name": row.name,
            "method": row.runs[0].method if row.runs else None,
            "seeds": [run.seed for run in row.runs],
            "metrics": {
                key: {"mean": row.mean(key), "deviation": row.deviation(key), "values": row.values(key)}
                for key in FILED
            },
            "member_accuracies": [run.metrics.get("member_accuracies") for run in row.runs],
            "costs": asdict(row.costs) if row.costs else None,
            "paper": asdict(row.paper) if row.paper else None,
            "failures": list(row.failures),
        }
        for row in rows
    ]
    return {"about": dict(about), "rows": found}


def writable(folder: Path) -> Path:
    """Create a folder for results, or raise an error: before hours of training, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PluresError(f"cannot create the folder {folder}: {error.strerror}; choose another one") from error
    return folder


def markdown(rows: Sequence[Row], columns: Sequence[Column], about: Mapping[str, str]) -> str:
    """Write a comparison as Markdown; the best of those that take the place of one network is bold."""
    lines = [f"| method | {' | '.join(column.title for column in columns)} |", "|---|" + "---|" * len(columns)]
    for row in rows:
        if row.runs:
            stars = ["**" if column.stressed(rows) is row else "" for column in columns]
            cells = [f"{star}{column.cell(row)}{star}" for star, column in zip(stars, columns, strict=True)]
        else:
            cells = ["failed", *([""] * (len(columns) - 1))]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    notes = [f"{row.name} failed with {failure}" for row in rows for failure in row.failures]
    notes += [f"{key}: {value}" for key, value in about.items()]
    return "\n".join([*lines, "", *(f"- {note}" for note in [legend(rows), *notes])]) + "\n"


def legend(rows: Sequence[Row], *, bold: bool = True) -> str:
    """Return how to read a comparison, with or without `bold` figures."""
    seeds = sorted({run.seed for row in rows for run in row.runs})
    spread = "mean ± standard deviation" if len(seeds) > 1 else "no spread"
    best = f"bold: best of those with at most {EFFICIENT:g} times the file size of one network; " if bold else ""
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return (
        f"{named}: {spread}; {best}size and prediction time: relative to one network; training epochs: measured time "
        "in epochs of one network; agreement: inter-rater kappa, lower is more diverse"
    )


def about(rows: Sequence[Row]) -> dict[str, str]:
    """Return the command, the training time and the machine of a comparison."""
    seconds = sum(sum(row.values("seconds")) for row in rows)
    found = {row.name: dict.fromkeys(filter(None, (run.metrics.get("engine") for run in row.runs))) for row in rows}
    engines = [f"{name}: {', '.join(own)}" for name, own in found.items() if own]
    return {
        "command": shlex.join(["plures", *sys.argv[1:]]),
        "training time of all runs, one core each": duration(seconds),
        **({"predicted by the engine": "; ".join(engines)} if engines else {}),
        "machine": ", ".join(f"{key} {value}" for key, value in machine().items()),
    }


def as_csv(rows: Sequence[Row]) -> str:
    """Write one line per run, with every digit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "seed", *FILED, "size", "prediction", "training_epochs", "failure"])
    for row in rows:
        costs = list(asdict(row.costs).values()) if row.costs else ["", "", ""]
        for run in row.runs:
            writer.writerow([row.name, run.seed, *(run.metrics.get(key) for key in FILED), *costs, ""])
        for failure in row.failures:
            writer.writerow([row.name, "", *([""] * (len(FILED) + 3)), failure])
    return text.getvalue()


def show(title: str, rows: Sequence[Row], columns: Sequence[Column], *more: str) -> None:
    """Print a comparison with its legend: in a narrow terminal titles are wrapped, then columns left out."""
    console = terminal.console()
    endless = console.options.update(max_width=10_000)
    made, left_out = table(title, rows, columns), []
    for count in range(len(columns), 0, -1):
        if Measurement.get(console, endless, made).maximum <= console.width:
            break
        made, left_out = table(title, rows, columns[:count], narrow=True), [one.title for one in columns[count:]]
    narrow = [f"not shown: {', '.join(left_out)}; a wider terminal shows them"] if left_out else []
    terminal.show(made, legend(rows, bold=console.is_terminal), *narrow, *more)


def table(title: str, rows: Sequence[Row], columns: Sequence[Column], *, narrow: bool = False) -> Table:
    """Return a table for a terminal; a `narrow` one wraps titles, and never numbers."""
    made = terminal.table(title, ["method", *(column.title for column in columns)], [], words=["method"])
    for shown, column in zip(made.columns[1:], columns, strict=True):
        unbroken = [*column.title.split(), *(column.cell(row) for row in rows if row.runs)]
        shown.width = max(map(len, unbroken)) if narrow else None
    for row in rows:
        cells = [Text(one.cell(row), "bold" if one.stressed(rows) is row else "") for one in columns]
        made.add_row(Text(visible(row.name)), *(cells if row.runs else [Text("failed", "red")]))
    return made
