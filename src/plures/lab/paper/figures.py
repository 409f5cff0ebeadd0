"""The paper's figures: bars of member accuracies, and scores against the number of members."""

import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from plures import files
from plures.errors import PluresError
from plures.lab.method_names import Look, looks_of
from plures.lab.paper.published import Published

WIDTH = 7.0  # inches: a printed page between its margins
INK = "#222222"
FILES: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {}, ".svg": {"Date": None}}  # undated
RULES: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "svg.hashsalt": "plures",  # the same input gives the same bytes
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Bars:
    """Member accuracies of one method: one tuple of members per seed, and the ensemble's accuracy per seed.

        Bars("deep-ensemble", members=((0.93, 0.94), (0.92, 0.94)), ensemble=(0.95, 0.95), paper=0.934)

    Accuracies are fractions; `paper` is the published mean member accuracy. NaN and None are left out.
    """

    name: str
    members: tuple[tuple[float | None, ...], ...]
    ensemble: tuple[float | None, ...]
    paper: float | None = None


@dataclass(frozen=True)
class Point:
    """The scores of an ensemble with a number of members, one value per seed.

        Point(5, accuracy=(0.951, 0.949), nll=(0.157, 0.160), ece=(0.008, 0.009))

    Accuracies are fractions. NaN and None are left out.
    """

    members: int
    accuracy: tuple[float | None, ...]
    nll: tuple[float | None, ...]
    ece: tuple[float | None, ...]

    @classmethod
    def published(cls, members: int, row: Published) -> "Point":
        """Return the point of a row of the paper's tables."""
        return cls(members, (row.accuracy,), (row.nll,), (row.ece,))


@dataclass(frozen=True)
class Series:
    """One method with several numbers of members, and the paper's values for it."""

    name: str
    points: tuple[Point, ...]
    paper: tuple[Point, ...] = ()


Item = TypeVar("Item", Bars, Series)
Pick = Callable[[Point], tuple[float, float]]
SCORES: dict[str, Pick] = {
    "accuracy in %\nhigher is better": lambda point: mean_and_deviation(point.accuracy, scale=100),
    "NLL\nlower is better": lambda point: mean_and_deviation(point.nll),
    "ECE\nlower is better": lambda point: mean_and_deviation(point.ece),
}


