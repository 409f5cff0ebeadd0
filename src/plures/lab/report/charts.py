"""The charts of the report as SVG; the style sheet of the page colours them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from plures.lab.report.gather import Answers, Detail
from plures.metrics import CalibrationTable

Range = tuple[float, float]
Tick = tuple[float, str]


class Drawing:
    """Collect shapes and words, and become an SVG element.

        drawing = Drawing(360, 200)
        drawing.rectangle(10, 10, 50, 20, "mark")
        drawing.markup("a bar of length 50")

    The label is what somebody hears who does not see the picture.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def line(self, points: Sequence[tuple[float, float]], kind: str, style: str = "") -> None:
        """Draw a line through points."""
        steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._parts.append(f'<path class="{kind}"{_style(style)} d="M{steps}"/>')

    def rectangle(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = "", style: str = ""
    ) -> None:
        """Draw a box; `tip` shows under the mouse."""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(_closed("rect", f'class="{kind}"{_style(style)} {size}', tip))

    def circle(self, x: float, y: float, radius: float, kind: str, tip: str = "", style: str = "") -> None:
        """Draw a dot; `tip` shows under the mouse."""
        place = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self._parts.append(_closed("circle", f'class="{kind}"{_style(style)} {place}', tip))

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write words; `anchor` is start, middle or end."""
        about = (f' class="{kind}"' if kind else "") + ("" if anchor == "start" else f' text-anchor="{anchor}"')
        self._parts.append(f'<text{about} x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>')

    def markup(self, label: str) -> Markup:
        """Return the SVG element."""
        box = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        return Markup(f'<svg role="img" aria-label="{escape(label)}" {box}>{"".join(self._parts)}</svg>')


@dataclass(frozen=True)
class Panel:
    """A rectangle of a drawing with its own axes.

    panel = Panel(drawing, 40, 20, 140, 120, x=(0, 1), y=(0, 1))
    panel.axes(x_ticks, y_ticks)
    drawing.circle(panel.px(0.5), panel.py(0.7), 3, "mark")
    """

    drawing: Drawing
    left: float
    top: float
    width: float
    height: float
    x: Range
    y: Range

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height

    def px(self, value: float) -> float:
        """Place a value on the horizontal axis."""
        return self.left + self.width * (value - self.x[0]) / (self.x[1] - self.x[0])

    def py(self, value: float) -> float:
        """Place a value on the vertical axis."""
        return self.bottom - self.height * (value - self.y[0]) / (self.y[1] - self.y[0])

    def level(self, value: float, kind: str) -> None:
        """Draw a line across the panel at a value of the vertical axis."""
        self.drawing.line([(self.left, self.py(value)), (self.left + self.width, self.py(value))], kind)

    def axes(self, x_ticks: Iterable[Tick], y_ticks: Iterable[Tick], *, title: str = "", x_title: str = "") -> None:
        """Draw horizontal grid lines, the base line, the ticks' words, a title above and one below."""
        for value, words in y_ticks:
            self.level(value, "grid")
            self.drawing.text(self.left - 5, self.py(value) + 3.5, words, "tick", "end")
        self.level(self.y[0], "base")
        for value, words in x_ticks:
            self.drawing.text(self.px(value), self.bottom + 14, words, "tick", "middle")
        if title:
            self.drawing.text(self.left, self.top - 12, title)
        if x_title:
            self.drawing.text(self.left + self.width / 2, self.bottom + 28, x_title, "tick", "middle")


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers that cover a range, both ends included.

    >>> nice_ticks(0.92, 0.97)
    [0.92, 0.93, 0.94, 0.95, 0.96, 0.97]
    """
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    found = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [round(float(value), 10) for value in found]


def whole_ticks(first: int, last: int, most: int = 6) -> list[Tick]:
    """Choose whole numbers, evenly and not too many, beginning with the first.

    >>> whole_ticks(1, 30)
    [(1, '1'), (5, '5'), (10, '10'), (15, '15'), (20, '20'), (25, '25'), (30, '30')]
    """
    found = MaxNLocator(most, steps=[1, 2, 5, 10], integer=True).tick_values(first, last)
    return [(number, str(number)) for number in sorted({first, *map(int, found)}) if first <= number <= last]


def _closed(name: str, attributes: str, tip: str) -> str:
    return f"<{name} {attributes}><title>{escape(tip)}</title></{name}>" if tip else f"<{name} {attributes}/>"


def _style(style: str) -> str:
    return f' style="{style}"' if style else ""


def _n(value: float) -> str:
    """Write a coordinate: a tenth of a unit is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")


