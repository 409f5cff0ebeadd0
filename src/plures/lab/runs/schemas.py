"""The types of the JSON files in a run folder, which may come from anybody or from a damaged disk.

Keys that a file has beyond these are kept and not checked.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from plures.errors import PluresError

Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # beyond, sums are infinite; refuses NaN
Whole = Annotated[int, Meta(ge=1 - (1 << 63), le=(1 << 63) - 1)]  # beyond, charts cannot draw them
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


MaybeNumber = NotRequired[Number | None]


def schema(**fields: Any) -> Any:
    """Return the type of a JSON object with the given keys.

    schema(size=Number, note=NotRequired[str])
    """
    make: Any = TypedDict  # type checkers want the keys spelled out in a class
    return make("object", fields)


SCORES = {"accuracy": Number, "nll": Number, "ece": Number}
RECORD = schema(  # one line of log.jsonl
    **{"stage": str, "phase": str, "member": Whole | None, "epoch": Count, "epochs": Count},
    **{"loss": Number, "seconds": Number, "train_accuracy": Share | None, "validation_accuracy": Share | None},
)
CONFIG = schema(
    method=str,
    recipe=schema(seed=Whole, data=str, model=str),
    data=schema(name=str, fingerprint=str, classes=list[str]),
    network=str,
    options=dict[str, Any],
    made=NotRequired[
        schema(method=str, settings=list[str], recipe=NotRequired[str | None], data=NotRequired[str | None]) | None
    ],
    environment=NotRequired[dict[str, Any] | None],
)
METRICS = schema(
    **SCORES,
    **dict.fromkeys(("images", "members", "bytes"), Whole),
    **dict.fromkeys(("brier", "aurc", "mean_member_accuracy"), Number),
    **dict.fromkeys(("seconds", "agreement", "temperature", "calibrated_nll", "calibrated_ece"), MaybeNumber),
    member_accuracies=list[Number],
)
TRUST = schema(
    home=NotRequired[schema(images=Whole, members=Whole, **SCORES) | None],
    risk_coverage=NotRequired[schema(coverage=list[Number], risk=list[Number]) | None],
    shift=NotRequired[
        schema(images=Whole, by_severity=list[schema(**SCORES)], constants=NotRequired[str | None], **SCORES) | None  # type: ignore[misc]
    ],
    ood=NotRequired[
        schema(
            **{"data": str, "most": Number, "known": list[Number], "strange": list[Number]},
            scores=list[schema(score=str, auroc=Number, fpr95=Number)],  # type: ignore[misc]
        )
        | None
    ],
)


def read_object(path: Path, expected: Any, advice: str) -> dict[str, Any]:
    """Read a JSON object from a file, and raise an error that ends with `advice` if it does not match the schema.

    read_object(Path("metrics.json"), METRICS, "remove it")["accuracy"]
    """
    try:
        return parse_object(path.read_bytes(), expected)
    except OSError as error:
        raise PluresError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PluresError(f"{path} is damaged or was written by another program ({error}): {advice}") from error


def parse_object(contents: bytes, expected: Any) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if it does not match the schema.

    >>> parse_object(b'{"coverage": [0.5, 1]}', schema(coverage=list[Number]))
    {'coverage': [0.5, 1]}
    >>> parse_object(b'{"coverage": [0.5, "all"]}', schema(coverage=list[Number]))
    Traceback (most recent call last):
    ...
    ValueError: Expected `float`, got `str` - at `$.coverage[1]`
    """
    try:
        found: dict[str, Any] = json.loads(contents)  # not by msgspec, which refuses paths that are not UTF-8
        msgspec.convert(found, expected)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return found
