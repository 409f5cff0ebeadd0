"""Measure what docs/trust.md says of a calibrated run: temperatures, sets and bounded risks."""

from pathlib import Path
from typing import Any

from torch import Tensor

from plures import PluresError, metrics
from plures.calibration import ClassCalibration
from plures.guarantees import held_out_for_coverage
from plures.lab.evaluation.evaluate import predictions
from plures.lab.runs.open import open_run
from trust_measured import Trust, keep

COVERAGE = 0.9  # of sets
RISKS = (0.02, 0.05, 0.1, 0.2)  # of answers; those that the validation images can promise are measured


def add_promises(folder: Path, data_dir: Path | None, found: Trust) -> None:
    """Add what the calibration of a run promises, and what comes true on the test images, if it is missing."""
    if "bounded" in found:
        return
    run = open_run(folder)
    if isinstance(run.ensemble.calibration, ClassCalibration):
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        keep(folder, found, promises(run.ensemble.calibration, members, targets))


def promises(calibration: ClassCalibration, members: Tensor, targets: Tensor) -> Trust:
    """Measure after calibration, with fewer members, and what sets and risks promise."""
    mean, calibrated = members.mean(0), calibration.probabilities(members)
    before, after = calibration.nll.tolist()
    found: Trust = {
        "calibrated": {
            "held_out": len(calibration.probability),
            "held_out_nll": before,
            "held_out_nll_after": after,
            "temperature": calibration.temperature,
            "accuracy": metrics.accuracy(calibrated, targets),
            "nll": metrics.nll(calibrated, targets),
            "ece": metrics.ece(calibrated, targets),
        },
        "bounded": [one for risk in RISKS if (one := _bounded(calibration, mean, targets, risk))],
    }
    if len(calibration.probability) >= held_out_for_coverage(COVERAGE):
        kinds = (("least ambiguous", False), ("adaptive", True))
        found["sets"] = [{"kind": kind, **_sets(calibration, mean, targets, adaptive)} for kind, adaptive in kinds]
    return found


def _sets(calibration: ClassCalibration, mean: Tensor, targets: Tensor, adaptive: bool) -> dict[str, Any]:
    sets = calibration.sets(mean, COVERAGE, adaptive)
    covered = float(sets.gather(1, targets[:, None]).double().mean())
    return {"asked": COVERAGE, "covered": covered, "size": float(sets.sum(1).double().mean())}


def _bounded(calibration: ClassCalibration, mean: Tensor, targets: Tensor, risk: float) -> dict[str, float] | None:
    """Measure the answers that a risk leaves; None if the held-out images cannot promise it."""
    try:
        threshold = calibration.selection(risk, delta=0.05).threshold
    except PluresError:
        return None
    confidence, label = mean.max(1)
    given = confidence.double() >= threshold
    wrong = float((label != targets)[given].double().mean()) if bool(given.any()) else 0.0
    return {"risk": risk, "answered": float(given.double().mean()), "wrong": wrong}