Record = Mapping[str, Any]

WIDTH = 360
FEW = 10  # members whose values can be written one by one
EDGES = [(0.0, "0"), (0.5, "50"), (1.0, "100")]  # of a confidence in percent


def reliability(detail: Detail, says: str) -> Markup:
    """Draw accuracy against confidence, of the members alone and of the ensemble."""
    one = detail.members == 1
    pairs = [(f"{'one network' if one else 'ensemble'}, ECE {detail.metrics['ece']:.3f}", detail.together)]
    if not one:
        pairs.insert(0, (f"members alone, ECE {detail.alone_ece:.3f}", detail.alone))
    drawing = Drawing(WIDTH, 204)
    for place, (title, table) in enumerate(pairs):
        panel = Panel(drawing, 30 + 174 * place, 26, 140, 140, (0, 1), (0, 1))
        y_ticks = EDGES if place == 0 else [(value, "") for value, _ in EDGES]
        panel.axes(EDGES, y_ticks, title=title, x_title="confidence, %")
        drawing.line([(panel.px(0), panel.py(0)), (panel.px(1), panel.py(1))], "ideal")
        _dots(drawing, panel, table)
    return drawing.markup(says)


def _dots(drawing: Drawing, panel: Panel, table: CalibrationTable) -> None:
    total = int(table.count.sum())
    bins = zip(table.count.tolist(), table.confidence.tolist(), table.accuracy.tolist(), strict=True)
    for count, confidence, accuracy in bins:
        if count:
            x, weight = panel.px(confidence), math.sqrt(count / total)
            stem = [(x, panel.py(confidence)), (x, panel.py(accuracy))]
            drawing.line(stem, "gap", f"stroke-opacity:{min(1, 0.2 + 2 * weight):.2f}")  # few answers prove little
            tip = f"{count:,} answers: confidence {confidence:.1%}, right {accuracy:.1%}"
            drawing.circle(x, panel.py(accuracy), 1.8 + 8 * weight, "dot", tip)


def member_bars(detail: Detail, limits: Range, says: str) -> Markup:
    """Draw a bar for each member's accuracy and a line for the ensemble's."""
    accuracies = detail.metrics["member_accuracies"]
    drawing = Drawing(WIDTH, 180)
    panel = Panel(drawing, 38, 12, WIDTH - 46, 136, (-0.5, len(accuracies) - 0.5), limits)
    ticks = whole_ticks(0, len(accuracies) - 1, most=FEW)
    panel.axes(ticks, percent_ticks(limits), x_title="member" if len(accuracies) > 1 else "the only network")
    width = min(0.72 * panel.width / len(accuracies), 40)
    for number, accuracy in enumerate(accuracies):
        top = panel.py(accuracy)
        tip = f"member {number}: {accuracy:.2%}"
        drawing.rectangle(panel.px(number) - width / 2, top, width, panel.bottom - top, "bar", tip)
    if len(accuracies) > 1:
        panel.level(detail.metrics["accuracy"], "level")
    return drawing.markup(says)


