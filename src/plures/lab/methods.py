"""From words on the command line to a method with its options, which its constructor's signature tells."""

import contextlib
import inspect
import io
import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from plures.checks import unknown
from plures.errors import PluresError
from plures.methods import METHODS

if TYPE_CHECKING:  # the command line answers --help without torch
    from plures.ensemble import Ensemble

# What every run sets by itself, and what words cannot say.
NOT_OPTIONS = ("self", "network", "members", "seed", "roles", "loss")


def kebab(name: str) -> str:
    """
    >>> kebab("MCDropout")
    'mc-dropout'

    Write a Python name as a command line does.
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower().replace("_", "-")


METHOD_NAMES = {kebab(name): name for name in METHODS}


def method_class(name: str) -> type["Ensemble"]:
    """Find a method by its name on the command line.

    method_class("deep-ensemble")(network, members=5)
    """
    if name not in METHOD_NAMES:
        raise unknown("method", name, METHOD_NAMES)
    home = METHODS[METHOD_NAMES[name]]
    try:
        return getattr(import_module(home), METHOD_NAMES[name])  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        raise PluresError(f"the method {name} is not part of this version of plures") from None


def method_options(method: type["Ensemble"], settings: Sequence[str]) -> dict[str, Any]:
    """Read settings such as `granularity=kernel` as arguments of a method's constructor.

        method_options(plures.OrthogonalDropout, ["granularity=kernel", "optimize-masks=false"])

    Names may be written with hyphens; types and accepted values are those of the constructor's annotations.
    """
    parameters = inspect.signature(method).parameters
    accepted = {name: one for name, one in parameters.items() if name not in NOT_OPTIONS}
    hints = get_type_hints(method.__init__)
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
    """Tell whether a method's constructor has an argument.

    takes(plures.DeepEnsemble, "members")
    """
    return name in inspect.signature(method).parameters


def _read(setting: str, value: str, annotation: Any) -> Any:
    """Let tyro read one value, so that --set and ordinary options accept the same words."""
    silent = contextlib.redirect_stderr(io.StringIO())
    for word in (value, value.capitalize()):  # true and none are as good as True and None
        with contextlib.suppress(SystemExit), silent:
            return tyro.cli(annotation, args=word.split(), config=(tyro.conf.FlagConversionOff, tyro.conf.Positional))
    accepted = str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__
    if get_origin(annotation) is Literal:
        accepted = " or ".join(map(str, get_args(annotation)))
    raise PluresError(f"--set {setting}: {value!r} is not accepted; give {accepted}")
