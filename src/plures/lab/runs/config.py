"""What a run was made from, as JSON: enough to refuse another configuration and to repeat this one."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plures.ensemble import Ensemble
from plures.lab.data import Data
from plures.lab.recipes import Recipe
from plures.version import __version__

FORMAT = 1
PACKAGES = ("torch", "numpy", "safetensors", "accelerate")


def describe(ensemble: Ensemble, data: Data, recipe: Recipe, precision: str) -> dict[str, Any]:
    """Put everything that decides about the result of a run into JSON values.

        config = describe(ensemble, data, recipe, precision="bf16")
        config["method"], config["recipe"]["seed"], config["data"]["fingerprint"]

    It names no machine and no path, so that runs of different machines can be compared. `precision` is what the
    recipe's came to on this device.
    """
    shapes = json.dumps(ensemble.shapes)
    config = {
        "format": FORMAT,
        "method": type(ensemble).__name__,
        "recipe": recipe.as_json(),
        "data": {"fingerprint": data.fingerprint, **asdict(data.info)},
        "network": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "options": ensemble.options(),
        "environment": {**environment(), "precision": precision},
    }
    value: dict[str, Any] = json.loads(json.dumps(config))  # tuples become lists, as they come back from the file
    return value


def environment() -> dict[str, str | None]:
    """Name the versions that a run depends on.

    environment()["torch"]
    """
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"plures": __version__, "python": platform.python_version(), **versions, "git": _git_commit()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say where two configurations differ, leaving out the environment.

    >>> differences({"recipe": {"seed": 0}}, {"recipe": {"seed": 1}})
    ['recipe.seed was 0 and is 1']
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} was {_short(old.get(name, 'absent'))} and is {_short(new.get(name, 'absent'))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and not name.startswith("environment.")
    ]


def _short(value: Any, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _git_commit() -> str | None:
    """Name the commit of the code, with `-dirty` where files have changed since; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
