"""The paper's figures: the accuracy of each member, and scores against the number of members."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 1.3, "markersize": 6.5}


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
    """Draw figure 1, 2 or 3, with a panel for each table, as PDF and SVG; return their paths."""
    if target == "figure1":
        figure = each_member({comparison.name: rows for comparison, rows in tables})
    else:
        figure = against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables})
    paths = []
    for suffix, metadata in UNDATED.items():
        paths.append(stem.with_name(stem.name + suffix))
        with files.replacing(paths[-1]) as beside:
            figure.savefig(beside, format=suffix[1:], metadata=metadata)
    return paths


def each_member(panels: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw the accuracy of each member and of the ensemble, for every seed; the paper's mean member is hollow."""
    looks = looks_of(row.name for rows in panels.values() for row in rows)
    figure = Figure(figsize=(WIDTH, 3.0 * len(panels) + 0.5), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        axes.set(title=title, ylabel="accuracy in %")
        for x, row in enumerate(rows):
            for run in row.runs:
                members = 100 * np.array(run.metrics["member_accuracies"])
                places = x + np.linspace(-0.3, 0.3, len(members) + 2)[1:-1]
                colour = looks[row.name].colour
                axes.plot(places, members, "o", color=colour, markersize=4, alpha=0.8, label="one member")
                axes.plot(x, 100 * run.metrics["accuracy"], "_", color=INK, markersize=22, label="ensemble")
            if row.paper and row.paper.member_accuracy:
                mean = 100 * row.paper.member_accuracy
                axes.plot(x, mean, "D", markeredgecolor=INK, label="paper: mean member", **HOLLOW)
        names = [row.name + ("" if row.runs else " (no\N{NO-BREAK SPACE}result)") for row in rows]
        letters = max(10, 76 // len(rows))
        axes.set_xticks(range(len(rows)), [textwrap.fill(name, letters, break_long_words=False) for name in names])
    _explain(figure, columns=3)
    return figure


def against_members(panels: Mapping[str, Sequence[Series]]) -> Figure:
    """Draw scores against the number of members: means with one standard deviation; the paper's values are hollow."""
    looks = looks_of(series.name for panel in panels.values() for series in panel)
    figure = Figure(figsize=(WIDTH, 2.4 * len(panels) + 0.2 * len(looks) + 0.4), layout="constrained")
    for row, (title, own) in zip(figure.subplots(len(panels), len(SCORES), squeeze=False), panels.items(), strict=True):
        row[0].set_ylabel(title, fontweight="bold")
        for axes, (heading, key, scale) in zip(row, SCORES, strict=True):
            axes.set(title=heading, xlabel="members")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            for series in own:
                _line(axes, series, key, scale, looks[series.name])
    several = any(len(runs) > 1 for own in panels.values() for one in own for runs in one.points.values())
    _explain(figure, columns=3, title="± one standard deviation of the seeds" if several else None)
    return figure


def _line(axes: Axes, series: Series, key: str, scale: float, look: Look) -> None:
    known = {n: scale * np.array([run[key] for run in runs]) for n, runs in sorted(series.points.items()) if runs}
    means = [values.mean() for values in known.values()]
    errors = [values.std(ddof=1) if len(values) > 1 else 0.0 for values in known.values()]
    solid: dict[str, Any] = {"color": look.colour, "marker": look.marker, "markersize": 5, "linewidth": 1.4}
    axes.errorbar(list(known), means, errors if any(errors) else None, capsize=2, label=series.name, **solid)
    for count, published in series.paper.items():
        value, label = scale * getattr(published, key), "paper (hollow)"
        axes.plot(count, value, look.marker, markeredgecolor=look.colour, zorder=6, label=label, **HOLLOW)


def _explain(figure: Figure, columns: int, title: str | None = None) -> None:
    """Add a legend that explains each label of the plots once."""
    found = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    first = {label: handle for handle, label in reversed(found)}
    labels = list(dict.fromkeys(label for _, label in found))
    figure.legend([first[label] for label in labels], labels, loc="outside lower center", ncols=columns, title=title)


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
