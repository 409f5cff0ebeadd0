"""From a recipe or a run folder to data, network and ensemble."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import Data, DataInfo, open_data
from plures.lab.methods import kebab, method_class, method_options, takes
from plures.lab.models import build
from plures.lab.recipes import Recipe
from plures.lab.runs.folder import RunFolder
from plures.storage import load


def data_for(recipe: Recipe, data_dir: Path | None) -> Data:
    """Open the data of a recipe.

    data = data_for(get_recipe("cifar10-cpu"), Path("data"))
    """
    return open_data(
        recipe.data,
        data_dir=data_dir,
        seed=recipe.seed,
        validation=recipe.validation,
        size=recipe.size,
        cache_size=recipe.cache_size,
        limit=recipe.limit,
    )


def network_for(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
    """Make the network of a recipe: the same weights for the same seed.

    network = network_for(recipe, len(data.classes), data.channels, data.size)
    """
    options: dict[str, Any] = {"size": size, "stem": recipe.stem}
    if recipe.width is not None:
        options["width"] = recipe.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return build(recipe.model, classes, channels, **options)


def ensemble_for(recipe: Recipe, method: str, settings: Sequence[str], network: nn.Module) -> Ensemble:
    """Split a network by a method of the command line.

    ensemble = ensemble_for(recipe, "orthogonal-dropout", ["granularity=kernel"], network)
    """
    chosen = method_class(method)
    given = {name: value for name in ("members", "seed") if takes(chosen, name) for value in [getattr(recipe, name)]}
    return chosen(network, **given, **method_options(chosen, settings))


def device_for() -> torch.device:
    """Name the device to compute on: the accelerator if there is one.

    ensemble.to(device_for())
    """
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """A finished run, ready to predict.

    run = open_run("runs/digits-orthogonal-dropout-seed0")
    run.ensemble.predict(run.info.normalise(pixels))
    """

    path: Path
    method: str  # as on the command line
    recipe: Recipe
    info: DataInfo
    fingerprint: str  # of the data that the run was trained on
    ensemble: Ensemble

    def data(self, data_dir: Path | None) -> Data:
        """Open the data that the run was trained on, and refuse others of the same name."""
        data = data_for(self.recipe, data_dir)
        if data.fingerprint != self.fingerprint:
            raise PluresError(
                f"the data {self.recipe.data!r} found here are not those that {self.path} was trained on: other "
                "images, labels or preparation; name the right ones with --data-dir"
            )
        return data


def open_run(folder: str | Path) -> Run:
    """Load what a run folder holds, without its data.

    run = open_run("runs/digits-orthogonal-dropout-seed0")
    """
    files = RunFolder(folder)
    config = files.config()
    if not files.finished:
        raise PluresError(f"the run in {folder} is not finished: start its `plures train` command again to go on")
    try:
        recipe = Recipe.from_json(config["recipe"])
        prepared = dict(config["data"])
        fingerprint = prepared.pop("fingerprint")
        info = DataInfo(**prepared)
        method = kebab(config["method"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PluresError(f"{folder}/config.json is not complete: {type(error).__name__}: {error}") from error
    network = network_for(recipe, len(info.classes), info.channels, info.size)
    ensemble = load(files.ensemble, network).to(device_for())
    return Run(files.path, method, recipe, info, fingerprint, ensemble)
