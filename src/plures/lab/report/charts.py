"""Draw charts by matplotlib as SVG elements of a page, whose style sheet makes them light or dark."""

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plures.lab.figures import RULES

WIDTH, LINE = 360, 15  # points: of a chart, and of a name below it
# Colours that stand for variables of the style sheet; any other colour is mixed with that of the text.
INK, QUIET, HAIR, EDGE = (f"#0{number}0{number}0{number}" for number in range(1, 5))
VARIABLES = {INK: "ink", QUIET: "quiet", HAIR: "hair", EDGE: "edge"}
STYLE: dict[str, Any] = RULES | {
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
    "axes.spines.left": False,
    "grid.color": HAIR,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("color", QUIET), ("major.size", 0))},
    "text.parse_math": False,  # a name may contain dollars
}


def chart(says: str, titles: list[str], xlabel: str, draw: Callable[..., None], *, names: int = 0) -> Markup:
    """Return an SVG element with a plot per title, side by side; `says` describes it to readers who do not see it.

        chart("accuracy rises", ["accuracy, %"], "members", lambda axes: axes.plot([80, 90]))

    `draw` receives the axes. Below them is a legend if there are `names`.
    """
    file, height = io.BytesIO(), 200 + LINE * names
    # The same chart has the same bytes, whatever the user's settings are.
    with style.context(STYLE | {"svg.hashsalt": says}, after_reset=True):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        # Margins in points: a layout that measures every word takes twice as long.
        figure.subplots_adjust(0.1, (42 + LINE * names) / height, 0.98, 1 - 24 / height, wspace=0.3)
        plots: list[Axes] = list(figure.subplots(1, len(titles), squeeze=False)[0])
        for axes, title in zip(plots, titles, strict=True):
            axes.set(title=title, xlabel=xlabel)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5))
        draw(*plots)
        if names:
            figure.legend(handles=plots[0].lines, loc="lower left", labelspacing=0.2)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Markup(_inlined(file.getvalue().decode(), says))


def _inlined(svg: str, says: str) -> str:
    """Prepare a file of matplotlib to be a part of a page: its own colours, no global styles, no names twice."""
    body = svg[svg.index("<g id=") : svg.rindex("</svg>")]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family:[^;\"]*;|transform=\"rotate\(-0 [^\"]*\"", "", body)  # in the font of the page
    # A tenth of a point is finer than a screen.
    body = re.sub(r'(?<=[ "(-])\d+\.\d{3,}(?=[^<>]*>)', lambda found: f"{float(found[0]):.1f}", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r"#[0-9a-f]{6}\b(?![^<>]*clip)", r"color-mix(in oklab, \g<0> var(--keep), var(--ink))", body)
    for colour, name in VARIABLES.items():
        body = body.replace(f"color-mix(in oklab, {colour} var(--keep), var(--ink))", f"var(--{name})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box
    return f'<svg role="img" aria-label="{escape(says)}" {box[0]}>{body}</svg>'
