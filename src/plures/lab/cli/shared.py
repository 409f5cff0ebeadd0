"""Parsing of arguments and printing of JSON, for all commands."""

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from inspect import cleandoc
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, Suppress, arg

from plures.errors import visible
from plures.lab.recipes import Recipe, get_recipe

# Arguments that several commands have.
RunPath = Annotated[Positional[Path], arg(metavar="RUN", help="The run folder that `plures train` wrote.")]
DATA_DIR = "The folder of data sets; by default, the environment variable PLURES_DATA."
DataDir = Annotated[Path | None, arg(metavar="FOLDER", help=DATA_DIR, help_behavior_hint="")]
Switch = FlagCreatePairsOff[bool]
TRUST = "Import the code from outside plures that the run names as its network or method."
TrustCode = Annotated[Switch, arg(help=TRUST)]
Json = Annotated[Switch, arg(help="Print JSON.")]
Given = Annotated[tuple[str, ...], Suppress]


class Command:
    """A command: its fields are the arguments, and calling it returns the exit code."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Do what the command is for."""
        raise NotImplementedError


Parsed = TypeVar("Parsed")


def parse(command: type[Parsed], arguments: Sequence[str], default: Any = tyro.MISSING_NONPROP) -> Parsed:
    """Parse a command; --help and errors end the program, as in argparse."""
    prog, about = f"plures {command.__name__.lower()}", cleandoc(command.__doc__ or "")

    def read(words: Sequence[str]) -> Parsed:
        found: Parsed = tyro.cli(command, prog=prog, description=about, args=words, default=default)
        return found

    shown = [visible(word) for word in arguments]
    if shown == list(arguments):
        return read(arguments)
    try:  # tyro repeats wrong words as they are: control characters must not reach the terminal
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return read(arguments)
    except SystemExit:
        read(shown)
        raise


def parse_with_recipe(command: type[Any], arguments: Sequence[str]) -> Any:
    """Parse with the settings of the recipe as defaults; its name is known only after parsing."""
    usual = "images" if "data" in given(arguments) else "digits"
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else usual
    method = dict(pairwise(arguments)).get("--method", command(settings=Recipe()).method)
    while True:
        known = get_recipe(recipe).for_method(method)
        parsed = parse(command, arguments, command(settings=known, method=method, recipe=usual))
        if (parsed.recipe, parsed.method) == (recipe, method):
            names = given(arguments)
            if "least_steps" not in names and any(name.startswith("epochs.") for name in names):  # as asked for
                parsed = replace(parsed, settings=replace(parsed.settings, least_steps=None))
            return replace(parsed, given=names)
        recipe, method = parsed.recipe, parsed.method


def given(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the options among the arguments, also of those that have their default value."""
    names = (word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--"))
    return tuple(name.removeprefix("no_") for name in names)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))
