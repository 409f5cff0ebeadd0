"""Make the paper's figures: bars of member accuracies, and scores against the number of members.

    python docs/make/paper_figures.py figure2 --scale digits --seeds 3

figure1 is the accuracy of each member, figure2 quality against the number of members, figure3 the same with MIMO. Runs
are those of `plures reproduce` and `plures compare`, in RUNS/RECIPE/METHOD/seed-N; missing ones are trained. Figures
are written to OUT as PDF, PNG and SVG, and the tables of their runs as Markdown and JSON.
"""

import argparse
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from plures.lab.compare import Comparison, Published, Variant, table
from plures.lab.compare.compare import compare, costs_before
from plures.lab.compare.rows import Finished, Row
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import Look, looks_of
from plures.lab.paper import (
    AS_PUBLISHED,
    FIXED,
    METHODS,
    PAPER,
    RESNETS,
    TABLE1,
    TABLE3,
    Target,
    as_published,
    paper_data,
    scales,
)
from plures.lab.runs.open import open_run

RunMetrics = Sequence[Mapping[str, Any]]  # as in metrics.json, one per seed; none if training failed

WIDTH = 7.0  # inches: a printed page between its margins
INK = "#222222"
FILES: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {}, ".svg": {"Date": None}}  # undated
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
    "savefig.dpi": 200,
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
def member_bars(panels: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
    """Draw figure 1, the accuracy of each member, as PDF, PNG and SVG; return their paths.

    The ensemble is a line above its members, the paper's mean member a hollow marker. Over several seeds, bars and
    lines are means, with one standard deviation around them.
    """
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
    return _save(figure, stem)


@style.context(RULES, after_reset=True)
def against_members(panels: Mapping[str, Sequence[Series]], stem: Path) -> list[Path]:
    """Draw figures 2 and 3, scores against the number of members, as PDF, PNG and SVG; return their paths.

    There is one row per data set. Lines are means over seeds, with one standard deviation around them; the paper's
    values are hollow markers.
    """
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
    return _save(figure, stem)


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
                means = [values.mean() for values in known.values()]
                several = any(len(values) > 1 for values in known.values())
                errors = [_deviation(values) or 0.0 for values in known.values()] if several else None
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


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, PNG and SVG, each complete or not at all, and return their paths."""
    paths = []
    for suffix, undated in FILES.items():
        paths.append(stem.with_name(stem.name + suffix))
        contents = io.BytesIO()
        figure.savefig(contents, format=suffix[1:], metadata=undated)
        files.write(paths[-1], contents.getvalue())
    return paths


FIGURE_MEMBERS = 10
MOST_MIMO_MEMBERS = 4  # more have no room in a ResNet


def _counted(variant: Variant, most: int) -> list[Variant]:
    """Return a variant with two members and more."""
    return [replace(variant, members=count, label=f"{variant.method} {count}") for count in range(2, most + 1)]


CIFARS = scales("cifar10", "cifar100")
TARGETS = {
    "figure1": Target(
        RESNETS,
        tuple(one for one in METHODS if one.method not in ("deterministic", "mc-dropout")),
        as_published(TABLE3, "orthogonal-dropout + MO + FC"),
    ),
    # The members of a deep ensemble know nothing of each other: its first two are a deep ensemble of two.
    "figure2": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, FIGURE_MEMBERS),
            Variant("deep-ensemble", members=FIGURE_MEMBERS, label="deep-ensemble"),
            replace(FIXED, members=FIGURE_MEMBERS),
        ),
    ),
    "figure3": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, MOST_MIMO_MEMBERS),
            *_counted(Variant("mimo"), MOST_MIMO_MEMBERS),
            Variant("deep-ensemble", members=MOST_MIMO_MEMBERS, label="deep-ensemble"),
        ),
    ),
}


def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3 as PDF, PNG and SVG, and return their paths."""
    if target == "figure1":
        return member_bars({comparison.name: rows for comparison, rows in tables}, stem)
    return against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables}, stem)


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, dict[int, RunMetrics]] = {}
    for row in rows:
        if row.name.startswith("deep-ensemble"):
            points[row.name] = _first_members(row.runs, data_dir)
        else:
            method, _, count = row.name.rpartition(" ")
            points.setdefault(method, {})[int(count)] = [run.metrics for run in row.runs]
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


def main(words: Sequence[str] | None = None) -> None:
    """Train the missing runs, write their tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--scale", choices=("paper", "cpu", "digits", "smoke"), default="digits")
    parser.add_argument("--recipes", nargs="*", default=[])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--jobs", type=int)
    asked = parser.parse_args(words)
    names = list(TARGETS) if asked.target == "all" else [asked.target]
    every = {name: TARGETS[name].comparisons(asked.scale, asked.seeds, asked.recipes) for name in names}
    chosen = [(name, comparison) for name, comparisons in every.items() for comparison in comparisons]
    comparisons = [comparison for _, comparison in chosen]
    for line in costs_before(comparisons, asked.runs, asked.data_dir):
        print(line)
    found = compare(comparisons, asked.runs, at_once=asked.jobs, data_dir=asked.data_dir)
    pairs: dict[str, list[tuple[Comparison, Sequence[Row]]]] = {name: [] for name in names}
    for (name, comparison), rows in zip(chosen, found, strict=True):
        table.write(asked.out / f"{name}-{comparison.name}", rows, {**table.about(rows), "paper": PAPER})
        pairs[name].append((comparison, rows))
    for name in names:
        print(*draw(name, pairs[name], asked.out / f"{name}-{asked.scale}", asked.data_dir), sep="\n")


if __name__ == "__main__":
    main()
