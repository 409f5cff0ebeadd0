"""Methods by their names on the command line: their classes, options, and colours in figures.

This module does not import torch.
"""

import contextlib
import inspect
import io
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from plures.checks import unknown
from plures.errors import PluresError
from plures.methods import METHODS

if TYPE_CHECKING:
    from plures.ensemble import Ensemble

# Arguments that the recipe sets, or that no option can express.
NOT_OPTIONS = ("self", "network", "members", "seed", "roles", "loss", "measured")


def kebab(name: str) -> str:
    """Return a Python name as it is written on the command line: mc-dropout for MCDropout."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower().replace("_", "-")


METHOD_NAMES = {kebab(name): name for name in METHODS}


def known_method(method: str) -> str:
    """Return the name of a method, given by it or by its class, on the command line; raise an error for other names."""
    if is_code(method):
        return method
    if kebab(method) not in METHOD_NAMES:
        raise unknown("method", kebab(method), [*METHOD_NAMES, "module:Class"])
    return kebab(method)


def is_code(name: str) -> bool:
    """Return whether the name of a method or network is the user's own code, as mypackage.networks:small is."""
    return ":" in name


def short_name(method: str) -> str:
    """Return the name of a method in tables and folders: two-heads for mypackage.methods:TwoHeads."""
    return kebab(method.rpartition(":")[2])


def imported(kind: str, name: str) -> Any:
    """Import `module:name`; the working directory is searched, too, as for scripts."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.append(here)
    try:
        return operator.attrgetter(attribute)(import_module(module))
    except AttributeError:
        raise PluresError(f"the module {module!r} has no {attribute!r}, which the {kind} {name!r} needs") from None
    except Exception as error:  # importing runs the user's code, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise PluresError(f"the module {module!r} of the {kind} {name!r} cannot be imported: {reason}") from error


def method_class(name: str) -> type["Ensemble"]:
    """Return the class of a method by its name on the command line."""
    known_method(name)
    if not is_code(name):
        return getattr(import_module(METHODS[METHOD_NAMES[name]]), METHOD_NAMES[name])  # type: ignore[no-any-return]
    from plures.ensemble import Ensemble

    found = imported("method", name)
    if not (isinstance(found, type) and issubclass(found, Ensemble)):
        raise PluresError(f"the method {name!r} must be a class derived from plures.Ensemble, but is {found!r}")
    return found


def method_options(method: type["Ensemble"], settings: Sequence[str]) -> dict[str, Any]:
    """Read settings such as `granularity=kernel` as arguments of a method's constructor.

    Names may be written with hyphens; types and accepted values are those of the constructor's annotations.
    """
    parameters, hints = inspect.signature(method).parameters, get_type_hints(method.__init__)
    # Values of no type cannot be parsed.
    accepted = {name: one for name, one in parameters.items() if name in hints and name not in NOT_OPTIONS}
    shown = [f"{kebab(name)}={one.default}" for name, one in accepted.items()]
    chosen = {}
    for setting in settings:
        word, equals, value = setting.partition("=")
        name = word.strip().replace("-", "_")
        if not equals:
            raise PluresError(f"--set {setting} has no value; write NAME=VALUE, as in --set {' --set '.join(shown)}")
        if name not in accepted:
            raise unknown(f"option of {kebab(method.__name__)}", word, shown)
        chosen[name] = _read(setting, value.strip(), hints[name])
    return chosen


def takes(method: type["Ensemble"], name: str) -> bool:
    """Return whether the constructor of a method has an argument."""
    return name in inspect.signature(method).parameters


def _read(setting: str, value: str, annotation: Any) -> Any:
    """Let tyro read one value, so that --set and ordinary options accept the same words."""
    import tyro

    silent = contextlib.redirect_stderr(io.StringIO())
    for word in (value, value.capitalize()):  # true and none are as good as True and None
        with contextlib.suppress(SystemExit), silent:
            return tyro.cli(annotation, args=word.split(), config=(tyro.conf.FlagConversionOff, tyro.conf.Positional))
    accepted = str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__
    if get_origin(annotation) is Literal:
        accepted = " or ".join(map(str, get_args(annotation)))
    raise PluresError(f"--set {setting}: {value!r} is not accepted; give {accepted}")


class Look(NamedTuple):
    """A colour, and a marker as matplotlib calls it."""

    colour: str
    marker: str


# In the order of the paper; packed ensembles came later. Okabe and Ito's colours, safe for the colour-blind,
# with wine and grey for black and yellow.
LOOKS = {
    "deterministic": Look("#7F7F7F", "p"),
    "mc-dropout": Look("#56B4E9", "v"),
    "batch-ensemble": Look("#E69F00", "<"),
    "mimo": Look("#CC79A7", "D"),
    "masksembles": Look("#009E73", "^"),
    "packed-ensemble": Look("#882255", ">"),
    "orthogonal-dropout": Look("#D55E00", "o"),
    "deep-ensemble": Look("#0072B2", "s"),
}


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for every name, each different: a method has its own, any other name one that is left."""
    every = list(LOOKS.values())
    pairs = (pair for shift in count(1) for pair in zip(every, every[shift:] + every[:shift], strict=True))
    # The colour of one method with the marker of another.
    mixed = (Look(one.colour, other.marker) for one, other in pairs)
    return {name: LOOKS.get(name) or next(mixed) for name in dict.fromkeys(names)}


def place_of(name: str) -> tuple[int, str]:
    """Return the sort key of a row: methods in the order of the paper, then others by name."""
    method = name.partition(" ")[0]
    return (list(LOOKS).index(method) if method in LOOKS else len(LOOKS), name)
