"""The charts of the report, drawn by matplotlib as SVG; the style sheet of the page makes them light or dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plures.lab.report.gather import Detail

Range = tuple[float, float]
Draw = Callable[[Figure], None]
Found = Mapping[str, Any]
Measured = Sequence[tuple[Detail, Found]]

WIDTH = 360  # points
FEW = 10  # members whose values can be written one by one
# Colours that stand for variables of the style sheet; any other colour is mixed with that of the text.
INK, QUIET, HAIR, EDGE, BLUE, ORANGE = (f"#0{number}0{number}0{number}" for number in range(1, 7))
VARIABLES = {INK: "ink", QUIET: "quiet", HAIR: "hair", EDGE: "edge", BLUE: "blue", ORANGE: "orange"}
RULES: dict[Any, Any] = {
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
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RULES | {"svg.hashsalt": says})  # the same chart has the same bytes
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


def reliability(detail: Detail, says: str) -> Markup:
    """Draw accuracy against confidence, of the members alone and of the ensemble."""
    one = detail.members == 1
    pairs = [(f"{'one network' if one else 'ensemble'}, ECE {detail.metrics['ece']:.3f}", detail.together)]
    if not one:
        pairs.insert(0, (f"members alone, ECE {detail.alone_ece:.3f}", detail.alone))

    def draw(figure: Figure) -> None:
        for axes, (title, table) in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
            some = table.count > 0
            weight = (table.count[some] / table.count.sum()).sqrt().numpy()
            confidence, accuracy = table.confidence[some].numpy(), table.accuracy[some].numpy()
            axes.plot([0, 1], [0, 1], color=QUIET, linestyle=(0, (3, 4)), linewidth=1)
            axes.vlines(confidence, confidence, accuracy, color=QUIET, linewidth=1)
            area = (3.6 + 16 * weight) ** 2
            axes.scatter(confidence, accuracy, area, detail.colour, alpha=0.85, linewidths=0, zorder=3, clip_on=False)
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title, xlabel="confidence, %")
            axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
            axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])

    return chart(says, 210, draw)


def member_bars(detail: Detail, limits: Range, says: str) -> Markup:
    """Draw a bar for each member's accuracy and a line for the ensemble's."""
    accuracies = detail.metrics["member_accuracies"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.bar(range(len(accuracies)), accuracies, min(0.72, 0.12 * len(accuracies)), color=detail.colour, alpha=0.7)
        if len(accuracies) > 1:
            axes.axhline(detail.metrics["accuracy"], color=INK, linewidth=2)
        axes.set(xlim=(-0.6, len(accuracies) - 0.4), ylim=limits)
        axes.set_xlabel("member" if len(accuracies) > 1 else "the only network")
        axes.set_xticks(range(0, len(accuracies), 1 + len(accuracies) // FEW))
        _percent(axes)

    return chart(says, 180, draw)


def added_members(detail: Detail, others: Sequence[Detail], limits: tuple[Range, Range], says: str) -> Markup:
    """Draw accuracy and NLL of the first one, two, three... members, other ensembles faintly behind."""

    def draw(figure: Figure) -> None:
        for place, (axes, title) in enumerate(zip(figure.subplots(1, 2), ("accuracy", "NLL"), strict=True)):
            for other in others:
                values = [pair[place] for pair in other.added[: detail.members]]
                own = other is detail
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    color=other.colour,
                    alpha=1 if own else 0.35,
                    linewidth=2 if own else 1,
                    zorder=3 if own else 2,
                )
            axes.set(title=title, xlabel="members", ylim=limits[place])
            _whole(axes)
            if place == 0:
                _percent(axes)

    return chart(says, 180, draw)


def agreement_matrix(detail: Detail, low: float, says: str) -> Markup:
    """Draw how often each two members give the same label: `low` is faintest, always is strongest."""
    count = detail.members
    faint, strong = (to_rgba(detail.colour, alpha) for alpha in (0.08, 0.48))
    colours = LinearSegmentedColormap.from_list("agreement", [faint, strong])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row in range(count):
            for column in (other for other in range(count) if other != row):
                value = float(detail.same_label[row, column])
                depth = (value - low) / (1 - low) if low < 1 else 1.0
                axes.fill_between([column - 0.48, column + 0.48], row - 0.48, row + 0.48, color=colours(depth), lw=0)
                if count <= FEW:
                    digits = 1 if count <= 6 else 0
                    axes.text(column, row, f"{100 * value:.{digits}f}", ha="center", va="center")
        axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal")
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.xaxis.tick_top()
        axes.xaxis.set_major_locator(MaxNLocator(FEW, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(FEW, integer=True))

    return chart(says, 230, draw)


def confidence_histogram(detail: Detail, highest: tuple[float, float], says: str) -> Markup:
    """Draw how confident right answers are, upwards, and wrong ones, downwards, each as a share of its kind.

    `highest` are the largest shares of right and of wrong answers that must fit.
    """
    sides = (
        (detail.right.shares, f"{detail.right.count:,} right", highest[0]),
        (detail.wrong.shares, f"{detail.wrong.count:,} wrong", highest[1]),
    )
    return chart(says, 205, lambda figure: _mirrored(figure, sides, 1.0, "confidence, %", percent=True))


def entropy_histogram(counts: Found, highest: float, says: str) -> Markup:
    """Draw the entropy of predictions for test images, upwards, and for other images, downwards."""
    sides = ((counts["known"], "test images", highest), (counts["strange"], counts["data"], highest))
    return chart(says, 205, lambda figure: _mirrored(figure, sides, counts["most"], "entropy, nats"))


def _mirrored(
    figure: Figure,
    sides: Sequence[tuple[Sequence[float], str, float]],
    end: float,
    title: str,
    *,
    percent: bool = False,
) -> None:
    upper, lower = figure.subplots(2, sharex=True)
    for axes, (shares, name, highest), colour in zip((upper, lower), sides, (BLUE, ORANGE), strict=True):
        width = end / max(len(shares), 1)
        axes.bar([width * place for place in range(len(shares))], shares, 0.9 * width, align="edge", color=colour)
        axes.set(xlim=(0, end), ylim=(0, 1.05 * highest))
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 4):g} %")
        axes.text(
            0, 1, name, color=colour, transform=axes.transAxes, ha="left", va="bottom" if axes is upper else "top"
        )
    lower.invert_yaxis()
    lower.spines["bottom"].set_visible(False)
    lower.texts[0].set(y=0, va="bottom")
    upper.tick_params(labelbottom=False)
    lower.set_xlabel(title)
    if percent:
        lower.set_xticks([0, 0.5, 1], ["0", "50", "100"])


def training_curves(detail: Detail, says: str) -> Markup:
    """Draw accuracy and loss over the epochs: a column per phase, a line per member, from faint to strong."""
    phases = list(dict.fromkeys(record["phase"] for record in detail.records))
    key, word = accuracy_key(detail)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2, len(phases), sharex="col", sharey="row", squeeze=False)
        for phase, above, below in zip(phases, *grid, strict=True):
            records = [record for record in detail.records if record["phase"] == phase]
            members = list(dict.fromkeys(record["member"] for record in records))
            for place, member in enumerate(members, 1):
                mine = [record for record in records if record["member"] == member]
                look = {"color": detail.colour, "alpha": 0.35 + 0.65 * place / len(members), "linewidth": 1.4}
                for axes, values in ((above, [one[key] for one in mine]), (below, [one["loss"] for one in mine])):
                    axes.plot([one["epoch"] for one in mine], values, marker="o", markersize=2.5, **look)
            below.set_xlabel(f"{phase} epochs")
            _whole(below, most=3)
        grid[0, 0].set_title(word)
        grid[1, 0].set_title("training loss")
        _percent(grid[0, 0])
        if all(record["loss"] > 0 for record in detail.records):
            grid[1, 0].set_yscale("log")

    return chart(says, 270, draw)


def accuracy_key(detail: Detail) -> tuple[str, str]:
    """Return the accuracy that shows how training went: on validation images, or on training images without them.

    accuracy_key(detail)  # ('validation_accuracy', 'validation accuracy')
    """
    if all(record["validation_accuracy"] is not None for record in detail.records):
        return "validation_accuracy", "validation accuracy"
    return "train_accuracy", "training accuracy"


def severity_curves(measured: Measured, says: str) -> Markup:
    """Draw accuracy and ECE of all rows against the severity of corruptions."""

    def draw(figure: Figure) -> None:
        for axes, key, title in zip(figure.subplots(1, 2), ("accuracy", "ece"), ("accuracy", "ECE"), strict=True):
            for detail, found in measured:
                values = [found["home"][key], *(one[key] for one in found["shift"]["by_severity"])]
                axes.plot(values, color=detail.colour, linewidth=2, label=detail.name)
            axes.set(title=title, xlabel="severity")
            _whole(axes)
            if key == "accuracy":
                _percent(axes)
        figure.legend(handles=axes.lines, loc="outside lower left")

    return chart(says, 190 + 17 * len(measured), draw)


def risk_curves(measured: Measured, says: str) -> Markup:
    """Draw the error rate of all rows against the share of images with a prediction."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for detail, found in measured:
            curve = found["risk_coverage"]
            axes.plot(curve["coverage"], curve["risk"], color=detail.colour, linewidth=2, label=detail.name)
        axes.set(xlim=(0, 1), xlabel="images with a prediction, %")
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        _percent(axes)
        figure.legend(loc="outside lower left")

    return chart(says, 190 + 17 * len(measured), draw)


def limits_of(values: Sequence[float]) -> Range:
    """Return the ends of an axis for values, with a margin.

    >>> limits_of([0.5, 0.7])
    (0.49, 0.71)
    """
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return round(low - margin, 10), round(high + margin, 10)


def _whole(axes: Axes, most: int = FEW) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def _percent(axes: Axes, most: int = 4) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(most))
    axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 4):g} %")
