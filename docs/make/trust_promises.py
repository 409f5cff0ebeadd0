"""Measure what docs/trust.md says of a calibrated run: temperatures, sets, bounded risks and members on demand."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plures import PluresError, metrics
from plures.calibration import ClassCalibration
from plures.guarantees import held_out_for_coverage
from plures.lab.evaluation.evaluate import predictions
from plures.lab.evaluation.trust import Trust, keep
from plures.lab.runs.open import open_run

# Thresholds of members on demand, closer together towards 1.
UNTIL = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.998)
COVERAGE = 0.9  # of sets
RISKS = (0.02, 0.05, 0.1, 0.2)  # of answers; those that the validation images can promise are measured


def add_promises(folder: Path, data_dir: Path | None, found: Trust) -> None:
    """Add what the calibration of a run promises, and what comes true on the test images, if it is missing."""
    if "first_members" in found:
        return
    run = open_run(folder)
    if isinstance(run.ensemble.calibration, ClassCalibration):
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        keep(folder, found, promises(run.ensemble.calibration, members, targets))


def promises(calibration: ClassCalibration, members: Tensor, targets: Tensor) -> Trust:
    """Measure after calibration, with fewer members, and what sets and risks promise."""
    mean, calibrated = members.mean(0), calibration.probabilities(members)
    before, after = calibration.nll.tolist()
    # The first members alone, for every image: what members on demand have to be better than.
    firsts = [(count, calibration.probabilities(members[:count])) for count in range(1, len(members) + 1)]
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
        "on_demand": [_on_demand(calibration, members, targets, until) for until in UNTIL],
        "first_members": [
            {"members": count, "accuracy": metrics.accuracy(some, targets), "nll": metrics.nll(some, targets)}
            for count, some in firsts
        ],
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


def on_demand(calibration: ClassCalibration, members: Tensor, until: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of members on demand, [batch, classes], and the number of members run, [batch].

    All members have predicted already: this evaluates the rule, and saves no passes.
    """
    used, margins = torch.full(members.shape[1:2], len(members)), calibration.margins(until)
    for count in range(len(members) - 1, 0, -1):
        first, second = members[:count].mean(0).topk(2, dim=1).values.unbind(1)
        used[first - second >= margins[count - 1]] = count
    probabilities = torch.empty_like(members[0])
    for count in sorted(set(used.tolist())):
        probabilities[used == count] = calibration.probabilities(members[:count, used == count])
    return probabilities, used


def _on_demand(calibration: ClassCalibration, members: Tensor, targets: Tensor, until: float) -> dict[str, float]:
    probabilities, used = on_demand(calibration, members, until)
    label, whole = probabilities.argmax(1), calibration.probabilities(members).argmax(1)
    early = used < len(members)
    return {
        "until": until,
        "members": float(used.double().mean()),
        "early": float(early.double().mean()),
        "early_same": float((label == whole)[early].double().mean()) if bool(early.any()) else 1.0,
        "accuracy": metrics.accuracy(probabilities, targets),
        "nll": metrics.nll(probabilities, targets),
    }
