"""The paper's figures: the accuracy of each member, and scores against the number of members."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from plures import files
from plures.lab.compare import Comparison, Published
from plures.lab.compare.rows import Finished, Row
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import Look, looks_of
from plures.lab.paper import TABLE1, TABLE3, paper_data
from plures.lab.runs.open import open_run

RunMetrics = Sequence[Mapping[str, Any]]  # as in metrics.json, one per seed; none if training failed

WIDTH = 7.0  # inches: a printed page between its margins
INK = "#222222"
UNDATED: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
RULES: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "svg.hashsalt": "plures",  # the same input gives the same bytes
    "pdf.fonttype": 42,
}
# A heading, the name among the metrics, and what it is multiplied by.
SCORES = (
    ("accuracy in %\nhigher is better", "accuracy", 100),
    ("NLL\nlower is better", "nll", 1),
    ("ECE\nlower is better", "ece", 1),
)


@dataclass(frozen=True)
class Series:
    """The runs of one method by their number of members, and the paper's values for it."""

    name: str
    points: Mapping[int, RunMetrics]
    paper: Mapping[int, Published]


@style.context(RULES, after_reset=True)
def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3, with a panel for each table, as PDF and SVG; return their paths.

    Bars and lines are means over the seeds, with one standard deviation around them.
    """
    if target == "figure1":
        figure = member_bars({comparison.name: rows for comparison, rows in tables})
    else:
        figure = against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables})
    paths = []
    for suffix, metadata in UNDATED.items():
        paths.append(stem.with_name(stem.name + suffix))
        contents = io.BytesIO()
        figure.savefig(contents, format=suffix[1:], metadata=metadata)
        files.write(paths[-1], contents.getvalue())
    return paths


def member_bars(panels: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw the accuracy of each member; the ensemble is a line above, the paper's mean member a hollow marker."""
    every = [row for rows in panels.values() for row in rows]
    looks = looks_of(row.name for row in every)
    figure = Figure(figsize=(WIDTH, 3.0 * len(panels) + 0.5), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        axes.set_title(title, fontweight="bold")
        _bar_panel(axes, rows, looks)
    handles = [
        Patch(facecolor="#BBBBBB", label="one member"),
        Line2D([], [], color=INK, linewidth=1.8, label="ensemble"),
        *_notes((row.runs for row in every), "D", "paper: mean member" if any(row.paper for row in every) else ""),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def against_members(panels: Mapping[str, Sequence[Series]]) -> Figure:
    """Draw scores against the number of members; the paper's values are hollow markers."""
    every = [series for panel in panels.values() for series in panel]
    looks = looks_of(series.name for series in every)
    handles: list[Artist] = [Line2D([], [], **_solid(look), label=name) for name, look in looks.items()]
    paper = "paper (hollow)" if any(series.paper for series in every) else ""
    handles += _notes((runs for series in every for runs in series.points.values()), "o", paper)
    figure = Figure(figsize=(WIDTH, 2.4 * len(panels) + 0.2 * len(handles)), layout="constrained")
    grid = figure.subplots(len(panels), len(SCORES), squeeze=False)
    for row, (title, own) in zip(grid, panels.items(), strict=True):
        row[0].set_ylabel(title, fontweight="bold")
        for axes, (_, key, scale) in zip(row, SCORES, strict=True):
            _line_panel(axes, own, key, scale, looks)
    for axes, below, (heading, _, _) in zip(grid[0], grid[-1], SCORES, strict=True):
        axes.set_title(heading)
        below.set_xlabel("members")
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _bar_panel(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    most = max((len(run.metrics["member_accuracies"]) for row in rows for run in row.runs), default=1)
    width = min(0.8 / most, 0.3)
    seen = []  # all values, which the axis has room for
    for x, row in enumerate(rows):
        if row.paper and row.paper.member_accuracy:
            axes.plot(x, 100 * row.paper.member_accuracy, **_hollow(Look(INK, "D")))
            seen.append(100 * row.paper.member_accuracy)
        if not row.runs:
            continue
        together = 100 * np.array(row.values("accuracy"))
        members = 100 * np.array([run.metrics["member_accuracies"] for run in row.runs])
        places = x + (np.arange(members.shape[1]) - (members.shape[1] - 1) / 2) * width
        look: dict[str, Any] = {"color": looks[row.name].colour, "edgecolor": "white", "linewidth": 0.6}
        axes.bar(places, members.mean(0), width, yerr=_deviation(members), ecolor=INK, capsize=1.5, **look)
        axes.errorbar(x, together.mean(), _deviation(together), 0.45, color=INK, linewidth=1.8)
        seen += [*together, *members.flat]
    if seen:
        # Bars begin low enough that the shortest one is seen, and at zero if that is not far.
        start = math.floor(min(seen) - 0.6 * max(max(seen) - min(seen), 0.02 * max(seen)))
        start = start if start > 0.3 * max(seen) else 0
        axes.set_ylim(bottom=start)
        axes.set_ylabel("accuracy in %" + (f"\n(axis starts at {start})" if start else ""))
    names = [row.name + ("" if row.runs else " (no\N{NO-BREAK SPACE}result)") for row in rows]
    letters = max(10, 76 // len(rows))
    axes.set_xticks(range(len(rows)), [textwrap.fill(name, letters, break_long_words=False) for name in names])
    axes.tick_params(axis="x", length=0)


def _line_panel(axes: Axes, every: Sequence[Series], key: str, scale: float, looks: Mapping[str, Look]) -> None:
    for series in every:
        look = looks[series.name]
        published: dict[int, RunMetrics] = {count: [vars(row)] for count, row in series.paper.items()}
        for points, line in ((series.points, _solid(look)), (published, _hollow(look))):
            known = {n: scale * np.array([run[key] for run in runs]) for n, runs in sorted(points.items()) if runs}
            if known:
                several = any(len(values) > 1 for values in known.values())
                errors = [_deviation(values) or 0.0 for values in known.values()] if several else None
                means = [values.mean() for values in known.values()]
                axes.errorbar(list(known), means, errors, capsize=2, elinewidth=0.9, **line)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _deviation(values: npt.NDArray[np.float64]) -> Any:
    """Return the standard deviation over the seeds; None for a single one."""
    return values.std(0, ddof=1) if len(values) > 1 else None


def _notes(every: Iterable[Sequence[object]], marker: str, paper: str) -> list[Artist]:
    """Return the lines of a legend about deviations, if there are several seeds, and the paper, if it is shown."""
    bar = {"color": INK, "linestyle": "none", "marker": "|", "markersize": 9}
    label = "± one standard deviation of the seeds" if any(len(runs) > 1 for runs in every) else ""
    styles = {label: bar, paper: _hollow(Look(INK, marker))}
    return [Line2D([], [], **style, label=words) for words, style in styles.items() if words]


def _solid(look: Look) -> dict[str, Any]:
    """Return the style of our values."""
    return {"color": look.colour, "marker": look.marker, "markersize": 5, "markeredgewidth": 0, "linewidth": 1.4}


def _hollow(look: Look) -> dict[str, Any]:
    """Return the style of the paper's values."""
    edge = {"markeredgecolor": look.colour, "markeredgewidth": 1.3, "markerfacecolor": "white"}
    return {"linestyle": "none", "marker": look.marker, "markersize": 6.5, "zorder": 6, **edge}


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, dict[int, RunMetrics]] = {}
    for row in rows:
        method, _, count = row.name.rpartition(" ")
        if count.isdigit():
            points.setdefault(method, {})[int(count)] = [run.metrics for run in row.runs]
        else:
            points[row.name] = _first_members(row.runs, data_dir)
    data = paper_data(comparison.recipe.data)
    known = TABLE3.get(data, {}) | TABLE1.get(data, {})
    return [
        Series(name, found, {2 if name == "mimo" else 5: known[name]} if name in known else {})
        for name, found in points.items()
    ]


def _first_members(runs: Sequence[Finished], data_dir: Path | None) -> dict[int, RunMetrics]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for finished in runs:
        run = open_run(finished.path)
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        for count in range(2, len(members) + 1):
            found.setdefault(count, []).append(scores(members[:count], targets))
    return dict(found)
