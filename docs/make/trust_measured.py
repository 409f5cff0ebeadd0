"""Measure a finished run for docs/trust.md: under shift, on out-of-distribution data, and when it abstains.

The figures are kept in the run folder as trust.json, so that only what is missing is measured.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from plures import PluresError, files, metrics
from plures.lab.data import open_data
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES
from plures.lab.evaluation.evaluate import (
    OTHER_IMAGES,
    evaluate_shift,
    evenly,
    fastest,
    predictions,
    scores,
    told_apart,
)
from plures.lab.runs.open import open_run

POINTS = 100  # of a risk-coverage curve

# Names the corruptions and their strengths: figures of others must not stand in one table with these.
CONSTANTS = files.digest(repr([(name, strengths) for name, (_, strengths) in KINDS.items()]).encode())

Trust = dict[str, Any]


def kept_trust(folder: Path) -> Trust:
    """Read what was measured of a run before; nothing is an empty dict."""
    path = folder / "trust.json"
    found: Trust = json.loads(path.read_text()) if path.is_file() else {}
    if found.get("shift", {}).get("constants") != CONSTANTS:
        found.pop("shift", None)
    return found


def measured_trust(folder: Path, data_dir: Path | None, ood: str, tell: Callable[[str], None]) -> Trust:
    """Measure what was not measured before, and keep each part in the run folder at once."""
    found = kept_trust(folder)
    if {"home", "shift"} <= found.keys() and found.get("ood", {}).get("data") == ood:
        return found
    run = open_run(folder)
    data = run.data(data_dir)
    other = evenly(open_data(ood, data_dir=data_dir, like=data.info).test, OTHER_IMAGES)
    tell(f"{len(data.test):,} test images as they are")
    members, targets = predictions(run.ensemble, data.test)
    keep(folder, found, at_home(members, targets))
    tell(f"{len(other):,} images of {ood}")
    apart = told_apart(members, predictions(run.ensemble, other)[0])
    keep(folder, found, {"ood": {"data": ood, "images": len(other), "scores": apart}})
    if "shift" not in found:
        rows = evaluate_shift(run.ensemble, data, fastest(run.ensemble), tell)
        severities = [{"severity": one} | means([row for row in rows if row["severity"] == one]) for one in SEVERITIES]
        summary = {"constants": CONSTANTS, "images": rows[0]["images"], "by_severity": severities}
        keep(folder, found, {"shift": {**summary, "rows": rows, **means(rows)}})
    return found


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean accuracy, NLL and ECE of some rows."""
    return {name: fmean(row[name] for row in rows) for name in ("accuracy", "nll", "ece")}


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
        files.write_json(folder / "trust.json", found)
