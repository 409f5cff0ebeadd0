"""The figures of finished runs, in docs/results/runs: another machine does not make these runs again.

Figures count for a run of today if recipe and options are the same.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab import costs
from plures.lab.compare import Job, table
from plures.lab.compare.compare import refuse_others
from plures.lab.compare.rows import Finished
from plures.lab.costs import Costs, machine
from plures.lab.data import DataInfo, DataSplit
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import method_class, method_options
from plures.lab.recipes import Recipe, get_recipe
from plures.lab.runs.config import ABSENT, differences
from plures.lab.runs.folder import GONE, RunFolder
from plures.lab.runs.open import Run, data_for, described, ensemble_for, network_for, open_run

RESULTS = Path(__file__).parent.parent / "results"
Images = Literal["metrics", "held_out"]  # of the test, or neither trained nor tested on
Kept = Any  # the JSON document of a run
MOST = 10_000  # held-out images: more take long and change little


def recipe_of(name: str) -> Recipe:
    """Return a recipe in full precision, so that all rows of a table are computed alike, with or without bf16."""
    return replace(get_recipe(name), precision="no")


def path_of(job: Job) -> Path:
    """Return where the figures of a run are kept."""
    return RESULTS / "runs" / job.recipe_name / job.variant.folder / f"seed-{job.recipe.seed}.json"


def read(job: Job, images: Images) -> Kept | None:
    """Return what was kept of a run; None if there is nothing of this recipe, these options and these images."""
    path = path_of(job)
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found if images in found and _is_of_today(found, job) else None


def keep(job: Job, data_dir: Path | None) -> None:
    """Keep the figures of a finished run; one that was made with other settings is refused.

    What was kept before stays as it is: figures in a table do not change because a run was made again.
    """
    refuse_others(job)
    path, run = path_of(job), Finished.read(job.run)
    ensemble, _ = _untrained(job, described(run.config, job.run)[1])
    if json.loads(json.dumps(ensemble.options())) != run.config["options"]:  # with other defaults, perhaps
        raise PluresError(f"the run in {job.run} was made with other options than {job.variant.name} has: delete it")
    stages = groupby(RunFolder(job.run).records(), lambda record: (record["phase"], record["member"]))
    document = {
        "recipe": _recipe(job),
        "options": _small(run.config["options"]),
        "data": run.config["data"]["fingerprint"],
        "precision": run.config["environment"]["precision"],
        "machine": _described(machine() | _versions(run.config["environment"])),
        "metrics": {key: run.metrics[key] for key in (*table.FILED, "member_accuracies") if key in run.metrics},
        "held_out": held_out_figures(job.run, data_dir),
        "stages": [[phase, member, len(list(records))] for (phase, member), records in stages],
    }
    before = json.loads(path.read_text()) if path.is_file() else {}
    if before and _is_of_today(before, job):
        document |= before
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, document)


def held_out_figures(folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Measure a run on images that it was neither trained nor tested on, and its file."""
    run = open_run(folder)
    members, targets = predictions(run.ensemble, held_out_images(run, data_dir))
    return scores(members, targets) | {"bytes": (folder / "ensemble.safetensors").stat().st_size}


def held_out_images(run: Run, data_dir: Path | None) -> DataSplit:
    """Return the training images that a run did not train on: those for validation, and those beyond its limit."""
    used = run.data(data_dir)
    every = data_for(replace(run.recipe, limit=None, validation=0), data_dir).train
    rest = np.flatnonzero(~np.isin(every.rows, used.train.rows))[:MOST]
    if not len(rest):  # the data bring validation images of their own
        return used.validation
    return DataSplit("held-out", used.info, every.pixels, every.rows[rest], every.labels[rest])


def keep_costs(job: Job) -> None:
    """Keep the costs of a method that a finished run has measured, if that was not done yet. They depend on no seed."""
    found = costs.kept_costs(job.run) if kept_costs(job) is None else None
    if found is not None:
        about = {"recipe": _seedless(_recipe(job)), "options": _options(job), "machine": _described(machine())}
        files.write_json(_costs_path(job), about | vars(found))


def kept_costs(job: Job) -> Costs | None:
    """Return the costs of a method; None if they were not measured with this recipe and these options."""
    found = costs_document(job)
    return None if found is None else Costs(**{one.name: found[one.name] for one in fields(Costs)})


def costs_document(job: Job) -> Kept | None:
    """Return the costs of a method with the machine that measured them; None as in `kept_costs`."""
    if not _costs_path(job).is_file():
        return None
    found = json.loads(_costs_path(job).read_text())
    changed = differences({"recipe": _known(found["recipe"])}, {"recipe": _seedless(_recipe(job))})
    return None if changed or not _same_options(found, job) else found


def seeds_of(job: Job) -> tuple[int, ...]:
    """Return the seeds of a method of which figures were kept."""
    found = path_of(job).parent.glob("seed-*.json")
    return tuple(sorted(int(path.stem.removeprefix("seed-")) for path in found))


def machines(documents: Iterable[Kept]) -> str:
    """Return the machines that made some runs, each once."""
    return "; ".join(dict.fromkeys(f"{one['machine']}, precision {one['precision']}" for one in documents))


def refuse_other_data(name: str, documents: Iterable[Kept]) -> None:
    """Refuse to put runs of one seed into one table that were made of different images."""
    seen: dict[int, str] = {}
    for one in documents:
        if "data" in one and seen.setdefault(one["recipe"]["seed"], one["data"]) != one["data"]:
            raise PluresError(f"the runs of {name} with seed {one['recipe']['seed']} were made of different images")


def remove(name: str) -> None:
    """Remove a table without runs."""
    for path in RESULTS.glob(f"{name}.*"):
        path.unlink()


def _is_of_today(found: Kept, job: Job) -> bool:
    """Return whether figures are of this recipe and these options: a new setting that is None changes nothing."""
    if differences({"recipe": _known(found["recipe"])}, {"recipe": _recipe(job)}):
        return False
    return _same_options(found, job)


def _known(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the settings that are gone, if they had the value that changes nothing."""
    return {name: value for name, value in recipe.items() if (name, value) not in GONE}


def _same_options(found: Kept, job: Job) -> bool:
    """Return whether a kept document has the options of a job; a default of None depends on other options."""
    stored = ABSENT.get(method_class(job.variant.method).__name__, {}) | found["options"]
    return all(stored[name] == value for name, value in _options(job).items() if name in stored)


def _options(job: Job) -> dict[str, Any]:
    """Return the options of a method that are known without its network."""
    method = method_class(job.variant.method)
    parameters = inspect.signature(method).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default not in (None, one.empty)}
    return _small(json.loads(json.dumps(defaults | method_options(method, job.variant.settings), default=str)))


def _small(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that follow from the recipe and the network."""
    return {name: value for name, value in options.items() if name not in ("members", "seed", "init", "roles", "loss")}


def _recipe(job: Job) -> Any:
    """Return a recipe as it is kept."""
    return json.loads(json.dumps(job.recipe.as_json()))


def _seedless(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in ("seed", "weights")}


def _costs_path(job: Job) -> Path:
    return path_of(job).with_name("costs.json")


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: environment[name] for name in ("plures", "python", "torch", "threads") if name in environment}


def _described(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items())


def _untrained(job: Job, info: DataInfo) -> tuple[Ensemble, nn.Module]:
    """Return the ensemble of a run, untrained, and its network."""
    network = network_for(job.recipe, len(info.classes), info.channels, info.size)
    return ensemble_for(job.recipe, job.variant.method, job.variant.settings, network), network
