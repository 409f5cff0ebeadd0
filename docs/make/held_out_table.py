"""Tables of kept runs, measured on held-out images: what the comparisons of classifiers and of schedules share."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept import kept, machines
from plures.lab.compare.jobs import Job

RESULTS = Path(__file__).parent.parent / "results"
EMBEDDED = ("digits", "digits-resnet")  # recipes whose data come with plures


@dataclass(frozen=True)
class Line:
    """One line of a table: what was kept of the run of each seed."""

    name: str
    seeds: tuple[int, ...]
    kept: list[Any]

    def values(self, key: str) -> list[float]:
        """Return one figure of every seed."""
        return [float(one["held_out"][key]) for one in self.kept]

    def mean(self, key: str) -> float:
        """Return its mean over the seeds."""
        return statistics.fmean(self.values(key))

    def cell(self, key: str, digits: int, scale: float = 1) -> str:
        """Write mean and standard deviation; a dash where there is no figure."""
        if any(one["held_out"].get(key) is None for one in self.kept):
            return "-"
        spread = statistics.stdev(self.values(key)) if len(self.kept) > 1 else None
        return f"{scale * self.mean(key):.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def lines_of(jobs: Mapping[str, Sequence[Job]]) -> list[Line]:
    """Collect the lines of which the runs of all seeds were kept."""
    lines = []
    for name, own in jobs.items():
        found = [one for job in own if (one := kept(job, "held_out"))]
        if len(found) == len(own):
            lines.append(Line(name, tuple(job.recipe.seed for job in own), found))
    return lines


def save(name: str, lines: Sequence[Line], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Write a table into docs/results as Markdown and JSON."""
    images, seeds = lines[0].kept[0]["held_out"]["images"], lines[0].seeds
    spread = f"seeds {', '.join(map(str, seeds))}: mean ± standard deviation"
    notes = [
        f"{spread if len(seeds) > 1 else f'seed {seeds[0]}: no spread'}; agreement: inter-rater kappa, "
        "lower is more diverse",
        f"measured on {images:,} training images that no run trained on; the test images were not looked at",
        f"command: python docs/make/evidence.py --only {name}{'' if name.endswith(EMBEDDED) else ' --data-dir DATA'}",
        f"machines: {machines([run for line in lines for run in line.kept])}",
    ]
    head = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells])
    rows = [{"name": one.name, "seeds": one.seeds, "found": [run["held_out"] for run in one.kept]} for one in lines]
    (RESULTS / f"{name}.md").write_text("\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps({"notes": notes, "rows": rows}, indent=2) + "\n")
