"""Measure a finished run under shift, on out-of-distribution data, and when it abstains.

The results are kept in the run folder as trust.json, which comparisons, the report and the page in docs/ read.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from msgspec import Meta
from torch import Tensor

from plures import files, metrics
from plures.errors import PluresError
from plures.lab.data import open_data
from plures.lab.evaluation.corruptions import KINDS
from plures.lab.evaluation.evaluate import OTHER_IMAGES, Tell, evaluate_shift, evenly, predictions, scores, told_apart
from plures.lab.runs.folder import SCORES, Number, Whole, read_object, schema
from plures.lab.runs.open import open_run

FILE = "trust.json"
POINTS = 100  # of a risk-coverage curve

# Names the corruptions and their strengths: figures of others must not stand in one table with these.
CONSTANTS = files.digest(repr([(name, strengths) for name, (_, strengths) in KINDS.items()]).encode())

Trust = dict[str, Any]
_Severities: Any = Annotated[list[schema(**SCORES)], Meta(min_length=5, max_length=5)]  # type: ignore[misc]
TRUST = schema(
    home=schema(images=Whole, members=Whole, **SCORES),
    risk_coverage=schema(coverage=list[Number], risk=list[Number]),
    shift=NotRequired[schema(images=Whole, by_severity=_Severities, constants=str, **SCORES)],
    ood=NotRequired[schema(data=str, scores=list[schema(score=str, auroc=Number, fpr95=Number)])],  # type: ignore[misc]
)


def kept_trust(folder: Path) -> Trust:
    """Read what was measured of a run before; nothing is an empty dict."""
    path = folder / FILE
    if not files.is_file(path):
        return {}
    advice = "remove it, and it is measured again"
    found = read_object(path, TRUST, advice)
    curve, scored = found["risk_coverage"], found["ood"]["scores"] if "ood" in found else [{"score": "entropy"}]
    fits = len(curve["risk"]) == len(curve["coverage"]) and max(curve["coverage"], default=0) >= 0.5
    if not fits or "entropy" not in [one["score"] for one in scored]:
        raise PluresError(f"{path} is damaged or was written by another program, its figures do not fit: {advice}")
    if "shift" in found and found["shift"]["constants"] != CONSTANTS:
        del found["shift"]
    return found


def measured_trust(
    folder: Path,
    data_dir: Path | None,
    *,
    shift: bool,
    ood: str | None,
    tell: Tell = lambda words: None,
    trust_code: bool = False,
) -> Trust:
    """Measure what is asked for and was not measured before, and keep each part in the run folder at once."""
    found = kept_trust(folder)
    shift_missing = shift and "shift" not in found
    ood_missing = ood is not None and found.get("ood", {}).get("data") != ood
    if found and not (shift_missing or ood_missing):
        return found
    run = open_run(folder, trust_code=trust_code)
    data = run.data(data_dir)
    # Missing data raise an error before the first long measurement, not after it.
    other = open_data(ood, data_dir=data_dir, like=data.info).test if ood is not None and ood_missing else None
    if not found or other is not None:
        tell(f"{len(data.test):,} test images as they are")
        members, targets = predictions(run.ensemble, data.test)
    if not found:
        keep(folder, found, at_home(members, targets))
    if other is not None:
        some = evenly(other, OTHER_IMAGES)
        tell(f"{len(some):,} images of {ood}")
        apart = told_apart(members, predictions(run.ensemble, some)[0])
        keep(folder, found, {"ood": {"data": ood, "images": len(some), "scores": apart}})
    if shift_missing:
        keep(folder, found, {"shift": evaluate_shift(run.ensemble, data, tell) | {"constants": CONSTANTS}})
    return found


def as_metrics(found: Trust) -> dict[str, float]:
    """Return the figures that a comparison shows, by the names that they have among a run's metrics.

    >>> as_metrics({"shift": {"accuracy": 0.7, "nll": 1.0, "ece": 0.1}})["shift_accuracy"]
    0.7
    """
    figures = {f"shift_{name}": found["shift"][name] for name in SCORES if "shift" in found}
    if "ood" in found:
        best = {one["score"]: one for one in found["ood"]["scores"]}["entropy"]
        figures |= {"ood_auroc": best["auroc"], "ood_fpr95": best["fpr95"]}
    return figures


def at_home(members: Tensor, targets: Tensor) -> Trust:
    """Measure on the test images as they are, also when the ensemble is silent if it is unsure."""
    risk = metrics.risk_coverage(members.mean(0), targets)
    places = np.unique(np.linspace(0, len(targets) - 1, POINTS).round().astype(int))
    return {
        "home": scores(members, targets),
        "risk_coverage": {"coverage": ((places + 1) / len(risk)).tolist(), "risk": risk[places].tolist()},
    }


def keep(folder: Path, found: Trust, more: Trust) -> None:
    """Add what was measured, in memory and in the folder: an interruption then loses one part at most."""
    found |= more
    with contextlib.suppress(PluresError):  # a folder that cannot be written to: measure again next time
        files.write_json(folder / FILE, found)
