"""Train the runs of comparisons, skip finished ones, and collect the results into rows."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from plures.errors import PluresError
from plures.lab.compare import Comparison, Job, unique
from plures.lab.compare.processes import RunsDisplay, is_done, launcher_for, run_all
from plures.lab.compare.rows import Finished, Row, make_rows, with_trust
from plures.lab.method_names import method_class
from plures.lab.recipes import Epochs, Recipe
from plures.lab.runs.config import differences
from plures.lab.runs.folder import RunFolder, other_settings
from plures.lab.runs.open import data_for, ensemble_for, network_for

Where = Literal["here", "ray"]
STAND_IN = 64  # channels of the network that stages are counted with


def compare(
    comparisons: Sequence[Comparison],
    runs: Path,
    *,
    at_once: int | None = None,
    data_dir: Path | None = None,
    on: Where = "here",
    shift: bool = False,
    ood: str | None = None,
) -> list[list[Row]]:
    """Train the missing runs of comparisons and return the rows of each.

    Finished runs are not trained again, and interrupted ones are resumed. Missing data is reported before anything is
    trained. A run that fails does not stop the others: its row has the reason. With `shift` and `ood`, runs are also
    measured on corrupted and on other images; the results are kept in the run folders.
    """
    failures = make_runs(unique(job for one in comparisons for job in one.jobs(runs)), at_once, data_dir, on)
    tables = [_rows(one, runs, failures) for one in comparisons]
    if shift or ood:
        print("measuring under shift and among other data", file=sys.stderr)
        tables = [with_trust(rows, data_dir, shift=shift, ood=ood) for rows in tables]
    return tables


def make_runs(jobs: Sequence[Job], at_once: int | None, data_dir: Path | None, on: Where) -> dict[Path, str]:
    """Train the runs that are missing, and return the reasons of those that failed, by run folder."""
    if at_once is not None and at_once < 1:
        raise PluresError(f"--jobs {at_once}: at least one is needed")
    for job in jobs:
        method_class(job.variant.method)  # one outside the package may be missing
        refuse_others(job)
    missing = [job for job in jobs if not is_done(job)]
    for recipe in dict.fromkeys(replace(job.recipe, epochs=Epochs(), members=1) for job in missing):
        # Decoded here, once, before several processes need them; and missing data are reported before hours of work.
        data_for(recipe, data_dir)
    begun = sum(RunFolder(job.run).log.is_file() for job in missing)
    resumed = f" ({begun} of them started before)" if begun else ""
    print(
        f"{len(jobs)} runs: {len(jobs) - len(missing)} done before, {len(missing)} to train{resumed}", file=sys.stderr
    )
    if not missing:
        return {}
    with launcher_for(on, at_once) as (start, count), RunsDisplay(len(missing)) as display:
        return run_all(missing, start, count, data_dir, display)


def planned(comparison: Comparison, runs: Path) -> list[dict[str, Any]]:
    """Count the runs, stages and epochs of each variant; nothing is trained or measured."""
    jobs = comparison.jobs(runs)
    lines = []
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        missing = sum(not is_done(job) for job in own)
        recipe = own[0].recipe
        phases = _phases(variant.method, variant.settings, recipe.members)
        counts = {"runs": len(own), "done": len(own) - missing, "stages": len(phases) * missing}
        epochs = sum(map(recipe.epochs.of, phases)) * missing
        lines.append({"recipe": comparison.name, "variant": variant.name, **counts, "epochs": epochs})
    return lines


@cache
def _phases(method: str, settings: tuple[str, ...], members: int) -> list[str]:
    """List the phases of all stages: they follow from the method and its members, so the network may be a small one."""
    recipe = Recipe(model="resnet8", width=STAND_IN, members=members)
    network = network_for(recipe, classes=2, channels=1, size=8)
    return [step.phase for step in ensemble_for(recipe, method, settings, network).plan()]


def refuse_others(job: Job) -> None:
    """Raise an error if the run folder has a run with other settings."""
    if not (job.run / "config.json").is_file():
        return
    before = RunFolder(job.run).config()
    now = {"recipe": json.loads(json.dumps(job.recipe.as_json())), "method": job.variant.class_name}
    now["options"] = before["options"]  # they follow from the network
    if differing := differences({key: before[key] for key in now}, now):
        raise other_settings(job.run, differing, "choose another folder with --runs, or the old settings")


def _rows(comparison: Comparison, runs: Path, failures: Mapping[Path, str]) -> list[Row]:
    rows = []
    jobs = comparison.jobs(runs)
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        finished = tuple(Finished.read(job.run) for job in own if job.run not in failures)
        failed = tuple(f"seed {job.recipe.seed}: {failures[job.run]}" for job in own if job.run in failures)
        rows.append(Row(variant.name, finished, failures=failed))
    if not any(row.runs for row in rows):
        raise PluresError(f"all runs of {comparison.name} failed: {next(iter(rows[0].failures), 'there is none')}")
    return make_rows(rows, comparison.paper)
