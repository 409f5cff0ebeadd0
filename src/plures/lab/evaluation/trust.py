"""Measure a finished run under shift, on out-of-distribution data, when it abstains, and with fewer members.

The results are kept in the run folder as trust.json, which comparisons, the report and the page in docs/ read.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plures import files, metrics
from plures.calibration import ClassCalibration
from plures.errors import PluresError
from plures.guarantees import held_out_for_coverage
from plures.lab.data import Data, open_data
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES
from plures.lab.evaluation.evaluate import OTHER_IMAGES, Tell, evaluate_shift, evenly, predictions, told_apart
from plures.lab.runs.folder import TRUST, read_object
from plures.lab.runs.open import open_run

FILE = "trust.json"
POINTS = 100  # of a risk-coverage curve
BINS = 25  # of a histogram
# Thresholds of members on demand, closer together towards 1.
UNTIL = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.998)
COVERAGE = 0.9  # of sets
RISKS = (0.02, 0.05, 0.1, 0.2)  # of answers; those that the validation images can promise are measured

# Names the corruptions and their strengths: figures of others must not stand in one table with these.
CONSTANTS = files.digest(repr([(name, strengths) for name, (_, strengths) in KINDS.items()]).encode())

Trust = dict[str, Any]


def kept_trust(folder: Path) -> Trust:
    """Read what was measured of a run before; nothing is an empty dict."""
    path = folder / FILE
    if not files.is_file(path):
        return {}
    advice = "remove it, and it is measured again"
    found = {name: value for name, value in read_object(path, TRUST, advice).items() if value is not None}
    if not _makes_sense(found):
        raise PluresError(f"{path} is damaged or was written by another program, its figures do not fit: {advice}")
    if found.get("shift", {}).get("constants") != CONSTANTS:  # the first versions do not say with which
        found.pop("shift", None)
    return found


def _makes_sense(found: Trust) -> bool:
    """Whether lists are as long as those that they are drawn against, and nothing lacks what it is compared with."""
    shift, ood, risk = found.get("shift"), found.get("ood"), found.get("risk_coverage")
    return (
        (shift is None or (found.get("home") is not None and len(shift["by_severity"]) == len(SEVERITIES)))
        and (ood is None or (ood["most"] > 0 and len(ood["known"]) == len(ood["strange"]) == BINS))
        and (ood is None or "entropy" in [one["score"] for one in ood["scores"]])
        and (risk is None or (len(risk["risk"]) == len(risk["coverage"]) and max(risk["coverage"], default=0) >= 0.5))
    )


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
    home_missing = "home" not in found or ("calibrated" in found and "first_members" not in found)  # of older versions
    shift_missing = shift and "shift" not in found
    ood_missing = ood is not None and found.get("ood", {}).get("data") != ood
    if not (home_missing or shift_missing or ood_missing):
        return found
    run = open_run(folder, trust_code=trust_code)
    data = run.data(data_dir)
    # Other data that are missing are told before the first long measurement, not after it.
    other = open_data(ood, data_dir=data_dir, like=data.info).test if ood is not None and ood_missing else None
    if home_missing or other is not None:
        tell(f"{len(data.test):,} test images as they are")
        members, targets = predictions(run.ensemble, data.test)
    if home_missing:
        held_out = predictions(run.ensemble, data.validation) if len(data.validation) else (None, None)
        _keep(folder, found, at_home(members, targets, *held_out))
    if other is not None:
        some = evenly(other, OTHER_IMAGES)
        tell(f"{len(some):,} images of {ood}")
        _keep(folder, found, {"ood": {"data": ood, **among_strangers(members, predictions(run.ensemble, some)[0])}})
    if shift_missing:
        _keep(folder, found, {"shift": under_shift(run.ensemble, data, tell)})
    return found


def as_metrics(found: Trust) -> dict[str, float]:
    """Return the figures that a comparison shows, by the names that they have among a run's metrics.

    >>> as_metrics({"shift": {"accuracy": 0.7, "nll": 1.0, "ece": 0.1}})["shift_accuracy"]
    0.7
    """
    figures = {f"shift_{name}": found["shift"][name] for name in ("accuracy", "nll", "ece") if "shift" in found}
    if "ood" in found:
        best = {one["score"]: one for one in found["ood"]["scores"]}["entropy"]
        figures |= {"ood_auroc": best["auroc"], "ood_fpr95": best["fpr95"]}
    return figures


def at_home(members: Tensor, targets: Tensor, held_out: Tensor | None, labels: Tensor | None) -> Trust:
    """Measure on images like those seen: before and after calibration, silent when unsure, member by member."""
    mean = members.mean(0)
    curve = metrics.risk_coverage(mean, targets)
    places = np.unique(np.linspace(0, len(targets) - 1, POINTS).round().astype(int))
    found: Trust = {
        "home": {"images": len(targets), "members": len(members), **_quality(mean, targets)},
        "risk_coverage": {"coverage": curve.coverage[places].tolist(), "risk": curve.risk[places].tolist()},
    }
    if held_out is None or labels is None or not bool((labels != labels[0]).any()):
        return found
    calibration = ClassCalibration.fit(held_out, labels)
    before, after = calibration.nll.tolist()
    found["calibrated"] = {
        "held_out": len(labels),
        "held_out_nll": before,
        "held_out_nll_after": after,
        "temperature": calibration.temperature,
        **_quality(calibration.probabilities(members), targets),
    }
    found["on_demand"] = [_on_demand(calibration, members, targets, until) for until in UNTIL]
    # The first members alone, for every image: what members on demand have to be better than.
    firsts = [(count, calibration.probabilities(members[:count])) for count in range(1, len(members) + 1)]
    found["first_members"] = [
        {"members": count, "accuracy": metrics.accuracy(some, targets), "nll": metrics.nll(some, targets)}
        for count, some in firsts
    ]
    found["bounded"] = [one for risk in RISKS if (one := _bounded(calibration, mean, targets, risk))]
    if len(labels) >= held_out_for_coverage(COVERAGE):
        found["sets"] = [
            _sets(calibration, mean, targets, kind, adaptive)
            for kind, adaptive in (("least ambiguous", False), ("adaptive", True))
        ]
    return found


def under_shift(ensemble: Any, data: Data, tell: Tell = lambda words: None) -> Trust:
    """Measure on spoiled test images: every row, and the means over all kinds at each severity."""
    rows = evaluate_shift(ensemble, data, tell)
    severities = sorted({row["severity"] for row in rows})
    return {
        "images": rows[0]["images"],
        "size": data.info.size,
        "constants": CONSTANTS,
        "rows": rows,
        "by_severity": [
            {"severity": severity} | _means([row for row in rows if row["severity"] == severity])
            for severity in severities
        ],
        **_means(rows),
    }


def among_strangers(inside: Tensor, outside: Tensor) -> Trust:
    """Measure how well doubt tells other data, [members, samples, classes], from the own."""
    doubt = [metrics.uncertainty(one).total for one in (inside, outside)]
    most = float(np.log(inside.shape[-1]))
    histograms = [(torch.histc(one, BINS, 0, most) / len(one)).tolist() for one in doubt]
    return {
        "images": outside.shape[1],
        "scores": told_apart(inside, outside),
        "known": histograms[0],
        "strange": histograms[1],
        "most": most,
    }


def _keep(folder: Path, found: Trust, more: Trust) -> None:
    """Add what was measured, in memory and in the folder: an interruption then loses one part at most."""
    found |= more
    with contextlib.suppress(PluresError):  # a folder that cannot be written to: measure again next time
        files.write_json(folder / FILE, found)


def _quality(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    named = {"accuracy": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece, "aurc": metrics.aurc}
    return {name: metric(probabilities, targets) for name, metric in named.items()}


def _sets(
    calibration: ClassCalibration, mean: Tensor, targets: Tensor, kind: str, adaptive: bool
) -> dict[str, str | float]:
    sets = calibration.sets(mean, COVERAGE, adaptive, penalty=0.0, free=1)
    covered = float(sets.gather(1, targets[:, None]).double().mean())
    return {"kind": kind, "asked": COVERAGE, "covered": covered, "size": float(sets.sum(1).double().mean())}


def _bounded(calibration: ClassCalibration, mean: Tensor, targets: Tensor, risk: float) -> dict[str, float] | None:
    """Measure the answers that a risk leaves; None where the held-out images cannot promise it."""
    try:
        threshold = calibration.selection(risk, delta=0.05).threshold
    except PluresError:
        return None
    confidence, label = mean.max(1)
    given = confidence.double() >= threshold
    wrong = float((label != targets)[given].double().mean()) if bool(given.any()) else 0.0
    return {"risk": risk, "answered": float(given.double().mean()), "wrong": wrong}


def _on_demand(calibration: ClassCalibration, members: Tensor, targets: Tensor, until: float) -> dict[str, float]:
    probabilities, used = calibration.on_demand(members, until)
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


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in ("accuracy", "nll", "ece")}
