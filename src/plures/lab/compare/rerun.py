"""From the configuration of a run back to the command that makes it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from plures.lab.methods import NOT_OPTIONS, kebab, method_class, takes
from plures.lab.recipes import RECIPES, Recipe
from plures.lab.runs.open import ensemble_for, network_for


def train_command(config: Mapping[str, Any], run: Path) -> str:
    """Give the `plures train` command of a run: the nearest recipe, and an option for all that differs.

        train_command(RunFolder("runs/mimo").config(), Path("runs/mimo"))
        # 'plures train digits --method mimo --learning-rate 0.05 --run runs/mimo'

    A run folder does not know its recipe's name, and need not: equal numbers make equal runs. Roles given from Python
    cannot be said on the command line and are left out.
    """
    method = kebab(config["method"])
    usual = {name: _flat(recipe.for_method(config["method"]).as_json()) for name, recipe in RECIPES.items()}
    own = _flat(config["recipe"])
    differing = {name: [key for key in own if own[key] != values.get(key)] for name, values in usual.items()}
    nearest = min(differing, key=lambda name: len(differing[name]))
    words = ["plures", "train", nearest, "--method", method]
    for key in differing[nearest]:
        if key != "members" or takes(method_class(method), "members"):
            words += _option(key, own[key])
    for setting in special_settings(config):
        words += ["--set", setting]
    return shlex.join([*words, "--run", str(run)])


def missing_stages(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the stages that a run has not finished.

    missing_stages(folder.config(), folder.records())
    """
    done = {record["stage"] for record in records if record["epoch"] == record["epochs"]}
    ensemble = method_class(kebab(config["method"]))(_network(config), **config["options"])
    return [step.name for step in ensemble.plan() if step.name not in done]


def special_settings(config: Mapping[str, Any]) -> list[str]:
    """Write the method's options that are not what its constructor makes of this network by itself.

    special_settings(run.config)  # ['granularity=kernel']
    """
    recipe = Recipe.from_json(config["recipe"])
    usual = ensemble_for(recipe, kebab(config["method"]), (), _network(config)).options()
    return [
        f"{kebab(name)}={_word(value)}"
        for name, value in config["options"].items()
        if name not in NOT_OPTIONS and value != _json(usual.get(name))
    ]


def _network(config: Mapping[str, Any]) -> nn.Module:
    info = config["data"]
    recipe = Recipe.from_json(config["recipe"])
    return network_for(recipe, len(info["classes"]), info["channels"], info["size"])


def _option(key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *_word(value).split()]


def _word(value: Any) -> str:
    """Write a value as the command line reads it: sequences and mappings as words one after the other."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {one}" for key, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    epochs = {f"epochs.{phase}": count for phase, count in values["epochs"].items()}
    return {key: value for key, value in values.items() if key != "epochs"} | epochs


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