def added_members(detail: Detail, others: Sequence[Detail], accuracy: Range, nll: Range, says: str) -> Markup:
    """Draw accuracy and NLL of the first one, two, three... members, other ensembles faintly behind."""
    drawing = Drawing(WIDTH, 176)
    last = detail.members
    for place, (title, limits) in enumerate([("accuracy", accuracy), ("NLL", nll)]):
        ticks = plain_ticks(limits) if place else percent_ticks(limits)
        panel = Panel(drawing, 38 + 182 * place, 22, 134, 116, (1, last), limits)
        panel.axes(whole_ticks(1, last), ticks, title=title, x_title="members")
        for other in [*(one for one in others if one is not detail), detail]:
            values = [pair[place] for pair in other.added[:last]]
            points = [(panel.px(number), panel.py(value)) for number, value in enumerate(values, 1)]
            drawing.line(points, "curve" if other is detail else "behind", f"--look:{other.colour}")
        drawing.circle(*points[-1], 3, "dot", f"{title} of all {last} members: {values[-1]:.4f}")
    return drawing.markup(says)


def agreement_matrix(detail: Detail, low: float, says: str) -> Markup:
    """Draw how often each two members give the same label: `low` is faintest, always is strongest."""
    count = detail.members
    side = min(220 / count, 48)
    left, top = 16.0, 18.0 if count <= FEW else 4.0
    drawing = Drawing(WIDTH, top + side * count + 4)
    for row in range(count):
        if count <= FEW:
            drawing.text(left - 7, top + side * (row + 0.5) + 3.5, str(row), "tick", "end")
            drawing.text(left + side * (row + 0.5), top - 7, str(row), "tick", "middle")
        for column in (other for other in range(count) if other != row):
            x, y, value = left + side * column, top + side * row, float(detail.same_label[row, column])
            depth = (value - low) / (1 - low) if low < 1 else 1.0
            drawing.rectangle(x, y, side, side, "cell", style=f"fill-opacity:{0.08 + 0.4 * depth:.2f}")
            if count <= FEW:
                words = f"{100 * value:.{1 if side > 30 else 0}f}"
                drawing.text(x + side / 2, y + side / 2 + 4, words, anchor="middle")
    return drawing.markup(says)


def confidence_histogram(detail: Detail, highest: tuple[float, float], says: str) -> Markup:
    """Draw how confident right answers are, upwards, and wrong ones, downwards, each as a share of its kind.

    `highest` are the largest shares of right and of wrong answers that must fit.
    """
    drawing = Drawing(WIDTH, 200)
    upper = Panel(drawing, 38, 18, WIDTH - 46, 74, (0, 1), (0, highest[0]))
    lower = Panel(drawing, 38, 92, WIDTH - 46, 74, (0, 1), (highest[1], 0))
    for panel, answers, kind in ((upper, detail.right, "right"), (lower, detail.wrong, "wrong")):
        ticks = [value for value in nice_ticks(0, max(panel.y), most=2) if 0 < value <= max(panel.y)]
        panel.axes([], [(value, f"{100 * value:.0f} %") for value in ticks])
        _shares(drawing, panel, answers, kind)
        panel.level(0, "base")
        y = panel.top - 8 if panel is upper else panel.bottom + 28
        drawing.text(panel.left, y, f"{answers.count:,} {kind}", f"name-{kind}")
    for position, number in EDGES:
        drawing.text(lower.px(position), lower.bottom + 14, number, "tick", "middle")
    drawing.text(lower.px(0.5), lower.bottom + 28, "confidence, %", "tick", "middle")
    return drawing.markup(says)


def _shares(drawing: Drawing, panel: Panel, answers: Answers, kind: str) -> None:
    bins = len(answers.shares)
    for number, share in enumerate(answers.shares):
        if share:
            top, bottom = sorted([panel.py(0), panel.py(share)])
            tip = f"{share:.1%} of the {kind} answers: confidence {number / bins:.0%} to {(number + 1) / bins:.0%}"
            drawing.rectangle(panel.px(number / bins) + 0.7, top, panel.width / bins - 1.4, bottom - top, kind, tip)


