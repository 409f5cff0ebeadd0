"""Draw charts by matplotlib as SVG elements of a page, whose style sheet makes them light or dark."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Draw = Callable[[Figure], None]

WIDTH = 360  # points
# Colours that stand for variables of the style sheet; any other colour is mixed with that of the text.
INK, QUIET, HAIR, EDGE, BLUE, ORANGE = (f"#0{number}0{number}0{number}" for number in range(1, 7))
VARIABLES = {INK: "ink", QUIET: "quiet", HAIR: "hair", EDGE: "edge", BLUE: "blue", ORANGE: "orange"}
RULES: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": EDGE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": HAIR,
    "legend.frameon": False,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("color", QUIET), ("major.size", 0))},
    "svg.fonttype": "none",  # text stays text, for search and screen readers
}


def chart(says: str, height: float, draw: Draw) -> Markup:
    """Return an SVG element; `says` describes it to readers who do not see it.

    chart("accuracy rises", 180, lambda figure: figure.subplots().plot([0.8, 0.9]))
    """
    file = io.BytesIO()
    # The same chart has the same bytes, whatever the user's settings are.
    with style.context(RULES | {"svg.hashsalt": says}, after_reset=True):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Markup(_inlined(file.getvalue().decode(), says))


def _inlined(svg: str, says: str) -> str:
    """Prepare a file of matplotlib to be a part of a page: its own colours, no global styles, no names twice."""
    body = svg[svg.index("<g id=") : svg.rindex("</svg>")]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family:[^;\"]*;|transform=\"rotate\(-0 [^\"]*\"", "", body)  # in the font of the page
    body = re.sub(r'="[^"]*"', lambda found: re.sub(r"\d+\.\d{3,}", _rounded, found[0]), body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r"#[0-9a-f]{6}\b(?![^<>]*clip)", lambda found: _colour(found[0]), body)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box
    return f'<svg role="img" aria-label="{escape(says)}" {box[0]}>{body}</svg>'


def _rounded(found: re.Match[str]) -> str:
    """Return a coordinate to a tenth of a point, which is finer than a screen."""
    return f"{float(found[0]):.1f}".removesuffix(".0")


def _colour(given: str) -> str:
    name = VARIABLES.get(given)
    return f"color-mix(in oklab, {given} var(--keep), var(--ink))" if name is None else f"var(--{name})"


def mirrored(*sides: tuple[Sequence[float], str, float], end: float, title: str) -> Draw:
    """Draw two histograms from 0 to `end`, one upwards and one downwards: shares, a name, and the highest share."""

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, sharex=True)
        for axes, (shares, name, highest), colour in zip((upper, lower), sides, (BLUE, ORANGE), strict=True):
            width = end / len(shares)
            axes.bar([width * place for place in range(len(shares))], shares, 0.9 * width, align="edge", color=colour)
            axes.set(xlim=(0, end), ylim=(0, 1.05 * highest))
            axes.text(0, 1, name, color=colour, transform=axes.transAxes, va="bottom")
            percent_axis(axes, most=2)
        lower.invert_yaxis()
        lower.spines["bottom"].set_visible(False)
        lower.texts[0].set(y=0)
        upper.tick_params(labelbottom=False)
        lower.set_xlabel(title)

    return draw


def whole_axis(axes: Axes, most: int = 10) -> None:
    """Write whole numbers on the horizontal axis."""
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def percent_axis(axes: Axes, most: int = 4) -> None:
    """Write percentages on the vertical axis."""
    axes.yaxis.set_major_locator(MaxNLocator(most))
    axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 4):g} %")
