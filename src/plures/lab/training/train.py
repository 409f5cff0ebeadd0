"""Train one ensemble into a run folder and measure it: what `plures train` does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from plures.errors import PluresError
from plures.lab.evaluation.evaluate import evaluate
from plures.lab.methods import method_class, method_options
from plures.lab.recipes import Recipe
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import data_for, device_for, ensemble_for, network_for
from plures.lab.training.fit import fit


def train(
    recipe: Recipe,
    method: str,
    run: Path,
    *,
    settings: Sequence[str] = (),
    data_dir: Path | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, or go on with, the run in a folder, and return its metrics.

        train(get_recipe("digits"), "deep-ensemble", Path("runs/digits"))["nll"]

    A finished run is measured once: its metrics stand in metrics.json. Of several processes, only the first measures;
    the others return nothing.
    """
    method_options(method_class(method), settings)  # complain before data are decoded
    data = data_for(recipe, data_dir)
    network = network_for(recipe, len(data.classes), data.channels, data.size)
    ensemble = ensemble_for(recipe, method, settings, network)
    fit(ensemble, data, recipe, run=run, network=network, trackers=trackers)
    if not PartialState().is_main_process:
        return {}
    folder = RunFolder(run)
    path = run / "metrics.json"
    if path.is_file():
        return read_metrics(path)
    found = evaluate(ensemble.to(device_for()), data)
    found["bytes"] = folder.ensemble.stat().st_size
    found["seconds"] = sum(record["seconds"] for record in folder.records())
    folder.write(path, json.dumps(found, indent=2, allow_nan=False).encode() + b"\n")
    return found


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the metrics of a finished run.

    read_metrics(Path("runs/digits/metrics.json"))["accuracy"]
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PluresError(f"{path} cannot be read ({error}): remove it, and it is made again") from error
    return found
