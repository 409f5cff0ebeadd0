"""The table of a comparison: on the terminal, as Markdown and JSON."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from plures import files
from plures.errors import visible
from plures.lab import terminal
from plures.lab.compare.rows import EFFICIENT, Row
from plures.lab.costs import machine
from plures.progress import duration

# What the JSON file holds of each run. The table shows `columns`.
FILED = (
    *("accuracy", "nll", "ece", "brier", "calibrated_nll", "temperature", "aurc", "mean_member_accuracy", "agreement"),
    *("seconds", "calibrated_ece"),
)


@dataclass(frozen=True)
class Column:
    """One column of a comparison: a metric of runs or a cost, how it is written, and which end is better."""

    title: str
    key: str
    better: Literal["high", "low"] | None = None
    digits: int = 3
    scale: float = 1
    unit: str = ""

    def value(self, row: Row) -> float | None:
        """Return the cost, or the mean of the metric over the seeds; None if it was not measured."""
        found = getattr(row.costs, self.key, None)
        mean = row.mean(self.key) if found is None else found
        return None if mean is None else self.scale * mean

    def cell(self, row: Row) -> str:
        """Return the value in words, with its standard deviation if there are several seeds."""
        value, deviation = self.value(row), row.deviation(self.key)
        spread = "" if deviation is None else f" ± {self.scale * deviation:.{self.digits}f}"
        return terminal.UNKNOWN if value is None else f"{value:.{self.digits}f}{spread}{self.unit}"

    def stressed(self, rows: Sequence[Row]) -> Row | None:
        """Return the row to print in bold: the best of those of about the size of one network, if sizes are known."""
        some = [row for row in rows if row.efficient] if any(row.costs for row in rows) else rows
        known = [(value, row) for row in some if (value := self.value(row)) is not None]
        if self.better is None or len(known) < 2:
            return None
        return (max if self.better == "high" else min)(known, key=lambda pair: pair[0])[1]


class PaperColumn(Column):
    """The column of the paper's figures, several in a cell; its key names them."""

    def value(self, row: Row) -> float | None:
        """Return the published accuracy."""
        return row.paper.accuracy if row.paper else None

    def cell(self, row: Row) -> str:
        """Return the published figures."""
        found = [] if row.paper is None else [(key, getattr(row.paper, key)) for key in self.key.split()]
        words = [f"{100 * value:.1f}" if key.endswith("accuracy") else f"{value:.3g}" for key, value in found]
        return " / ".join(words) or terminal.UNKNOWN


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a comparison, without those that no row has a figure for.

    What matters most comes first: a narrow screen shows no more than fits.
    """
    paper = PaperColumn("paper: accuracy % / NLL / ECE", "accuracy nll ece")
    if any(row.paper and row.paper.agreement for row in rows):
        title = "paper: member accuracy % / accuracy % / NLL / ECE / agreement"
        paper = PaperColumn(title, "member_accuracy accuracy nll ece agreement")
    every = [
        Column("accuracy %", "accuracy", "high", 1, 100),
        Column("NLL", "nll", "low"),
        Column("ECE", "ece", "low", 4),
        paper,
        Column("size", "size", digits=2, unit=" x"),
        Column("prediction", "prediction", digits=1, unit=" x"),
        Column("training epochs", "epochs", digits=0),
        Column("calibrated NLL", "calibrated_nll", "low"),
        Column("calibrated ECE", "calibrated_ece", "low", 4),
        Column("Brier", "brier", "low"),
        Column("member accuracy %", "mean_member_accuracy", digits=1, scale=100),
        Column("agreement", "agreement"),
    ]
    return [column for column in every if any(column.value(row) is not None for row in rows)]


def write(stem: Path, rows: Sequence[Row], about: Mapping[str, str]) -> list[Path]:
    """Write STEM.json and STEM.md, and return their paths."""
    document = json.dumps(as_json(rows, about), indent=2, allow_nan=False) + "\n"
    contents = {f"{stem}.json": document, f"{stem}.md": markdown(rows, about)}
    for path, text in contents.items():
        files.write(Path(path), text.encode(errors="backslashreplace"))
    return [Path(path) for path in contents]


def as_json(rows: Sequence[Row], about: Mapping[str, str]) -> dict[str, Any]:
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


def markdown(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    """Write a comparison as Markdown; the best of those that take the place of one network is bold."""
    shown = columns(rows)
    lines = [f"| method | {' | '.join(column.title for column in shown)} |", "|---|" + "---|" * len(shown)]
    for row in rows:
        cells = ["failed", *([""] * (len(shown) - 1))]
        if row.runs:
            cells = [f"**{one.cell(row)}**" if one.stressed(rows) is row else one.cell(row) for one in shown]
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


def show(title: str, rows: Sequence[Row], *more: str) -> None:
    """Print a comparison with its legend: in a narrow terminal titles are wrapped, then columns left out."""
    console, every = terminal.console(), columns(rows)
    endless = console.options.update(max_width=10_000)
    made, left_out = _table(title, rows, every), []
    for count in range(len(every), 0, -1):
        if Measurement.get(console, endless, made).maximum <= console.width:
            break
        made, left_out = _table(title, rows, every[:count], narrow=True), [one.title for one in every[count:]]
    narrow = [f"not shown: {', '.join(left_out)}; a wider terminal shows them"] if left_out else []
    terminal.show(made, legend(rows, bold=console.is_terminal), *narrow, *more)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], *, narrow: bool = False) -> Table:
    """Return a table for a terminal; a `narrow` one wraps titles, and never numbers."""
    made = terminal.table(title, ["method", *(column.title for column in columns)], [], words=["method"])
    for shown, column in zip(made.columns[1:], columns, strict=True):
        unbroken = [*column.title.split(), *(column.cell(row) for row in rows if row.runs)]
        shown.width = max(map(len, unbroken)) if narrow else None
    for row in rows:
        cells = [Text(one.cell(row), "bold" if one.stressed(rows) is row else "") for one in columns]
        made.add_row(Text(visible(row.name)), *(cells if row.runs else [Text("failed", "red")]))
    return made
