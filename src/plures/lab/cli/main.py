"""The command line: from words to a command, and from errors to exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from itertools import pairwise
from typing import Any, TypeVar

import tyro

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.cli.commands import COMMANDS
from plures.lab.cli.many_runs import Compare
from plures.lab.cli.one_run import Train
from plures.lab.cli.shared import Command, usual_settings
from plures.version import __version__

OVERVIEW = """Split one network into an ensemble of subnetworks: calibrated uncertainty at the size of one model.

A first try, on embedded data, in about a minute:
  plures train
  plures evaluate runs/digits-orthogonal-dropout-seed0 --shift
  plures predict runs/digits-orthogonal-dropout-seed0 picture.png

plures COMMAND --help tells more, with examples. Errors end with exit code 2, an interrupted command with 130.
Environment: PLURES_DATA (folder of data sets), PLURES_CACHE (decoded pictures; ~/.cache/plures)."""

Parsed = TypeVar("Parsed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    main(["train", "digits", "--run", "runs/first"])
    """
    after_interrupt = "nothing was done"
    try:
        command = parse(list(sys.argv[1:] if arguments is None else arguments))
        after_interrupt = command.after_interrupt
        return command()
    except PluresError as error:
        print(f"plures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"plures: interrupted; {after_interrupt}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(arguments: Sequence[str]) -> Command:
    """Turn words into a command; --help and wrong words end the program as argparse does.

    parse(["predict", "runs/first", "wren.png"])()
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name == "--version":
        print(f"plures {__version__}")
        raise SystemExit(0)
    if name.startswith("-"):
        # Only ever prints the overview, or complains of an unknown option.
        tyro.extras.subcommand_cli_from_dict({**COMMANDS}, prog="plures", description=OVERVIEW, args=[name])
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    special: dict[str, Callable[[Sequence[str]], Command]] = {"train": _parse_train, "compare": _parse_compare}
    command: Command = special[name](rest) if name in special else _parse(COMMANDS[name], rest)
    return command


def _parse_train(arguments: Sequence[str]) -> Train:
    """Parse with the numbers of the recipe as defaults: which one it is only shows when all words are read."""
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else "digits"
    method = dict(pairwise(arguments)).get("--method", "orthogonal-dropout")
    while True:
        parsed = _parse(Train, arguments, Train(settings=usual_settings(recipe, method)))
        if (parsed.recipe, parsed.method) == (recipe, method):
            return parsed
        recipe, method = parsed.recipe, parsed.method


def _parse_compare(arguments: Sequence[str]) -> Compare:
    recipe = "digits"
    while True:
        # Methods change the recipe themselves: here it is as it stands.
        parsed = _parse(Compare, arguments, Compare(settings=usual_settings(recipe, "deterministic")))
        if parsed.recipe == recipe:
            return parsed
        recipe = parsed.recipe


def _parse(command: type[Parsed], arguments: Sequence[str], default: Any = tyro.MISSING_NONPROP) -> Parsed:
    name, about = command.__name__.lower(), cleandoc(command.__doc__ or "")
    parsed: Parsed = tyro.cli(command, prog=f"plures {name}", description=about, args=arguments, default=default)
    return parsed
