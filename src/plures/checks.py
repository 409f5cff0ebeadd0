"""How bad input is worded: did-you-mean, one-of, must-be. Every check raises a `PluresError` of one sentence."""

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from plures.errors import PluresError


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error: the known names that look like the unknown one."""
    matches = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def unknown(kind: str, given: str, known: Iterable[str]) -> PluresError:
    """Make the error for a name that is not known, with what is accepted and the names that come near.

    >>> str(unknown("recipe", "digit", ["digits", "cifar10"]))
    "there is no recipe 'digit': use one of digits, cifar10; did you mean digits?"
    """
    known = list(known)
    accepted = ", ".join(known) or "none"
    return PluresError(f"there is no {kind} {given!r}: use one of {accepted}{nearest(given, known)}")


def one_of(name: str, value: Any, accepted: Collection[Any]) -> None:
    """Refuse a value that is not among those accepted."""
    if not isinstance(value, str | None) or value not in accepted:
        raise PluresError(f"{name}={value!r}; use one of {', '.join(one for one in accepted if one is not None)}")


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Refuse what is not a whole number within bounds; return it as Python's own, which JSON can hold."""
    bounds = f"{least} or more" if most is None else f"from {least} to {most}"
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # numpy's numbers, too
    if not whole or value < least or (most is not None and value > most):
        raise PluresError(f"{name}={value!r}; use a whole number, {bounds}")
    return int(value)


MOST_MEMBERS = 255  # owners are single bytes, and one value is nobody's


def check_members(members: Any, least: int = 1) -> int:
    """Check a number of members, and return it as Python's own."""
    return whole_number("members", members, least=least, most=MOST_MEMBERS)


def number(name: str, value: Any, accepted: str, *, above: float = -math.inf, below: float = math.inf) -> None:
    """Refuse what is not a finite number strictly between two bounds; `accepted` says so in words."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or not above < value < below:
        raise PluresError(f"{name}={value!r}; use {accepted}")
