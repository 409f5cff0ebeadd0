"""What the figures share: styles, axes that may be broken, and files."""

import io
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from plures import files
from plures.lab.method_names import Look

WIDTH = 7.0  # inches: a printed page between its margins
DPI = 200
POINTS = 9  # of all text
FILES: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {}, ".svg": {"Date": None}}  # undated
INK = "#222222"
TICKS = 5
STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
STRIP, GAP = 0.2, 0.08  # heights of the strip beyond a broken axis and of the break, relative to the panel

RULES: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "font.size": POINTS,
    "axes.titlesize": POINTS,
    "axes.labelsize": POINTS,
    "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS,
    "legend.fontsize": POINTS,
    "legend.frameon": False,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "svg.hashsalt": "plures",  # the same input gives the same bytes
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Mark:
    """A value of the paper, to be drawn hollow."""

    x: float
    y: float
    look: Look


def open_axes(host: Axes, ours: Sequence[float], marks: Sequence[Mark]) -> tuple[Axes, Axes]:
    """Lay axes into a host, with the range of our values, and draw the paper's; return them and the lowest ones.

    Values of the paper that would take much of the range from ours go into a strip beyond a broken axis.
    """
    host.set_axis_off()
    values = ours or [mark.y for mark in marks]
    if not values:
        axes = host.inset_axes((0, 0, 1, 1), xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no result", transform=axes.transAxes, ha="center", va="center")
        return axes, axes
    low, high = min(values), max(values)
    room = 0.75 * max(high - low, 0.03 * abs(high))
    far = any(mark.y > high + room for mark in marks), any(mark.y < low - room for mark in marks)
    above = [mark for mark in marks if far[0] and mark.y > high]
    below = [mark for mark in marks if far[1] and mark.y < low]
    near = [mark for mark in marks if mark not in above and mark not in below]
    bottom = STRIP + GAP if below else 0.0
    top = 1 - STRIP - GAP if above else 1.0
    axes = host.inset_axes((0, bottom, 1, top - bottom))
    _scale(axes, [*values, *(mark.y for mark in near)], near, ticks=TICKS, padding=0.08)
    if above:
        strip = host.inset_axes((0, 1 - STRIP, 1, STRIP), sharex=axes)
        _scale(strip, [mark.y for mark in above], above, ticks=2, padding=0.35)
        _break(lower=axes, upper=strip)
    if not below:
        return axes, axes
    strip = host.inset_axes((0, 0, 1, STRIP), sharex=axes)
    _scale(strip, [mark.y for mark in below], below, ticks=2, padding=0.35)
    _break(lower=strip, upper=axes)
    return axes, strip


def _scale(axes: Axes, values: Sequence[float], marks: Sequence[Mark], ticks: int, padding: float) -> None:
    low, high = min(values), max(values)
    pad = max(padding * (high - low), 0.005 * abs(high), 1e-6)
    axes.set_ylim(low - pad, high + pad)
    if low == high:
        axes.set_yticks([low], [f"{low:g}"])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=STEPS))
    axes.grid(axis="y")
    for mark in marks:
        axes.plot(mark.x, mark.y, **hollow(mark.look), clip_on=False, zorder=6)


def _break(lower: Axes, upper: Axes) -> None:
    upper.spines["bottom"].set_visible(False)
    upper.tick_params(axis="x", length=0, labelbottom=False)
    slash = [(-1.0, -0.5), (1.0, 0.5)]
    for axes, y in ((lower, 1.0), (upper, 0.0)):
        axes.plot([0], [y], marker=slash, markersize=7, color=INK, transform=axes.transAxes, clip_on=False, zorder=5)


def solid(look: Look) -> dict[str, Any]:
    """Draw a value of ours."""
    return {"color": look.colour, "marker": look.marker, "markersize": 5, "markeredgewidth": 0, "linewidth": 1.4}


def hollow(look: Look) -> dict[str, Any]:
    """Draw a value of the paper."""
    edge = {"markeredgecolor": look.colour, "markeredgewidth": 1.3, "markerfacecolor": "white"}
    return {"linestyle": "none", "marker": look.marker, "markersize": 6.5, **edge}


def finish(figure: Figure, handles: Sequence[Artist], inches: float) -> None:
    """Put the legend below, in as few lines as there is room for, and leave the given inches to the panels."""
    widths = [inches_of(str(handle.get_label())) + 0.6 for handle in handles]
    for lines in range(1, len(handles) + 1):
        columns = math.ceil(len(handles) / lines)
        if sum(max(column) for column in np.array_split(widths, columns)) < WIDTH:
            break
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, columnspacing=1.5)
    figure.set_size_inches(WIDTH, inches + 0.19 * lines)


def known(values: Iterable[float | None]) -> list[float]:
    """Leave out what could not be computed.

    >>> known([0.5, None, math.nan])
    [0.5]
    """
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def percent(values: Iterable[float | None]) -> list[float]:
    """Write known fractions in percent.

    >>> percent([0.5, None])
    [50.0]
    """
    return [100 * value for value in known(values)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; one value has none."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def around(values: Sequence[float]) -> list[float]:
    """The ends of the range that a mean and its deviation take."""
    if not values:
        return []
    mean, deviation = spread(values)
    return [mean - deviation, mean + deviation]


def inches_of(text: str) -> float:
    """Measure how wide a text is drawn."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=POINTS), ismath=False)
    return float(width) / 72


@contextmanager
def own_rules() -> Iterator[None]:
    """Draw by our rules whatever the user's own settings are, and leave those as they were."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RULES)
        yield


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, PNG and SVG, each complete or not at all, and return their paths."""
    ConstrainedLayoutEngine().execute(figure)  # once, for all files
    paths = []
    for suffix, undated in FILES.items():
        paths.append(stem.with_name(stem.name + suffix))
        contents = io.BytesIO()
        figure.savefig(contents, format=suffix[1:], dpi=DPI, metadata=undated)
        files.write(paths[-1], contents.getvalue())
    return paths