def training_curves(detail: Detail, says: str) -> Markup:
    """Draw accuracy and loss over the epochs: a column per phase, a line per member, from faint to strong."""
    phases = list(dict.fromkeys(record["phase"] for record in detail.records))
    key, word = accuracy_key(detail)
    accuracies = [float(record[key]) for record in detail.records]
    losses = [math.log10(max(record["loss"], 1e-6)) for record in detail.records]
    drawing = Drawing(WIDTH, 260)
    gap = 20
    width = (WIDTH - 50 - gap * (len(phases) - 1)) / len(phases)
    for place, (title, values) in enumerate([(word, accuracies), ("training loss", losses)]):
        limits, ticks = _log_axis(values) if place else _percent_axis(values)
        for number, phase in enumerate(phases):
            mine = [pair for pair in zip(detail.records, values, strict=True) if pair[0]["phase"] == phase]
            last = max(record["epoch"] for record, _ in mine)
            ends = (1, last) if last > 1 else (0.5, 1.5)
            panel = Panel(drawing, 42 + number * (width + gap), 22 + 124 * place, width, 80, ends, limits)
            panel.axes(
                [(epoch, str(epoch)) for epoch in sorted({1, last})],
                ticks if number == 0 else [(value, "") for value, _ in ticks],
                title=title if number == 0 else "",
                x_title=f"{phase} epochs" if place else "",
            )
            _member_lines(drawing, panel, mine)
    return drawing.markup(says)


def _member_lines(drawing: Drawing, panel: Panel, values: Sequence[tuple[Record, float]]) -> None:
    members = list(dict.fromkeys(record["member"] for record, _ in values))
    for place, member in enumerate(members, 1):
        points = [(panel.px(one["epoch"]), panel.py(value)) for one, value in values if one["member"] == member]
        style = f"--late:{35 + 65 * place / len(members):.0f}%" if len(members) > 1 else ""
        drawing.line(points, "member", style)
        drawing.circle(*points[-1], 1.7, "end", style=style)


def accuracy_key(detail: Detail) -> tuple[str, str]:
    """Choose what shows how training went: validation images, or training images where none were held out.

    accuracy_key(detail)  # ('validation_accuracy', 'validation accuracy')
    """
    if all(record["validation_accuracy"] is not None for record in detail.records):
        return "validation_accuracy", "validation accuracy"
    return "train_accuracy", "training accuracy"


def limits_of(values: Sequence[float], most: int = 4) -> Range:
    """Choose round ends for an axis.

    >>> limits_of([0.931, 0.968])
    (0.93, 0.97)
    """
    ticks = nice_ticks(min(values), max(values), most)
    return ticks[0], ticks[-1]


def percent_ticks(limits: Range) -> list[Tick]:
    """Choose ticks of an axis of fractions.

    >>> percent_ticks((0.75, 1.0))
    [(0.8, '80 %'), (0.9, '90 %'), (1.0, '100 %')]
    """
    values = _ticks_within(limits)
    digits = 0 if all(abs(100 * value - round(100 * value)) < 1e-6 for value in values) else 1
    return [(value, f"{100 * value:.{digits}f} %") for value in values]


def plain_ticks(limits: Range) -> list[Tick]:
    """Choose ticks of an axis of other numbers."""
    return [(value, f"{value:g}") for value in _ticks_within(limits)]


def _ticks_within(limits: Range) -> list[float]:
    return [value for value in nice_ticks(*limits, most=4) if limits[0] - 1e-9 <= value <= limits[1] + 1e-9]


def _percent_axis(values: Sequence[float]) -> tuple[Range, list[Tick]]:
    limits = limits_of([*values, 1.0])
    return limits, percent_ticks(limits)


def _log_axis(values: Sequence[float]) -> tuple[Range, list[Tick]]:
    """Choose whole powers of ten around logarithms, and name not too many of them."""
    low, high = math.floor(min(values)), max(math.ceil(max(values)), math.floor(min(values)) + 1)
    step = 1 + (high - low) // 4
    return (low, high), [(power, f"{10.0**power:g}") for power in range(low, high + 1) if power % step == 0]
