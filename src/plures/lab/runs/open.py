"""Open a run folder: its data, network and ensemble.

A network or method given as module:name is imported, which runs it. The folder may come from anybody, so this is done
on request only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.exported import export
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
    settings = {name: getattr(recipe, name) for name in ("seed", "validation", "size", "cache_size", "limit")}
    return open_data(recipe.data, data_dir=data_dir, **settings)


def network_for(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
    """Build the network of a recipe: the same weights for the same seed."""
    options: dict[str, Any] = {"size": size, "stem": recipe.stem}
    if recipe.width is not None:
        options["width"] = recipe.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return build(recipe.model, classes, channels, **options)


def with_weights(network: nn.Module, source: str) -> nn.Module:
    """Return the network with the trained weights of a run of one network."""
    run = RunFolder(expanded(source))
    config = run.config()
    if not run.finished:
        raise unfinished(config, run.path)
    trained = load(run.ensemble, network)
    if not isinstance(trained, Deterministic):
        raise PluresError(f"{source} has several networks: give a run of the method deterministic as weights")
    return trained.checkout(0)


def ensemble_for(
    recipe: Recipe, method: str, settings: Sequence[str], network: nn.Module, begun: RunFolder | None = None
) -> Ensemble:
    """Build the ensemble of a recipe by a method of the command line.

    A run that was begun with the same words keeps its options: another version may have other defaults. Members start
    from the recipe's `weights`, if it has them.
    """
    chosen = method_class(method)
    given = {name: value for name in ("members", "seed") if takes(chosen, name) for value in [getattr(recipe, name)]}
    if recipe.weights is not None and takes(chosen, "init"):
        given["init"] = "given"
    if recipe.together is not None and takes(chosen, "schedule"):
        given["schedule"] = "together" if recipe.together else "sequential"
    given |= method_options(chosen, settings)
    if begun is not None and begun.begun:
        config = begun.config()
        made = config.get("made")
        if config["method"] == chosen.__name__ and (made is None or made["settings"] == list(settings)):
            given = config["options"] | given
    return chosen(network, **given)


def device_for() -> torch.device:
    """Return the device to compute on: the accelerator if there is one, and not only a torch that was built for it."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """A finished run, ready to predict."""

    path: Path
    method: str  # as on the command line
    recipe: Recipe
    info: DataInfo
    fingerprint: str  # of the data that the run was trained on
    ensemble: Ensemble
    place: Path | None = None  # of the data, if they had a relative path

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

    def export(self, path: Path) -> Path:
        """Write the run as one file that takes uint8 pixels."""
        info = self.info
        preprocessing = {
            "input": "uint8 pixels [batch, height, width, channels], normalised inside the file",
            **{name: getattr(info, name) for name in ("size", "channels", "mean", "std")},
            "resize": f"a square of a multiple of {info.cache_size} averaged down to it, otherwise the shorter side to "
            f"{info.cache_size} (bicubic, antialiased); then the middle {info.size} x {info.size} kept",
        }
        provenance = {
            "method": self.method,
            "recipe": self.recipe.as_json(),
            "data": info.name,
            "fingerprint": self.fingerprint,
        }
        return export(
            self.ensemble.cpu(),
            path,
            torch.zeros(2, info.size, info.size, info.channels, dtype=torch.uint8),
            classes=list(info.classes),
            preprocess=_Normalise(info),
            metadata={"preprocessing": preprocessing, "provenance": provenance},
        )


class _Normalise(nn.Module):
    def __init__(self, info: DataInfo) -> None:
        super().__init__()
        self.info = info

    def forward(self, pixels: Tensor) -> Tensor:
        return self.info.normalise(pixels)


def open_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    """Load a finished run, without its data.

        run = open_run("runs/digits-orthogonal-dropout-seed0")

    A folder is data, with one exception: its network or method may be named as module:name, which is code. It is
    imported only with `trust_code`.
    """
    files = RunFolder(folder)
    config = files.config()
    if not files.finished:
        raise unfinished(config, files.path)
    recipe, info, made = described(config, files.path)
    code = [name for name in (recipe.model, made.method) if is_code(name)]
    if code and not trust_code:
        raise PluresError(
            f"opening {folder} runs the code {' and '.join(code)}: check that code, and use --trust-code "
            "(in Python trust_code=True) if you trust it"
        )
    shape = (len(info.classes), info.channels, info.size)
    if not is_code(recipe.model):
        with torch.device("meta"):
            sketch = network_for(recipe, *shape)
        check_size(files.ensemble, sketch)  # before memory is taken
    method = method_class(made.method) if is_code(made.method) else None
    ensemble = load(files.ensemble, network_for(recipe, *shape), method=method).to(device_for())
    place = None if made.data is None else (files.path / made.data).resolve()
    return Run(files.path, made.method, recipe, info, config["data"]["fingerprint"], ensemble, place)


def unfinished(config: Mapping[str, Any], folder: Path) -> PluresError:
    """Return the error for a run that is not finished, with the command that finishes it."""
    return PluresError(f"the run in {folder} is not finished; to finish it: {train_command(config, folder)}")


def described(config: Mapping[str, Any], folder: Path) -> tuple[Recipe, DataInfo, Made]:
    """Return recipe, data and words of a run, or raise an error if its configuration is incomplete."""
    try:
        recipe = Recipe.from_json(config["recipe"])
        prepared = {name: value for name, value in config["data"].items() if name != "fingerprint"}
        return recipe, DataInfo(**prepared), made_of(config)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PluresError(f"{folder}/config.json is incomplete: {type(error).__name__}: {error}") from error
