"""Open a run folder: its data, network and ensemble, and whether code that it names is trusted.

A network or method given as module:name is imported, which runs it. A run that was trained here with such code is
signed with a key of the user's own. Without a signature by the same user, the folder may come from anybody, and its
code is run only on request.
"""

import errno
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.files import is_file
from plures.lab.data import Data, DataInfo, open_data
from plures.lab.data.sources import expanded
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
    """Make the network of a recipe: the same weights for the same seed."""
    options: dict[str, Any] = {"size": size, "stem": recipe.stem}
    if recipe.width is not None:
        options["width"] = recipe.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return build(recipe.model, classes, channels, **options)


def with_weights(network: nn.Module, source: str) -> nn.Module:
    """Fill a network with weights that were trained before: a run of one network, or a file of safetensors.

    network = with_weights(network, "runs/digits-deterministic-seed0")
    """
    path = expanded(source)
    if not is_file(path) and path.is_dir():
        trained = open_run(path).ensemble
        if not isinstance(trained, Deterministic):
            raise PluresError(f"{source} has several networks: give a run of the method deterministic as weights")
        stored = trained.checkout(0).state_dict()
    else:
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
                f"the weights in {source} belong to another network: {name!r} has the shape {there.get(name)} there "
                f"and {here.get(name)} here (None: it is missing); give its --model and --width"
            )
    network.load_state_dict(stored)
    return network


def ensemble_for(
    recipe: Recipe, method: str, settings: Sequence[str], network: nn.Module, begun: RunFolder | None = None
) -> Ensemble:
    """Split a network by a method of the command line.

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
    """Name the device to compute on: the accelerator if there is one."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@dataclass(frozen=True)
class Described:
    """What a finished run was made from, without its weights."""

    path: Path
    method: str  # as on the command line
    recipe: Recipe
    info: DataInfo
    fingerprint: str  # of the data that the run was trained on

    def data(self, data_dir: Path | None) -> Data:
        """Open the data that the run was trained on, and refuse others of the same name."""
        data = data_for(self.recipe, data_dir)
        if data.fingerprint != self.fingerprint:
            raise PluresError(
                f"the data {self.recipe.data!r} found here are not those that {self.path} was trained on: they differ "
                "in images, labels or preprocessing; give the right ones with --data-dir"
            )
        return data

    def network(self) -> nn.Module:
        """Make the plain network, as it was before it was trained; one that the file has no weights for is refused."""
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
    """Load what a run folder holds, without its data.

        run = open_run("runs/digits-orthogonal-dropout-seed0")

    A folder is data, with one exception: its network or method may be named as module:name, which is code. It is run
    where you trained the run yourself, or with `trust_code`.
    """
    made = read_run(folder, trust_code=trust_code)
    method = method_class(made.method) if is_code(made.method) else None
    ensemble = load(RunFolder(folder).ensemble, made.network(), method=method).to(device_for())
    return Run(**vars(made), ensemble=ensemble)


def read_run(folder: str | Path, *, trust_code: bool = False) -> Described:
    """Read what a finished run was made from, and see to it that its code may be run."""
    files = RunFolder(folder)
    config = files.config()
    if not files.finished:
        raise PluresError(f"the run in {folder} is not finished; to finish it: {train_command(config, files.path)}")
    recipe, info, made = described(config, files.path)
    if not trust_code:
        check(config, files.path)
    return Described(files.path, made.method, recipe, info, config["data"]["fingerprint"])


def described(config: Mapping[str, Any], folder: Path) -> tuple[Recipe, DataInfo, Made]:
    """Give recipe, data and words of a run, or say what of its configuration makes no sense."""
    try:
        recipe = Recipe.from_json(config["recipe"])
        prepared = {name: value for name, value in config["data"].items() if name != "fingerprint"}
        return recipe, DataInfo(**prepared), made_of(config)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PluresError(f"{folder}/config.json is incomplete: {type(error).__name__}: {error}") from error


def sign(model: str, method: str) -> str | None:
    """Sign the code of a run as the user's own; None where there is no code, or no place for a key."""
    key = _key(make=True) if is_code(model) or is_code(method) else None
    return None if key is None else _signature(key, model, method)


def check(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a run whose network or method is code that this user has not trained with."""
    made = config.get("made") or {}
    model, method = str(config["recipe"].get("model")), str(made.get("method", ""))
    code = [name for name in (model, method) if is_code(name)]
    key = _key(make=False) if code else None
    own = key is not None and hmac.compare_digest(_signature(key, model, method), str(made.get("signature")))
    if code and not own:
        raise PluresError(
            f"{folder} was not trained by you, and opening it runs the code {' and '.join(code)}: check that code, "
            "and use --trust-code (in Python trust_code=True) if you trust it"
        )


def _signature(key: bytes, model: str, method: str) -> str:
    return hmac.digest(key, json.dumps([model, method]).encode(), "sha256").hex()[:32]


def _key(*, make: bool) -> bytes | None:
    """Read the user's key; it is made when it is needed for the first time."""
    path = Path(platformdirs.user_data_dir("plures")) / "key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(32))
        return path.read_bytes() or None
    except OSError:
        return None
