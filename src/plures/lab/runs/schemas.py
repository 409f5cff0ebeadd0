"""What JSON from a run folder must look like: a folder may come from anybody, and a disk may have changed it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plures.errors import PluresError

LARGEST = 1e300  # beyond, numbers are no measurements, and sums of them are infinite
MOST = 1 << 63  # beyond, whole numbers count nothing, and charts cannot draw them


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both included."""

    kind: type
    low: float
    high: float


@dataclass(frozen=True)
class Maybe:
    """What may be missing, or null."""

    shape: Any


def read_object(path: Path, shape: Mapping[str, Any], advice: str) -> dict[str, Any]:
    """Read a JSON object, and refuse one whose values are of other types than `shape` says.

    read_object(Path("costs.json"), {"size": float, "note": Maybe(str)}, "remove it")
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise PluresError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        found = None
    wrong = "it is not a JSON object" if not isinstance(found, dict) else misfit(found, shape)
    if wrong:
        raise PluresError(f"{path} is damaged or was written by another program: {wrong}: {advice}")
    return dict(found)


def misfit(value: Any, shape: Any, name: str = "it") -> str | None:
    """Say what first differs from a shape: a type, bounds, a list of one shape, shapes by name, or what may be missing.

    >>> misfit({"accuracy": "high"}, {"accuracy": float})
    "its accuracy is 'high'"
    >>> misfit({"size": 1}, {"size": int, "note": Maybe(str)}) is None
    True
    """
    if isinstance(shape, Maybe):
        return None if value is None else misfit(value, shape.shape, name)
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return f"its {name} is {value!r:.60}"
        missing = (key for key, one in shape.items() if key not in value and not isinstance(one, Maybe))
        if (key := next(missing, None)) is not None:
            return f"it has no {key}"
        return _first(misfit(value[key], one, key) for key, one in shape.items() if key in value)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"its {name} is {value!r:.60}"
        return _first(misfit(one, shape[0], name) for one in value)
    if isinstance(shape, Between):
        fits = _is(value, shape.kind) and shape.low <= value <= shape.high
    else:
        fits = _is(value, shape)
    return None if fits else f"its {name} is {value!r:.60}"


def _first(found: Any) -> str | None:
    return next((one for one in found if one is not None), None)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST
    return isinstance(value, kind)
