"""Train one ensemble into a run folder and measure it: what `plures train` does."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import Data
from plures.lab.evaluation.evaluate import calibrate, evaluate
from plures.lab.methods import method_class, method_options
from plures.lab.recipes import Recipe
from plures.lab.runs.config import Made
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import data_for, device_for, ensemble_for, network_for, sign, with_weights
from plures.lab.training.fit import fit
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
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train or resume the run in a folder, and return its metrics.

        train(get_recipe("digits"), "deep-ensemble", Path("runs/digits"))["nll"]

    A finished run is measured once: its metrics stand in metrics.json. Of several processes, only the first measures;
    the others return nothing. The run folder keeps the recipe's name, which decides nothing.
    """
    method_options(method_class(method), settings)  # complain before data is decoded
    data = data_for(recipe, data_dir)
    network = network_for(recipe, len(data.classes), data.channels, data.size)
    if recipe.weights is not None:
        network = with_weights(network, recipe.weights)
    ensemble = ensemble_for(recipe, method, settings, network, begun=RunFolder(run))
    made = Made(method, tuple(settings), recipe_name, sign(recipe.model, method))
    fit(ensemble, data, recipe, run=run, trackers=trackers, made=made)
    return _measured(RunFolder(run), ensemble, data) if PartialState().is_main_process else {}


def _measured(folder: RunFolder, ensemble: Ensemble, data: Data) -> dict[str, Any]:
    """Read the metrics of a finished run, or measure them and let its file know what the validation images taught."""
    if folder.measured.is_file():
        return folder.metrics()
    found = evaluate(ensemble.to(device_for()), data)
    found["seconds"] = sum(record["seconds"] for record in folder.records())
    found["bytes"] = folder.ensemble.stat().st_size
    try:
        with folder.locked(wait=True):  # two processes may have come to the end of the same run
            if calibrate(ensemble, data):  # before the metrics: once they are there, nothing is measured again
                save(ensemble, folder.ensemble)
                found["bytes"] = folder.ensemble.stat().st_size
            folder.write(folder.measured, json.dumps(found, indent=2, allow_nan=False).encode() + b"\n")
    except PluresError as error:  # what was measured is not lost
        log.warning("%s", error)
    return found
