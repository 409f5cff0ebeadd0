"""Tables of kept runs, measured on held-out images: what the comparisons of classifiers and of schedules share."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import store
from plures import files
from plures.lab.compare.jobs import Job

EMBEDDED = ("digits", "digits-resnet")  # recipes whose data come with plures


@dataclass(frozen=True)
class Line:
    """One line of a table: what was kept of the runs of its seeds."""

    name: str
    runs: list[store.Kept]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs."""
        return tuple(run["recipe"]["seed"] for run in self.runs)

    def values(self, key: str) -> list[float]:
        """Return one figure of every seed."""
        return [float(one["held_out"][key]) for one in self.runs]

    def mean(self, key: str) -> float:
        """Return its mean over the seeds."""
        return statistics.fmean(self.values(key))

    def cell(self, key: str, digits: int, scale: float = 1) -> str:
        """Write mean and standard deviation; a dash where there is no figure."""
        if any(one["held_out"].get(key) is None for one in self.runs):
            return "-"
        spread = statistics.stdev(self.values(key)) if len(self.runs) > 1 else None
        return f"{scale * self.mean(key):.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def lines_of(jobs: Mapping[str, Sequence[Job]]) -> list[Line]:
    """Collect the lines that runs were kept of."""
    found = {name: [one for job in own if (one := store.read(job, "held_out"))] for name, own in jobs.items()}
    return [Line(name, runs) for name, runs in found.items() if runs]


def save(name: str, lines: Sequence[Line], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Write a table into docs/results as Markdown and JSON, and say how many runs it has."""
    runs = [run for line in lines for run in line.runs]
    store.refuse_other_data(name, runs)
    images, seeds = runs[0]["held_out"]["images"], max((line.seeds for line in lines), key=len)
    fewer = [f"{line.name} ({', '.join(map(str, line.seeds))})" for line in lines if len(line.seeds) < len(seeds)]
    spread = f"seeds {', '.join(map(str, seeds))}: mean ± standard deviation"
    notes = [
        f"{spread if len(seeds) > 1 else f'seed {seeds[0]}: no spread'}; agreement: inter-rater kappa, "
        "lower is more diverse",
        *([f"fewer seeds: {'; '.join(fewer)}"] if fewer else []),
        f"each run is measured on {images:,} training images that it was not trained on; the test images were not "
        "looked at",
        f"command: python docs/make/evidence.py --only {name}{'' if name.endswith(EMBEDDED) else ' --data-dir DATA'}",
        f"machines: {store.machines(runs)}",
    ]
    head = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells])
    rows = [{"name": one.name, "seeds": one.seeds, "found": [run["held_out"] for run in one.runs]} for one in lines]
    text = "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"
    files.write(store.RESULTS / f"{name}.md", text.encode())
    files.write_json(store.RESULTS / f"{name}.json", {"notes": notes, "rows": rows})
    return len(runs)
