"""A few lines of SVG: shapes have classes, and the page's style sheet colours them for light, dark and paper."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

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
