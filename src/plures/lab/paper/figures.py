"""The paper's figures: bars of member accuracies, and scores against the number of members."""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from plures.errors import PluresError
from plures.lab.method_names import Look, looks_of
from plures.lab.paper import canvas
from plures.lab.paper.published import Published


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
    """The scores of an ensemble of a number of members, one value per seed.

        Point(5, accuracy=(0.951, 0.949), nll=(0.157, 0.160), ece=(0.008, 0.009))

    Accuracies are fractions. NaN and None are left out.
    """

    members: int
    accuracy: tuple[float | None, ...]
    nll: tuple[float | None, ...]
    ece: tuple[float | None, ...]

    @classmethod
    def published(cls, members: int, row: Published) -> "Point":
        """Make a point of a row of the paper's tables."""
        return cls(members, (row.accuracy,), (row.nll,), (row.ece,))


@dataclass(frozen=True)
class Series:
    """One method with several numbers of members, and what the paper reports of it."""

    name: str
    points: tuple[Point, ...]
    paper: tuple[Point, ...] = ()


Item = TypeVar("Item", Bars, Series)
Pick = Callable[[Point], list[float]]
SCORES: dict[str, Pick] = {
    "accuracy in %\nhigher is better": lambda point: canvas.percent(point.accuracy),
    "NLL\nlower is better": lambda point: canvas.known(point.nll),
    "ECE\nlower is better": lambda point: canvas.known(point.ece),
}


def member_bars(panels: Mapping[str, Sequence[Bars]], stem: Path) -> list[Path]:
    """Draw figure 1, the accuracy of each member, as PDF, PNG and SVG; return their paths.

    The ensemble is a line above its members, the paper's mean member a hollow marker. Over several seeds, bars and
    lines are means, with one standard deviation around them.
    """
    every = _every("member_bars", panels)
    with canvas.own_rules():
        figure = Figure()
        looks = looks_of(group.name for group in every)
        for index, (title, groups) in enumerate(panels.items()):
            host = figure.add_subplot(len(panels), 1, index + 1)
            host.set_title(title, fontweight="bold")
            _bar_panel(host, groups, looks, inches=canvas.WIDTH - 0.75)
        canvas.finish(figure, _bar_legend(every), len(panels) * 2.9)
        return canvas.save_figure(figure, stem)


def against_members(panels: Mapping[str, Sequence[Series]], stem: Path) -> list[Path]:
    """Draw figures 2 and 3, scores against the number of members, as PDF, PNG and SVG; return their paths.

    One row per data set; lines are means over seeds, the bands around them one standard deviation, and the paper's
    values hollow markers, in a strip of its own scale where they lie far from ours.
    """
    every = _every("against_members", panels)
    with canvas.own_rules():
        figure = Figure()
        looks = looks_of(series.name for series in every)
        for row, (title, own) in enumerate(panels.items()):
            for column, (heading, pick) in enumerate(SCORES.items()):
                host = figure.add_subplot(len(panels), len(SCORES), row * len(SCORES) + column + 1)
                axes, lowest = _line_panel(host, own, pick, looks)
                if row == 0:
                    host.set_title(heading)
                if row == len(panels) - 1:
                    lowest.set_xlabel("members")
                if column == 0:
                    axes.set_ylabel(title, fontweight="bold")
        canvas.finish(figure, _line_legend(every, looks), len(panels) * 2.4 + 0.3)
        return canvas.save_figure(figure, stem)


# Bars


def _bar_panel(host: Axes, groups: Sequence[Bars], looks: Mapping[str, Look], inches: float) -> None:
    ours = [value for group in groups for value in _extent(group)]
    of_paper = [(x, y) for x, group in enumerate(groups) for y in canvas.percent([group.paper])]
    marks = [canvas.Mark(x, y, Look(canvas.INK, "D")) for x, y in of_paper]
    axes, lowest = canvas.open_axes(host, [*ours, *_floor(ours)], marks)
    axes.set_xlim(-0.5, max(len(groups), 1) - 0.5)
    start = max(0.0, float(MaxNLocator(canvas.TICKS, steps=canvas.STEPS).tick_values(*axes.get_ylim())[0]))
    axes.set_ylim(bottom=start)
    axes.set_ylabel("accuracy in %" + (f"\n(axis starts at {start:g})" if start else ""))
    inch = len(groups) / inches  # on the x axis, where methods lie at 0, 1, 2 ...
    most = max((len(_by_member(group)) for group in groups), default=1)
    for x, group in enumerate(groups):
        _bar_group(axes, x, group, looks[group.name].colour, inch, width=min(0.8 / max(most, 1), 0.3 * inch))
    lowest.tick_params(axis="x", length=0)
    _name_groups(lowest, groups, inches)


def _extent(group: Bars) -> list[float]:
    """All values of a method that must be in sight."""
    each = (*_by_member(group), canvas.percent(group.ensemble))
    return [value for values in each for value in canvas.around(values)]


def _floor(values: Sequence[float]) -> list[float]:
    """Where bars begin: low enough that the shortest has a body, and at zero if that is not far."""
    if not values:
        return []
    low, high = min(values), max(values)
    start = low - 0.6 * max(high - low, 0.02 * high)
    return [start if start > 0.3 * high else 0.0]


