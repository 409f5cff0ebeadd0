"""The figures of finished runs, in docs/results/runs: what one machine has measured, another need not make again."""

import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torch import nn

from held_out import figures
from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.compare import table
from plures.lab.compare.compare import refuse_others
from plures.lab.compare.jobs import Job
from plures.lab.compare.rows import Finished
from plures.lab.data import DataInfo
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import data_for, described, ensemble_for, network_for
from plures.lab.timing.costs import Costs, costs_of
from plures.lab.timing.machine import machine

RUNS = Path(__file__).parent.parent / "results" / "runs"
Images = Literal["metrics", "held_out"]  # of the test, or neither trained nor tested on


def kept_path(job: Job) -> Path:
    """Say where the figures of a run are kept."""
    return RUNS / job.recipe_name / job.variant.folder / f"seed-{job.recipe.seed}.json"


def kept(job: Job, images: Images) -> Any | None:
    """Read what was kept of a run; None if it was not made, with another recipe, or not measured on these images."""
    path = kept_path(job)
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found if found["recipe"] == _recipe(job) and images in found else None


def keep(job: Job, data_dir: Path | None) -> None:
    """Keep the figures of a finished run; one that was made with other settings is refused."""
    refuse_others(job)
    path, run = kept_path(job), Finished.read(job.run)
    ensemble, _ = _untrained(job, described(run.config, job.run)[1])
    if json.loads(json.dumps(ensemble.options())) != run.config["options"]:  # with other defaults, perhaps
        raise PluresError(f"the run in {job.run} was made with other options than {job.variant.name} has: delete it")
    stages = groupby(RunFolder(job.run).records(), lambda record: (record["phase"], record["member"]))
    document = {
        "recipe": _recipe(job),
        "precision": run.config["environment"]["precision"],
        "machine": described_machine(),
        "metrics": {key: run.metrics[key] for key in (*table.FILED, "member_accuracies") if key in run.metrics},
        "held_out": figures(job.run, data_dir),
        "stages": [[phase, member, len(list(records))] for (phase, member), records in stages],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, document)


def keep_costs(job: Job, data_dir: Path | None) -> None:
    """Measure what a method costs, if that was not done yet: best on an idle machine. It depends on no seed."""
    path = kept_path(job).with_name("costs.json")
    if path.is_file():
        return
    info = data_for(job.recipe, data_dir).info
    files.write_json(path, {"machine": described_machine(), **vars(costs_of(*_untrained(job, info), job.recipe, info))})


def kept_costs(job: Job) -> Costs | None:
    """Read what was measured of a method's costs."""
    path = kept_path(job).with_name("costs.json")
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return Costs(**{one.name: found[one.name] for one in fields(Costs)})


def kept_seeds(job: Job) -> tuple[int, ...]:
    """List the seeds of a method that something was kept of."""
    found = kept_path(job).parent.glob("seed-*.json")
    return tuple(sorted(int(path.stem.removeprefix("seed-")) for path in found))


def described_machine() -> str:
    """Describe this machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine().items())


def machines(documents: Sequence[Any]) -> str:
    """Describe the machines that made some runs, each once."""
    return "; ".join(dict.fromkeys(f"{one['machine']}, precision {one['precision']}" for one in documents))


def _recipe(job: Job) -> Any:
    """Give a recipe as it is kept: a run that it starts from is called as in every folder of runs."""
    values = json.loads(json.dumps(job.recipe.as_json()))
    if values["weights"] is not None:
        values["weights"] = "/".join(Path(values["weights"]).parts[-3:])
    return values


def _untrained(job: Job, info: DataInfo) -> tuple[Ensemble, nn.Module]:
    """Build the ensemble of a run, and the network that it is made of."""
    network = network_for(job.recipe, len(info.classes), info.channels, info.size)
    return ensemble_for(job.recipe, job.variant.method, job.variant.settings, network), network
