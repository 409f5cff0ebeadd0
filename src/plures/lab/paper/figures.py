"""The paper's figures: bars of member accuracies, and scores against the number of members."""

import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from plures import files
from plures.lab.method_names import Look, looks_of
from plures.lab.paper import Published

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
class Bars:
    """The runs of one method, and the published mean accuracy of its members."""

    name: str
    runs: RunMetrics
    paper: float | None = None


@dataclass(frozen=True)
class Series:
    """The runs of one method by their number of members, and the paper's values for it."""

    name: str
    points: Mapping[int, RunMetrics]
    paper: Mapping[int, Published]


def member_bars(panels: Mapping[str, Sequence[Bars]], stem: Path) -> list[Path]:
    """Draw figure 1, the accuracy of each member, as PDF, PNG and SVG; return their paths.

    The ensemble is a line above its members, the paper's mean member a hollow marker. Over several seeds, bars and
    lines are means, with one standard deviation around them.
    """
    every = [group for groups in panels.values() for group in groups]
    looks = looks_of(group.name for group in every)
    with style.context(RULES, after_reset=True):
        figure = Figure(figsize=(WIDTH, 3.0 * len(panels) + 0.3), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, (title, groups) in zip(grid, panels.items(), strict=True):
            axes.set_title(title, fontweight="bold")
            _bar_panel(axes, groups, looks)
        handles = [
            Patch(facecolor="#BBBBBB", label="one member"),
            Line2D([], [], color=INK, linewidth=1.8, label="ensemble"),
            *_deviation(group.runs for group in every),
        ]
        if any(group.paper for group in every):
            handles.append(Line2D([], [], **_hollow(Look(INK, "D")), label="paper: mean member"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return _save(figure, stem)


def against_members(panels: Mapping[str, Sequence[Series]], stem: Path) -> list[Path]:
    """Draw figures 2 and 3, scores against the number of members, as PDF, PNG and SVG; return their paths.

    There is one row per data set. Lines are means over seeds, with one standard deviation around them; the paper's
    values are hollow markers.
    """
    every = [series for panel in panels.values() for series in panel]
    looks = looks_of(series.name for series in every)
    with style.context(RULES, after_reset=True):
        handles: list[Artist] = [Line2D([], [], **_solid(look), label=name) for name, look in looks.items()]
        handles += _deviation(runs for series in every for runs in series.points.values())
        if any(series.paper for series in every):
            handles.append(Line2D([], [], **_hollow(Look(INK, "o")), label="paper (hollow)"))
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


def _bar_panel(axes: Axes, groups: Sequence[Bars], looks: Mapping[str, Look]) -> None:
    most = max((len(run["member_accuracies"]) for group in groups for run in group.runs), default=1)
    width = min(0.8 / most, 0.3)
    seen = []  # all values, which the axis has room for
    for x, group in enumerate(groups):
        if group.paper:
            axes.plot(x, 100 * group.paper, **_hollow(Look(INK, "D")))
            seen.append(100 * group.paper)
        if not group.runs:
            continue
        together = [100 * run["accuracy"] for run in group.runs]
        members = [[100 * value for value in run["member_accuracies"]] for run in group.runs]
        means, deviations = zip(*map(_mean_and_deviation, zip(*members, strict=True)), strict=True)
        places = [x + (index - (len(means) - 1) / 2) * width for index in range(len(means))]
        look: dict[str, Any] = {"color": looks[group.name].colour, "edgecolor": "white", "linewidth": 0.6}
        axes.bar(places, means, width, yerr=deviations if any(deviations) else None, ecolor=INK, capsize=1.5, **look)
        mean, deviation = _mean_and_deviation(together)
        axes.errorbar(x, mean, deviation or None, 0.45, color=INK, linewidth=1.8)
        seen += [*together, *(value for run in members for value in run)]
    if seen:
        start = _floor(min(seen), max(seen))
        axes.set_ylim(bottom=start)
        axes.set_ylabel("accuracy in %" + (f"\n(axis starts at {start})" if start else ""))
    names = [group.name + ("" if group.runs else " (no\N{NO-BREAK SPACE}result)") for group in groups]
    letters = max(10, 76 // len(groups))
    axes.set_xticks(range(len(groups)), [textwrap.fill(name, letters, break_long_words=False) for name in names])
    axes.tick_params(axis="x", length=0)


def _floor(low: float, high: float) -> int:
    """Return where bars begin: low enough that the shortest one is seen, and at zero if that is not far."""
    start = low - 0.6 * max(high - low, 0.02 * high)
    return math.floor(start) if start > 0.3 * high else 0


def _line_panel(axes: Axes, every: Sequence[Series], key: str, scale: float, looks: Mapping[str, Look]) -> None:
    for series in every:
        look = looks[series.name]
        published: dict[int, RunMetrics] = {count: [vars(row)] for count, row in series.paper.items()}
        for points, line in ((series.points, _solid(look)), (published, _hollow(look))):
            known = {
                count: _mean_and_deviation([scale * run[key] for run in runs])
                for count, runs in sorted(points.items())
                if runs
            }
            if known:
                mean, deviation = zip(*known.values(), strict=True)
                errors = deviation if any(deviation) else None
                axes.errorbar(list(known), mean, errors, capsize=2, elinewidth=0.9, **line)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _deviation(every: Iterable[RunMetrics]) -> list[Artist]:
    """Return the line of a legend about deviations, if there are several seeds."""
    if all(len(runs) < 2 for runs in every):
        return []
    label = "± one standard deviation of the seeds"
    return [Line2D([], [], color=INK, linestyle="none", marker="|", markersize=9, label=label)]


def _solid(look: Look) -> dict[str, Any]:
    """Return the style of our values."""
    return {"color": look.colour, "marker": look.marker, "markersize": 5, "markeredgewidth": 0, "linewidth": 1.4}


def _hollow(look: Look) -> dict[str, Any]:
    """Return the style of the paper's values."""
    edge = {"markeredgecolor": look.colour, "markeredgewidth": 1.3, "markerfacecolor": "white"}
    return {"linestyle": "none", "marker": look.marker, "markersize": 6.5, "zorder": 6, **edge}


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, PNG and SVG, each complete or not at all, and return their paths."""
    paths = []
    for suffix, undated in FILES.items():
        paths.append(stem.with_name(stem.name + suffix))
        contents = io.BytesIO()
        figure.savefig(contents, format=suffix[1:], metadata=undated)
        files.write(paths[-1], contents.getvalue())
    return paths
