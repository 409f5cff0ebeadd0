"""The command line: parse arguments, run a command, turn errors into exit codes.

What is heavy is imported by the command that needs it: `--help` answers without torch, and Ctrl-C while Python still
imports is answered as at any other time.
"""

import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from plures.errors import PluresError, visible

if TYPE_CHECKING:
    from plures.lab.cli.shared import Command

COMMANDS = {  # the files of their classes
    "train": "train",
    "evaluate": "runs",
    "predict": "runs",
    "export": "runs",
    "serve": "runs",
    "compare": "compare",
    "reproduce": "compare",
    "report": "runs",
    "recipes": "train",
}
OVERVIEW = """usage: plures COMMAND [OPTIONS]

Split one network into an ensemble of subnetworks: calibrated uncertainty at
the size of one model.

A first try, on embedded data, in about a minute:
  plures train
  plures evaluate runs/digits-orthogonal-dropout-seed0 --shift
  plures predict runs/digits-orthogonal-dropout-seed0 image.png

Commands (plures COMMAND --help shows options and examples):
{commands}

Options:
  -h, --help   show this help and exit
  --version    show the version and exit

Errors end with exit code 2, an interrupted command with 130.
Environment variables: PLURES_DATA (the folder of data sets), PLURES_CACHE (the
folder of decoded images; by default, the cache folder of your system)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    after_interrupt = "nothing was done"
    _open_missing_streams()
    logging.getLogger("plures").addFilter(_harmless)
    try:
        command = parse(list(sys.argv[1:] if arguments is None else arguments))
        after_interrupt = command.after_interrupt
        code = command()
        sys.stdout.flush()
        return code
    except PluresError as error:
        print(f"plures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"plures: interrupted; {after_interrupt}", file=sys.stderr)
        return 130
    except OSError as error:
        return _told(error)


def parse(arguments: Sequence[str]) -> "Command":
    """Parse a command; --help and errors end the program, as in argparse."""
    known = commands()
    from plures.checks import unknown
    from plures.lab.cli.shared import parse as parse_words
    from plures.lab.cli.shared import parse_with_recipe
    from plures.version import __version__

    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "--version"):
        lines = [f"  {name:<11}{(one.__doc__ or '').partition(chr(10))[0]}" for name, one in known.items()]
        print(f"plures {__version__}" if name == "--version" else OVERVIEW.format(commands="\n".join(lines)))
        sys.stdout.flush()
        raise SystemExit(0)
    if name not in known:
        raise unknown("option" if name.startswith("-") else "command", name, [*known, "--help", "--version"])
    chosen = known[name]
    found: Command = (parse_with_recipe if "settings" in chosen.__annotations__ else parse_words)(chosen, rest)
    return found


def commands() -> dict[str, type[Any]]:
    """Return the commands: each is a class whose fields are arguments and whose docstring is help."""
    try:
        return {
            name: getattr(import_module(f"plures.lab.cli.{file}"), name.capitalize()) for name, file in COMMANDS.items()
        }
    except ModuleNotFoundError as error:  # the lab is optional, the library is not
        raise PluresError(f"the command line needs {error.name}: pip install 'plures[lab]'") from error


def _harmless(record: logging.LogRecord) -> bool:
    """Escape control characters in a warning: names of files and folders may come from anybody."""
    record.msg, record.args = visible(record.getMessage()), ()
    return True


def _open_missing_streams() -> None:
    """Open the null device in place of an output that is closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115


def _told(error: OSError) -> int:
    """Print an error of the system; print nothing if the reader of the output, such as head, has closed it."""
    if error.filename is not None:
        print(visible(f"plures: cannot use {error.filename}: {error.strerror}"), file=sys.stderr)
        return 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
    if error.errno == errno.EPIPE:
        return 141
    print(f"plures: cannot write the output: {error.strerror or error}", file=sys.stderr)
    return 2
