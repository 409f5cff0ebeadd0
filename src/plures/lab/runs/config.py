"""The configuration of a run as JSON: enough to detect another configuration and to repeat this one."""

import inspect
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from plures.ensemble import Ensemble
from plures.files import digest
from plures.lab.data import Data
from plures.lab.method_names import NOT_OPTIONS, kebab, method_class, takes
from plures.lab.recipes import RECIPES, Recipe
from plures.version import __version__

FORMAT = 1
PACKAGES = ("torch", "numpy", "safetensors")
# Options that 0.1 did not store, as its runs had them.
ABSENT = {"OrthogonalDropout": {"schedule": "sequential", "background": "zero", "share": None}}
DECIDING = ("format", "method", "recipe", "data", "network", "options")  # the rest is information


@dataclass(frozen=True)
class Made:
    """The arguments of the command line that a run was trained with: they label its row in a table."""

    method: str  # as on the command line
    settings: tuple[str, ...] = ()  # of --set
    recipe: str | None = None  # its name, if it has one
    data: str | None = None  # the path from the run folder to its data, if they have a relative path


def describe(
    ensemble: Ensemble, data: Data, recipe: Recipe, precision: str, made: Made | None = None
) -> dict[str, Any]:
    """Return everything that affects the result of a run as JSON values.

    It contains no machine and no path, so that runs of different machines can be compared. `precision` is the one that
    is used on this device.
    """
    config = {
        "format": FORMAT,
        "method": type(ensemble).__name__,
        "recipe": recipe.as_json(),
        "data": {"fingerprint": data.fingerprint, **asdict(data.info)},
        "network": digest(json.dumps(ensemble.given.shapes).encode()),
        "options": ensemble.options(),
        "made": None if made is None else asdict(made),
        "environment": {**environment(), "precision": precision, "threads": torch.get_num_threads()},
    }
    value: dict[str, Any] = json.loads(json.dumps(config))  # tuples become lists, as they come back from the file
    return value


def environment() -> dict[str, str]:
    """Return the versions that a run depends on."""
    return {"plures": __version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def made_of(config: Mapping[str, Any], *, exact: bool = False) -> Made:
    """Return the arguments that a run was trained with.

    Older versions did not store them. For their runs, the settings are all options that differ from the constructor's
    defaults. An option with the default None depends on the network, and is included only if `exact`.
    """
    made = config.get("made")
    if made is not None:
        return msgspec.convert(made, Made)
    method = kebab(config["method"])
    usual = inspect.signature(method_class(method)).parameters
    special = {
        name: value
        for name, value in config["options"].items()
        if name in usual
        and name not in NOT_OPTIONS
        and value != usual[name].default
        and (exact or usual[name].default is not None)
    }
    return Made(method, tuple(f"{kebab(name)}={_word(value)}" for name, value in special.items()))


def train_command(config: Mapping[str, Any], run: Path) -> str:
    """Return the `plures train` command of a run."""
    made = made_of(config, exact=True)
    return shlex.join(["plures", *train_words(config["recipe"], made.method, made.settings, run, made.recipe)])


def train_words(
    recipe: Mapping[str, Any], method: str, settings: Sequence[str], run: Path, name: str | None
) -> list[str]:
    """Return the arguments of `plures` that train a run: a recipe by name, and an option for every other setting."""
    own = flat_values(recipe)
    if not takes(method_class(method), "members"):
        del own["members"]
    usual = {one: flat_values(known.for_method(method).as_json()) for one, known in RECIPES.items()}
    changed = {one: [key for key in own if own[key] != values.get(key)] for one, values in usual.items()}
    # Equal settings make equal runs: if the recipe has no name, or one of another version, the nearest will do.
    near = [one for one in changed if not one.endswith("-smoke")]
    name = name if name in RECIPES else min(near, key=lambda one: len(changed[one]))
    words = ["train", name, "--method", method]
    keys = changed[name]
    if any(key.startswith("epochs.") for key in keys) and own.get("least_steps") is not None:
        keys.append("least_steps")  # which epochs on the command line switch off
    for key in dict.fromkeys(keys):
        words += _option(key, own[key])
    for setting in settings:
        words += ["--set", setting]
    return [*words, "--run", str(run)]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two configurations that affect the result.

    >>> differences({"recipe": {"seed": 0}}, {"recipe": {"seed": 1}, "environment": {"torch": "2.6"}})
    ['recipe.seed was 0 and is 1']
    """
    return _changes(_deciding(before), _deciding(now))


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: config[key] for key in DECIDING if key in config}
    if "options" in found:
        found["options"] = ABSENT.get(found.get("method", ""), {}) | found["options"]
    if "members" not in found.get("options", ["members"]):  # the method has none, whatever the recipe says
        found["recipe"] = {name: value for name, value in found["recipe"].items() if name != "members"}
    return found


def new_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the versions in which two configurations differ; threads, and the commit that 0.1 stored, do not count.

    >>> new_environment({"environment": {"torch": "2.6", "threads": 1}}, {"environment": {"torch": "2.7"}})
    ['torch was 2.6 and is 2.7']
    """
    return _changes(*({**one.get("environment", {}), "threads": None, "git": None} for one in (before, now)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = flat_values(before), flat_values(now)
    return [
        f"{name} was {old.get(name, 'absent')!s:.60} and is {new.get(name, 'absent')!s:.60}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values in one dictionary, with dots in their names.

    >>> flat_values({"epochs": {"train": 30}, "seed": 0})
    {'epochs.train': 30, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat_values(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _option(key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-")
    if isinstance(value, bool) and key != "together":  # which may also be None, so it takes a word
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]


def _word(value: Any) -> str:
    """Return a value as the command line reads it: sequences and mappings as words, one after the other."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {one}" for key, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
