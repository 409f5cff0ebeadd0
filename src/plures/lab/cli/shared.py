"""Parsing of arguments and printing of JSON, for all commands."""

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from inspect import cleandoc
from io import StringIO
from itertools import pairwise
from pathlib import Path
from shutil import get_terminal_size
from types import NoneType
from typing import Annotated, Any, ClassVar, TextIO, TypeVar, get_args, get_origin

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, Suppress, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from plures.errors import visible
from plures.lab.recipes import Recipe, get_recipe

# Arguments that several commands have.
RunPath = Annotated[Positional[Path], arg(metavar="RUN", help="The run folder that `plures train` wrote.")]
DATA_DIR = "The folder of data sets; by default, the environment variable PLURES_DATA."
DataDir = Annotated[Path | None, arg(metavar="DIR", help=DATA_DIR, help_behavior_hint="")]
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


@dataclass(frozen=True)
class Settings(Recipe):
    """A recipe as the command line shows it: all fields but the description."""

    about: Annotated[str, Suppress] = ""

    def recipe(self) -> Recipe:
        """Return the plain recipe."""
        return Recipe(**{one.name: getattr(self, one.name) for one in fields(self)})


Parsed = TypeVar("Parsed")
registry = ConstructorRegistry()


def parse(command: type[Parsed], arguments: Sequence[str], default: Any = tyro.MISSING_NONPROP) -> Parsed:
    """Parse a command; --help and errors end the program, as in argparse."""
    name, about = command.__name__.lower(), cleandoc(command.__doc__ or "")
    prog = f"plures {name}"

    def read(words: Sequence[str]) -> Parsed:
        with redirect_stdout(_Help(sys.stdout)):
            found: Parsed = tyro.cli(
                command, prog=prog, description=about, args=words, default=default, registry=registry
            )
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


class _Help(StringIO):
    """Write help, and break the line of usage, which tyro may leave longer than the terminal is wide."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        first, end, rest = text.partition("\n")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", first)  # without colours
        if plain.startswith("usage:") and len(plain) > (width := get_terminal_size().columns):
            whole = re.sub(r"\[[^]]*\]", lambda option: option[0].replace(" ", "\N{NO-BREAK SPACE}"), plain)
            first = textwrap.fill(whole, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        return self._stream.write(first.replace("\N{NO-BREAK SPACE}", " ") + end + rest)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the terminal: without it, tyro draws no boxes."""
        return self._stream.encoding or "utf-8"

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def parse_with_recipe(command: type[Any], arguments: Sequence[str]) -> Any:
    """Parse with the settings of the recipe as defaults; its name is known only after parsing."""
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else "digits"
    method = dict(pairwise(arguments)).get("--method", command(settings=Settings()).method)
    while True:
        usual = get_recipe(recipe).for_method(method)
        shown = Settings(**{one.name: getattr(usual, one.name) for one in fields(usual)})
        parsed = parse(command, arguments, command(settings=shown, method=method))
        if (parsed.recipe, parsed.method) == (recipe, method):
            return replace(parsed, given=given(arguments))
        recipe, method = parsed.recipe, parsed.method


def given(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the options among the arguments, also of those that have their default value.

    >>> given(["digits", "--members", "5", "--batch-size=32", "--no-flip"])
    ('members', 'batch_size', 'flip')
    """
    names = (word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--"))
    return tuple(name.removeprefix("no_") for name in names)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


@registry.primitive_rule
def _or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show and read options that may be None: INT|None."""
    kinds = [get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(info.type)]
    if len(kinds) != 2 or kinds[1] is not NoneType or kinds[0] not in (int, float, str, tuple[float, float]):
        return None
    several = get_args(kinds[0])  # of a tuple

    def read(words: list[str]) -> Any:
        if words[0].lower() == "none":
            return None
        return tuple(kind(word) for kind, word in zip(several, words, strict=True)) if several else kinds[0](words[0])

    def write(value: Any) -> list[str]:
        return [str(one) for one in (value if isinstance(value, tuple) else [value])]

    shown = " ".join(kind.__name__.upper() for kind in several or [kinds[0]])
    return PrimitiveConstructorSpec(
        nargs=(1, len(several)) if several else 1,
        metavar=f"{shown}|None",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, tuple if several else kinds[0]),
        str_from_instance=write,
    )
