"""Make a whole run: build the ensemble of a recipe, train it, and measure it."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from plures import files
from plures.errors import PluresError
from plures.lab.costs import costs_of, epochs_of
from plures.lab.data import Data
from plures.lab.data.sources import expanded, local_path
from plures.lab.evaluation.evaluate import evaluate, fastest
from plures.lab.method_names import method_class, method_options
from plures.lab.recipes import Epochs, Recipe
from plures.lab.runs.config import Made
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import data_for, device_for, ensemble_for, network_for, with_weights
from plures.lab.training.fit import fit, own_random_numbers
from plures.lab.training.loop import RecipeLoop
from plures.methods.deterministic import Deterministic
from plures.prediction import Predictor
from plures.storage import save

log = logging.getLogger("plures")


def train(
    recipe: Recipe,
    method: str,
    run: Path,
    *,
    settings: Sequence[str] = (),
    recipe_name: str | None = None,
    data_dir: Path | None = None,
    given: Sequence[str] = (),
) -> dict[str, Any]:
    """Train or resume the run in a folder, and return its metrics.

        train(get_recipe("digits"), "deep-ensemble", Path("runs/digits"))["nll"]

    A run is measured once, after its last stage: one engine predicts the validation images, which calibrate the
    ensemble, and the test images. `given`: the settings that were asked for, to name those that change nothing.
    """
    method_options(method_class(method), settings)  # complain before data is decoded
    data = data_for(recipe, data_dir)
    network = network_for(recipe, len(data.info.classes), data.info.channels, data.info.size)
    if recipe.weights is not None:
        network = with_weights(network, recipe.weights)
    folder = RunFolder(run)
    ensemble = ensemble_for(recipe, method, settings, network, begun=folder)
    known = dict.fromkeys(f"epochs.{step.phase}" for step in ensemble.plan())
    if idle := [name for name in given if name.startswith("epochs.") and name not in known]:
        log.warning("--%s changes nothing: the epochs that count here are --%s", ", --".join(idle), ", --".join(known))
    made = Made(method, tuple(settings), recipe_name, _from_folder(recipe.data, run, data_dir))
    engines: list[Predictor] = []
    found: dict[str, Any] = {}

    def measure() -> None:
        engines.append(fastest(ensemble.to(device_for())))
        found.update(evaluate(ensemble, data, engines[0]))

    fit(ensemble, data, recipe, run=run, made=made, finish=measure)
    if folder.measured.is_file():
        return folder.metrics()
    if not engines:  # trained before, and not measured
        before = ensemble.calibration
        measure()
        if ensemble.calibration is not before:
            with _warning_instead(), folder.locked(wait=True):
                save(ensemble, folder.ensemble, base=True)
    records = folder.records()
    found |= {"seconds": sum(record["seconds"] for record in records), "bytes": folder.ensemble.stat().st_size}
    costs = None
    with suppress(PluresError, OSError):  # one network may not train where an ensemble does; a disk may be full
        plain = 1.0 if isinstance(ensemble, Deterministic) else _plain_cost(network, data, recipe)
        epochs = float(len(records)) if isinstance(ensemble, Deterministic) else epochs_of(records, plain)
        costs = costs_of(ensemble, engines[0], network, data.info, epochs)
    with _warning_instead(), folder.locked(wait=True):  # two processes may have come to the end of the same run
        if costs is not None:
            files.write_json(folder.path / "costs.json", asdict(costs))
        files.write_json(folder.measured, found)  # last: then nothing is measured again
    return found


@contextmanager
def _warning_instead() -> Iterator[None]:
    """Log an error as a warning: what was measured is shown even if it cannot be stored."""
    try:
        yield
    except PluresError as error:
        log.warning("%s", error)


def _plain_cost(network: nn.Module, data: Data, recipe: Recipe) -> float:
    """Return what an epoch of the plain network costs: the cheapest of three."""
    single, longer = Deterministic(network), replace(recipe, epochs=Epochs(train=3))
    with own_random_numbers(device_for()):
        loop = RecipeLoop(single.to(device_for()), single.plan()[0], data, longer, device_for())
        return min(float(loop.epoch(number)["cost"]) for number in (1, 2, 3))


def _from_folder(name: str, run: Path, data_dir: Path | None) -> str | None:
    """Return the path from the run folder to data with a relative path: the run may be opened from elsewhere."""
    folder = data_dir or os.environ.get("PLURES_DATA")
    path = local_path(name, expanded(folder) if folder else None)
    return None if path is None or path.is_absolute() else os.path.relpath(path, run)