def member_bars(panels: Mapping[str, Sequence[Bars]], stem: Path) -> list[Path]:
    """Draw figure 1, the accuracy of each member, as PDF, PNG and SVG; return their paths.

    The ensemble is a line above its members, the paper's mean member a hollow marker. Over several seeds, bars and
    lines are means, with one standard deviation around them.
    """
    every = _every("member_bars", panels)
    looks = looks_of(group.name for group in every)
    with own_rules():
        figure = Figure(figsize=(WIDTH, 3.0 * len(panels) + 0.3), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, (title, groups) in zip(grid, panels.items(), strict=True):
            axes.set_title(title, fontweight="bold")
            _bar_panel(axes, groups, looks)
        figure.legend(handles=_bar_legend(every), loc="outside lower center", ncols=4)
        return _save(figure, stem)


def against_members(panels: Mapping[str, Sequence[Series]], stem: Path) -> list[Path]:
    """Draw figures 2 and 3, scores against the number of members, as PDF, PNG and SVG; return their paths.

    There is one row per data set. Lines are means over seeds, with one standard deviation around them; the paper's
    values are hollow markers.
    """
    every = _every("against_members", panels)
    looks = looks_of(series.name for series in every)
    with own_rules():
        handles = _line_legend(every, looks)
        figure = Figure(figsize=(WIDTH, 2.4 * len(panels) + 0.2 * len(handles)), layout="constrained")
        grid = figure.subplots(len(panels), len(SCORES), squeeze=False)
        for row, (title, own) in zip(grid, panels.items(), strict=True):
            row[0].set_ylabel(title, fontweight="bold")
            for axes, pick in zip(row, SCORES.values(), strict=True):
                _line_panel(axes, own, pick, looks)
        for axes, below, heading in zip(grid[0], grid[-1], SCORES, strict=True):
            axes.set_title(heading)
            below.set_xlabel("members")
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return _save(figure, stem)


def _bar_panel(axes: Axes, groups: Sequence[Bars], looks: Mapping[str, Look]) -> None:
    most = max((len(_by_member(group)) for group in groups), default=1)
    width = min(0.8 / max(most, 1), 0.3)
    ends = []
    for x, group in enumerate(groups):
        members = _by_member(group)
        for index, (mean, deviation) in enumerate(members):
            place = x + (index - (len(members) - 1) / 2) * width
            look: dict[str, Any] = {"color": looks[group.name].colour, "edgecolor": "white", "linewidth": 0.6}
            axes.bar(place, mean, width, yerr=deviation or None, ecolor=INK, capsize=1.5, **look)
        together = [one for one in [mean_and_deviation(group.ensemble, scale=100)] if math.isfinite(one[0])]
        for mean, deviation in together:
            axes.errorbar(x, mean, deviation or None, 0.45, color=INK, linewidth=1.8)
        paper, _ = mean_and_deviation([group.paper], scale=100)
        if math.isfinite(paper):
            axes.plot(x, paper, **_hollow(Look(INK, "D")))
            ends.append(paper)
        ends += [mean + sign * deviation for mean, deviation in [*members, *together] for sign in (-1, 1)]
    if not ends:
        _nothing(axes)
        return
    start = _floor(min(ends), max(ends))
    axes.set_ylim(bottom=start)
    axes.set_ylabel("accuracy in %" + (f"\n(axis starts at {start})" if start else ""))
    names = [group.name + ("" if _by_member(group) else " (no\N{NO-BREAK SPACE}result)") for group in groups]
    letters = max(10, 76 // len(groups))
    axes.set_xticks(range(len(groups)), [textwrap.fill(name, letters, break_long_words=False) for name in names])
    axes.tick_params(axis="x", length=0)


def _floor(low: float, high: float) -> int:
    """Return where bars begin: low enough that the shortest one is seen, and at zero if that is not far."""
    start = low - 0.6 * max(high - low, 0.02 * high)
    return math.floor(start) if start > 0.3 * high else 0


def _bar_legend(groups: Sequence[Bars]) -> list[Artist]:
    handles: list[Artist] = [
        Patch(facecolor="#BBBBBB", label="one member"),
        Line2D([], [], color=INK, linewidth=1.8, label="ensemble"),
    ]
    if label := _deviation_label([len(group.members) for group in groups]):
        handles.append(Line2D([], [], color=INK, linestyle="none", marker="|", markersize=9, label=label))
    if any(math.isfinite(mean_and_deviation([group.paper])[0]) for group in groups):
        handles.append(Line2D([], [], **_hollow(Look(INK, "D")), label="paper: mean member"))
    return handles


def _line_panel(axes: Axes, every: Sequence[Series], pick: Pick, looks: Mapping[str, Look]) -> None:
    drawn = False
    for series in every:
        look = looks[series.name]
        for points, style in ((series.points, _solid(look)), (series.paper, _hollow(look))):
            known = sorted((point.members, *pick(point)) for point in points if math.isfinite(pick(point)[0]))
            if known:
                drawn = True
                x, mean, deviation = zip(*known, strict=True)
                axes.errorbar(x, mean, deviation if any(deviation) else None, capsize=2, elinewidth=0.9, **style)
    if drawn:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        _nothing(axes)


def _line_legend(series: Sequence[Series], looks: Mapping[str, Look]) -> list[Artist]:
    handles: list[Artist] = [Line2D([], [], **_solid(look), label=name) for name, look in looks.items()]
    if label := _deviation_label([len(point.accuracy) for one in series for point in one.points]):
        handles.append(Line2D([], [], color=INK, linestyle="none", marker="|", markersize=9, label=label))
    if any(one.paper for one in series):
        handles.append(Line2D([], [], **_hollow(Look(INK, "o")), label="paper (hollow)"))
    return handles


def _nothing(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, "no result", transform=axes.transAxes, ha="center", va="center")


def _solid(look: Look) -> dict[str, Any]:
    """Return the style of our values."""
    return {"color": look.colour, "marker": look.marker, "markersize": 5, "markeredgewidth": 0, "linewidth": 1.4}


def _hollow(look: Look) -> dict[str, Any]:
    """Return the style of the paper's values."""
    edge = {"markeredgecolor": look.colour, "markeredgewidth": 1.3, "markerfacecolor": "white"}
    return {"linestyle": "none", "marker": look.marker, "markersize": 6.5, "zorder": 6, **edge}


def mean_and_deviation(values: Iterable[float | None], scale: float = 1) -> tuple[float, float]:
    """Return the mean and the standard deviation of the known values; NaN if there are none, 0 for a single one.

    >>> mean_and_deviation([0.5, None, math.nan], scale=100)
    (50.0, 0.0)
    """
    known = [scale * value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return math.nan, 0.0
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def _by_member(group: Bars) -> list[tuple[float, float]]:
    """Return mean and standard deviation over the seeds of each member that has values."""
    every = (mean_and_deviation(values, scale=100) for values in itertools.zip_longest(*group.members))
    return [one for one in every if math.isfinite(one[0])]


def _deviation_label(seeds: Sequence[int]) -> str:
    if max(seeds, default=1) == 1:
        return ""
    return f"± one standard deviation, {seeds[0]} seeds" if len(set(seeds)) == 1 else "± one standard deviation"


def _every(figure: str, panels: Mapping[str, Sequence[Item]]) -> list[Item]:
    every = [item for panel in panels.values() for item in panel]
    if not every:
        raise PluresError(f"{figure} has nothing to draw: give panels, one per data set, with methods in them")
    return every


@contextmanager
def own_rules() -> Iterator[None]:
    """Draw by our rules, whatever the user's settings are, and leave those unchanged."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RULES)
        yield


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, PNG and SVG, each complete or not at all, and return their paths."""
    paths = []
    for suffix, undated in FILES.items():
        paths.append(stem.with_name(stem.name + suffix))
        contents = io.BytesIO()
        figure.savefig(contents, format=suffix[1:], metadata=undated)
        files.write(paths[-1], contents.getvalue())
    return paths