def _bar_group(axes: Axes, x: int, group: Bars, colour: str, inch: float, width: float) -> None:
    members = _by_member(group)
    for index, values in enumerate(members):
        _bar(axes, x + (index - (len(members) - 1) / 2) * width, values, colour, width)
    if ensemble := canvas.percent(group.ensemble):
        mean, deviation = canvas.spread(ensemble)
        half = 0.04 * inch + max(0.3 * inch, width * len(members)) / 2
        axes.hlines(mean, x - half, x + half, color=canvas.INK, linewidth=1.8, zorder=4)
        if deviation:  # at the end of the line, where no member's own deviation is in the way
            axes.errorbar(x + half, mean, deviation, color=canvas.INK, linewidth=0.9, capsize=1.5)


def _bar(axes: Axes, x: float, values: Sequence[float], colour: str, width: float) -> None:
    if not values:
        return
    mean, deviation = canvas.spread(values)
    axes.bar(x, mean, width, color=colour, edgecolor="white", linewidth=0.6)
    if deviation:
        axes.errorbar(x, mean, deviation, color=canvas.INK, linewidth=0.9, capsize=1.5)


def _name_groups(axes: Axes, groups: Sequence[Bars], inches: float) -> None:
    """Write the names below, broken into lines."""
    room = 0.96 * inches / max(len(groups), 1)
    nothing = " (no\N{NO-BREAK SPACE}result)"
    names = [group.name if any(_by_member(group)) else group.name + nothing for group in groups]
    axes.set_xticks(range(len(groups)), [_wrapped(name, room) for name in names])


def _wrapped(text: str, room: float) -> str:
    """Break a text into lines as long as fit into the given inches, or after every word."""
    for letters in range(len(text), 0, -1):
        lines = textwrap.wrap(text, letters, break_long_words=False)
        if all(canvas.inches_of(line) <= room for line in lines):
            break
    return "\n".join(lines)


def _bar_legend(groups: Sequence[Bars]) -> list[Artist]:
    handles: list[Artist] = [
        Patch(facecolor="#BBBBBB", label="one member"),
        Line2D([], [], color=canvas.INK, linewidth=1.8, label="ensemble"),
    ]
    if label := _deviation_label([len(group.members) for group in groups]):
        handles.append(Line2D([], [], color=canvas.INK, linestyle="none", marker="|", markersize=9, label=label))
    if any(canvas.known([group.paper]) for group in groups):
        handles.append(Line2D([], [], **canvas.hollow(Look(canvas.INK, "D")), label="paper: mean member"))
    return handles


# Lines


def _line_panel(host: Axes, every: Sequence[Series], pick: Pick, looks: Mapping[str, Look]) -> tuple[Axes, Axes]:
    counts = {point.members for series in every for point in (*series.points, *series.paper)}
    start, end = min(counts, default=0), max(counts, default=1)
    ours = [value for series in every for point in series.points for value in canvas.around(pick(point))]
    marks = _line_marks(every, pick, looks, aside=0.045 * (end - start + 1))
    axes, lowest = canvas.open_axes(host, ours, marks)
    if not ours and not marks:
        return axes, lowest
    for series in every:
        _line(axes, [(point.members, pick(point)) for point in series.points if pick(point)], looks[series.name])
    margin = max(0.5, 0.04 * (end - start))
    axes.set_xlim(start - margin, end + margin)
    axes.set_xticks(range(start, end + 1))
    return axes, lowest


def _line_marks(every: Sequence[Series], pick: Pick, looks: Mapping[str, Look], aside: float) -> list[canvas.Mark]:
    """The paper's values; those of ensembles of one size stand side by side, where equal ones would hide each other."""
    marks = []
    known = [(point.members, y, series.name) for series in every for point in series.paper for y in pick(point)]
    for members in {members for members, _, _ in known}:
        same = [(y, looks[name]) for count, y, name in known if count == members]
        marks += [canvas.Mark(members + (i - (len(same) - 1) / 2) * aside, y, look) for i, (y, look) in enumerate(same)]
    return marks


def _line(axes: Axes, points: Sequence[tuple[int, list[float]]], look: Look) -> None:
    points = sorted(points)
    x = [members for members, _ in points]
    mean = [canvas.spread(values)[0] for _, values in points]
    deviation = [canvas.spread(values)[1] for _, values in points]
    axes.plot(x, mean, **canvas.solid(look))
    if len(points) == 1 and any(deviation):
        axes.errorbar(x, mean, deviation, color=look.colour, linewidth=0.9, capsize=2)
    elif any(deviation):
        low = [m - d for m, d in zip(mean, deviation, strict=True)]
        high = [m + d for m, d in zip(mean, deviation, strict=True)]
        axes.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)


def _line_legend(series: Sequence[Series], looks: Mapping[str, Look]) -> list[Artist]:
    handles: list[Artist] = [Line2D([], [], **canvas.solid(look), label=name) for name, look in looks.items()]
    if label := _deviation_label([len(point.accuracy) for one in series for point in one.points]):
        handles.append(Patch(facecolor=canvas.INK, alpha=0.18, label=label))
    if any(one.paper for one in series):
        handles.append(Line2D([], [], **canvas.hollow(Look(canvas.INK, "o")), label="paper (hollow)"))
    return handles


def _by_member(group: Bars) -> list[list[float]]:
    """Group accuracies by member: one value per seed."""
    return [canvas.percent(values) for values in itertools.zip_longest(*group.members)]


def _deviation_label(seeds: Sequence[int]) -> str:
    if max(seeds, default=1) == 1:
        return ""
    return f"± one standard deviation, {seeds[0]} seeds" if len(set(seeds)) == 1 else "± one standard deviation"


def _every(figure: str, panels: Mapping[str, Sequence[Item]]) -> list[Item]:
    every = [item for panel in panels.values() for item in panel]
    if not every:
        raise PluresError(f"{figure} has nothing to draw: give panels, one per data set, with methods in them")
    return every
