"""Open a run folder: its data, network and ensemble.

A network or method given as module:name is imported, which runs it. The folder may come from anybody, so this is done
on request only.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.files import is_file
from plures.lab.data import Data, DataInfo, open_data
from plures.lab.data.sources import expanded, local_path
from plures.lab.method_names import is_code, method_class, method_options, takes
from plures.lab.models import build
from plures.lab.recipes import Recipe
from plures.lab.runs.config import Made, made_of, train_command
from plures.lab.runs.folder import RunFolder
from plures.methods.deterministic import Deterministic
from plures.storage import check_size, load


def data_for(recipe: Recipe, data_dir: Path | None) -> Data:
    """Open the data of a recipe."""
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
    """Build the network of a recipe: the same weights for the same seed."""
    options: dict[str, Any] = {"size": size, "stem": recipe.stem}
    if recipe.width is not None:
        options["width"] = recipe.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return build(recipe.model, classes, channels, **options)


def with_weights(network: nn.Module, source: str) -> nn.Module:
    """Return a network with trained weights: of a run of one network, or of a safetensors file.

    network = with_weights(network, "runs/digits-deterministic-seed0")
    """
    path = expanded(source)
    if not is_file(path) and path.is_dir():
        run = RunFolder(path)
        config = run.config()
        if not run.finished:
            raise unfinished(config, path)
        trained = load(run.ensemble, network) if config["method"] == Deterministic.__name__ else None
        if not isinstance(trained, Deterministic):
            raise PluresError(f"{source} has several networks: give a run of the method deterministic as weights")
        return trained.checkout(0)
    try:
        if not is_file(path):  # a pipe would keep us waiting
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        why = f"the weights {source} cannot be read ({error})"
        raise PluresError(f"{why}: give a run of one network, or a safetensors file") from error
    here, there = ({name: list(one.shape) for name, one in part.items()} for part in (network.state_dict(), stored))
    for name in here | there:
        if here.get(name) != there.get(name):
            raise PluresError(
                f"the weights in {source} are of another network: {name!r} has the shape {there.get(name)} there "
                f"and {here.get(name)} here (None: it is missing); give its --model and --width"
            )
    network.load_state_dict(stored)
    return network


def ensemble_for(
    recipe: Recipe, method: str, settings: Sequence[str], network: nn.Module, begun: RunFolder | None = None
) -> Ensemble:
    """Build the ensemble of a recipe by a method of the command line.

        ensemble = ensemble_for(recipe, "orthogonal-dropout", ["granularity=kernel"], network)

    A run that was begun with the same words keeps its options: another version may have other defaults. Members start
    from the recipe's `weights`, if it has them.
    """
    chosen = method_class(method)
    given = {name: value for name in ("members", "seed") if takes(chosen, name) for value in [getattr(recipe, name)]}
    if recipe.weights is not None and takes(chosen, "init"):
        given["init"] = "given"
    given |= method_options(chosen, settings)
    if begun is not None and begun.begun:
        config = begun.config()
        made = config.get("made")
        if config["method"] == chosen.__name__ and (made is None or made["settings"] == list(settings)):
            given = config["options"] | given
    return chosen(network, **given)


def device_for() -> torch.device:
    """Return the device to compute on: the accelerator if there is one."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@dataclass(frozen=True)
class Described:
    """A finished run without its weights."""

    path: Path
    method: str  # as on the command line
    recipe: Recipe
    info: DataInfo
    fingerprint: str  # of the data that the run was trained on
    place: Path | None  # of the data, if they had a relative path

    def data(self, data_dir: Path | None) -> Data:
        """Open the data that the run was trained on; raise an error if these have other images or labels."""
        found = self.place is not None and local_path(str(self.place), None) is not None
        data = data_for(replace(self.recipe, data=str(self.place)) if found else self.recipe, data_dir)
        if data.fingerprint != self.fingerprint:
            raise PluresError(
                f"the data {self.recipe.data!r} found here are not those that {self.path} was trained on: they differ "
                "in images, labels or preprocessing; give the right ones with --data-dir"
            )
        return data

    def network(self) -> nn.Module:
        """Build the plain, untrained network; raise an error if the file does not have its weights."""
        shape = (len(self.info.classes), self.info.channels, self.info.size)
        if not is_code(self.recipe.model):
            with torch.device("meta"):
                sketch = network_for(self.recipe, *shape)
            check_size(RunFolder(self.path).ensemble, sketch)
        return network_for(self.recipe, *shape)


@dataclass(frozen=True)
class Run(Described):
    """A finished run, ready to predict.

    run = open_run("runs/digits-orthogonal-dropout-seed0")
    run.ensemble.predict(run.info.normalise(pixels))
    """

    ensemble: Ensemble


def open_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    """Load a finished run, without its data.

        run = open_run("runs/digits-orthogonal-dropout-seed0")

    A folder is data, with one exception: its network or method may be named as module:name, which is code. It is
    imported only with `trust_code`.
    """
    made = read_run(folder, trust_code=trust_code)
    method = method_class(made.method) if is_code(made.method) else None
    ensemble = load(RunFolder(folder).ensemble, made.network(), method=method).to(device_for())
    return Run(**vars(made), ensemble=ensemble)


def read_run(folder: str | Path, *, trust_code: bool = False) -> Described:
    """Read the configuration of a finished run; raise an error if it names code that is not trusted."""
    files = RunFolder(folder)
    config = files.config()
    if not files.finished:
        raise unfinished(config, files.path)
    recipe, info, made = described(config, files.path)
    if not trust_code:
        check_trust(config, files.path)
    place = None if made.data is None else (files.path / made.data).absolute()
    return Described(files.path, made.method, recipe, info, config["data"]["fingerprint"], place)


def unfinished(config: Mapping[str, Any], folder: Path, where: str = "") -> PluresError:
    """Return the error for a run that is not finished, with the command that finishes it."""
    return PluresError(f"the run in {folder} is not finished{where}; to finish it: {train_command(config, folder)}")


def described(config: Mapping[str, Any], folder: Path) -> tuple[Recipe, DataInfo, Made]:
    """Return recipe, data and words of a run, or raise an error if its configuration is incomplete."""
    try:
        recipe = Recipe.from_json(config["recipe"])
        prepared = {name: value for name, value in config["data"].items() if name != "fingerprint"}
        return recipe, DataInfo(**prepared), made_of(config)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PluresError(f"{folder}/config.json is incomplete: {type(error).__name__}: {error}") from error


def check_trust(config: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if opening a run would import code from outside plures."""
    made = config.get("made") or {}
    names = (str(config["recipe"].get("model")), str(made.get("method", "")))
    if code := [name for name in names if is_code(name)]:
        raise PluresError(
            f"opening {folder} runs the code {' and '.join(code)}: check that code, and use --trust-code "
            "(in Python trust_code=True) if you trust it"
        )
