"""The charts of the results: every seed a dot, every mean a bar; and quality against what it costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawing import Drawing, ticks

WIDTH = 520  # so that its letters can still be read on a telephone, at two thirds of their size
COSTS = {"file": "size of the file", "prediction": "prediction time", "training": "training time"}


@dataclass(frozen=True)
class Mark:
    """A row of a chart: a name, its colour, and a value for each seed."""

    name: str
    colour: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return sum(self.values) / len(self.values)


def dots(path: Path, says: str, axis: str, panels: Mapping[str, Sequence[Mark]], digits: int = 3) -> None:
    """Draw values as dots in rows, a panel below the other; each panel has an axis of its own."""
    left, right, row, head = 200, 62, 24, 30
    height = sum(head + row * len(rows) + 24 for rows in panels.values()) + 32
    drawing = Drawing(WIDTH, height, says)
    y = 8.0
    for title, rows in panels.items():
        places = ticks(value for one in rows for value in one.values)
        scale = (WIDTH - left - right - 20) / (places[-1] - places[0])
        bottom = y + head + row * len(rows)
        drawing.text(16, y + 20, title, "bold")
        for place in places:
            x = left + (place - places[0]) * scale
            drawing.line([(x, y + head - 4), (x, bottom)])
            drawing.text(x, bottom + 14, f"{place:g}", "quiet middle", 11)
        for number, one in enumerate(rows):
            middle = y + head + row * (number + 0.5)
            drawing.text(16, middle + 4, one.name)
            for value in one.values:
                shade = 'fill-opacity="0.55"' if len(one.values) > 1 else ""
                drawing.dot(left + (value - places[0]) * scale, middle, one.colour, 5, shade)
            if len(one.values) > 1:
                x = left + (one.mean - places[0]) * scale
                drawing.line([(x, middle - 9), (x, middle + 9)], one.colour, 2.5)
            drawing.text(WIDTH - 16, middle + 4, f"{one.mean:.{digits}f}", "end")
        y = bottom + 24
    drawing.text(16, y + 12, axis, "quiet", 12)
    drawing.save(path)


@dataclass(frozen=True)
class Point:
    """A method: its name, colour, quality, and costs relative to one network."""

    name: str
    colour: str
    quality: float
    costs: Mapping[str, float]


def against_costs(path: Path, says: str, quality: str, points: Sequence[Point]) -> None:
    """Draw quality against each cost in panels side by side, with numbered points and a legend below."""
    panel, gap, left, top, height = 142, 17, 46, 44, 200
    lines = math.ceil(len(points) / 2)
    drawing = Drawing(WIDTH, top + height + 56 + 22 * lines, says)
    levels = ticks(one.quality for one in points)

    def place(value: float) -> float:
        return top + height * (value - levels[0]) / (levels[-1] - levels[0])  # downwards: better is lower in the file

    def upright(value: float) -> float:
        return 2 * top + height - place(value)

    for number, (cost, title) in enumerate(COSTS.items()):
        x0 = left + number * (panel + gap)
        most = max(one.costs[cost] for one in points if cost in one.costs)
        marks = [mark for mark in ((1, 2, 5, 10) if most < 12 else (1, 3, 10, 30, 100)) if mark <= most * 1.35]
        end = math.log(max(most * 1.25, marks[-1]))

        def across(value: float, x0: float = x0, end: float = end) -> float:
            return x0 + 12 + (panel - 24) * max(math.log(value), 0) / end

        drawing.text(x0, top - 18, title, "bold")
        for level in levels:
            drawing.line([(x0, upright(level)), (x0 + panel, upright(level))])
            if not number:
                drawing.text(x0 - 8, upright(level) + 4, f"{level:g}", "quiet end", 11)
        for mark in marks:
            drawing.text(across(mark), top + height + 16, f"{mark} x", "quiet middle", 11)
        taken: list[tuple[float, float]] = []
        for index, one in enumerate(points, 1):
            if cost in one.costs:
                x, y = across(one.costs[cost]), upright(one.quality)
                while any(abs(x - other) < 16 and abs(y - its) < 12 for other, its in taken):
                    x += 4  # beside it, not behind it
                taken.append((x, y))
                drawing.dot(x, y, one.colour, 9)
                number_in(drawing, x, y + 4, index)
    drawing.text(16, top + height + 38, f"{quality}, lower is better; costs in networks (logarithmic)", "quiet", 12)
    for index, one in enumerate(points):
        x, y = 16 + (index % 2) * WIDTH / 2, top + height + 64 + 22 * (index // 2)
        drawing.dot(x + 8, y - 4, one.colour, 8)
        number_in(drawing, x + 8, y, index + 1)
        drawing.text(x + 22, y, one.name)
    drawing.save(path)


def number_in(drawing: Drawing, x: float, y: float, number: int) -> None:
    """Write the number of a point into its disc."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    drawing.parts.append(f'<text {place} font-size="11" class="bold middle" style="fill:#fff">{number}</text>')
