"""What commands have in common."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from tyro.conf import FlagCreatePairsOff, Suppress, arg

from plures.checks import unknown
from plures.lab.methods import METHOD_NAMES
from plures.lab.recipes import Recipe, get_recipe

DataDir = Annotated[Path | None, arg(metavar="DIR")]
Switch = FlagCreatePairsOff[bool]


class Command(Protocol):
    """What `main` needs of a command: the arguments are its fields, calling it gives the exit code."""

    after_interrupt: ClassVar[str]

    def __call__(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Settings(Recipe):
    """A recipe as the command line shows it: all fields but the description."""

    about: Annotated[str, Suppress] = ""


def usual_settings(recipe: str, method: str) -> Settings:
    """Give a recipe's numbers as they are usual for a method.

    usual_settings("cifar10", "mimo").members
    """
    if method not in METHOD_NAMES:
        raise unknown("method", method, METHOD_NAMES)
    usual = get_recipe(recipe).for_method(METHOD_NAMES[method])
    return Settings(**{one.name: getattr(usual, one.name) for one in fields(usual)})


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as JSON.

    print_json({"run": "runs/first"})
    """
    print(json.dumps(value, indent=2, allow_nan=False))
