"""Finished runs as rows of a table, measured on images that no training saw and that are not the test images."""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plures.lab.compare.compare import make_runs
from plures.lab.compare.jobs import Job
from plures.lab.data import Split
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.runs.open import Run, data_for, open_run
from plures.lab.timing.machine import machine

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
MOST = 10_000  # images: more take long and tell no more


@dataclass(frozen=True)
class Line:
    """One line of a table: what was measured with each seed."""

    name: str
    seeds: list[int]
    found: list[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        """Return one figure of every seed."""
        return [float(one[key]) for one in self.found]

    def mean(self, key: str) -> float:
        """Return its mean over the seeds."""
        return statistics.fmean(self.values(key))

    def cell(self, key: str, digits: int, scale: float = 1) -> str:
        """Write mean and standard deviation; a dash where there is no figure."""
        if any(one.get(key) is None for one in self.found):
            return "-"
        spread = statistics.stdev(self.values(key)) if len(self.found) > 1 else None
        return f"{scale * self.mean(key):.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def arguments(about: str) -> argparse.ArgumentParser:
    """Make what reads the words of a command that makes runs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core if not given")
    return parser


def make(jobs: Sequence[Job], at_once: int | None, data_dir: Path | None) -> None:
    """Make the runs that are missing; networks of this folder are found by the processes that make them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    failures = make_runs(jobs, at_once, data_dir, "here")
    if failures:
        sys.exit("\n".join(f"{run}: {reason}" for run, reason in failures.items()))


def measured(name: str, jobs: Sequence[Job], data_dir: Path | None) -> Line:
    """Measure the runs of one line on held-out images."""
    found = []
    for job in jobs:
        run = open_run(job.run)
        members, targets = predictions(run.ensemble, images_for(run, data_dir))
        found.append(scores(members, targets) | {"bytes": (job.run / "ensemble.safetensors").stat().st_size})
    return Line(name, [job.recipe.seed for job in jobs], found)


def images_for(run: Run, data_dir: Path | None) -> Split:
    """Give the training images that a run did not train on: those for validation, and those beyond its limit."""
    used = run.data(data_dir)
    every = data_for(replace(run.recipe, limit=None, validation=0), data_dir).train
    rest = np.flatnonzero(~np.isin(every.rows, used.train.rows))[:MOST]
    if not len(rest):  # the data bring validation images of their own
        return used.validation
    return Split("held-out", used.info, every.pixels, every.rows[rest], every.labels[rest])


def save(name: str, lines: Sequence[Line], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Write a table into docs/results as Markdown and JSON, and print it."""
    images, seeds = lines[0].found[0]["images"], lines[0].seeds
    spread = "mean ± standard deviation" if len(seeds) > 1 else "one seed, no spread"
    notes = [
        f"seeds {', '.join(map(str, seeds))}: {spread}; agreement: inter-rater kappa, lower is more diverse",
        f"measured on {images:,} training images that no run trained on; the test images were not looked at",
        f"command: {shlex.join(['python', sys.argv[0], *sys.argv[1:]])}",
        f"machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    head = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells])
    text = "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"
    document = {"notes": notes, "rows": [{"name": one.name, "seeds": one.seeds, "found": one.found} for one in lines]}
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    print(text)
