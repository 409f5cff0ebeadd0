"""Write pictures as SVG: text stays text, and they follow the reader's choice of light or dark."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from plures import files

# Okabe and Ito's colours, safe for the colour-blind: one for each member.
MEMBERS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.quiet{fill:#59636e}.bold{font-weight:600}.end{text-anchor:end}.middle{text-anchor:middle}
.card{fill:#ffffff;stroke:#d1d9e0}.hair{stroke:#d1d9e0}.soft{fill:#eef1f4}.ink{fill:#1f2328}.line{stroke:#59636e}
@media(prefers-color-scheme:dark){text,.ink{fill:#f0f6fc}.quiet{fill:#9198a1}
.card{fill:#0d1117;stroke:#3d444d}.hair{stroke:#3d444d}.soft{fill:#1c2229}.line{stroke:#9198a1}}
"""


class Drawing:
    """An SVG file in the making; `says` describes it to readers who do not see it."""

    def __init__(self, width: float, height: float, says: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(says)}"><title>{escape(says)}</title><style>{STYLE}</style>',
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", size: float = 13) -> None:
        """Write words; `kind` is made of quiet, bold, end and middle."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" class="{kind}">{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], colour: str = "", width: float = 1, more: str = "") -> None:
        """Draw a line through points: a hair line if it has no colour."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        paint = f'stroke="{colour}"' if colour else 'class="hair"'
        self.parts.append(f'<polyline points="{path}" fill="none" {paint} stroke-width="{width}" {more}/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str = "", more: str = "") -> None:
        """Draw a filled rectangle: a soft grey if it has no colour."""
        paint = f'fill="{colour}"' if colour else 'class="soft"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {paint} {more}/>')

    def dot(self, x: float, y: float, colour: str = "", radius: float = 4, more: str = "") -> None:
        """Draw a disc: in the colour of text if it has none."""
        paint = f'fill="{colour}"' if colour else 'class="ink"'
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {paint} {more}/>')

    def arrow(self, x: float, y: float, length: float) -> None:
        """Draw an arrow to the right."""
        end = x + length
        path = f"M{x} {y}H{end}m-6 -5l6 5l-6 5"
        self.parts.append(f'<path d="{path}" class="line" fill="none" stroke-width="1.5"/>')

    def save(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, ("\n".join([*self.parts, "</svg>"]) + "\n").encode())


def ticks(values: Iterable[float], most: int = 5) -> list[float]:
    """Return round numbers that enclose some values."""
    values = list(values)
    low, high = min(values), max(values)
    step = next(
        base * 10.0**power
        for power in range(-6, 6)
        for base in (1, 2, 5)
        if (high - low) / (base * 10.0**power) <= most - 1
    )
    first, last = int(low // step), int(-(-high // step))
    return [round(place * step, 9) for place in range(first, max(last, first + 1) + 1)]
