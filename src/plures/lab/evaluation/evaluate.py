"""Measure an ensemble on a data set: quality, calibration and diversity, also under shift and on other data."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plures import metrics
from plures.calibration import ClassCalibration
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import Data, DataSplit
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES, Corruption
from plures.methods.orthogonal_dropout.engines.engine import Engine
from plures.prediction import Predictor

BATCH = 256  # images in the network at once
BLOCK_BYTES = 1 << 28  # bytes of images that every member sees before the next one is made ready
SHIFT_IMAGES = 1000  # test images that are corrupted: 55 passes over all of them would take hours
OTHER_IMAGES = 10_000  # images of other data: more would hardly change an AUROC
ENGINE_MEMORY = 1 << 30  # bytes of weights that an engine may unfold

Spoil = Callable[[Tensor, int], Tensor]


def evaluate(
    ensemble: Ensemble, data: Data, predictor: Predictor, tested: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """Return the metrics of the test images; an ensemble that is not calibrated is calibrated on the validation images.

    The values are JSON: what cannot be computed (the agreement of one member, a temperature without validation
    images) is None. `predictor` predicts for the ensemble: the `fastest`. `tested` are the `predictions` of the test
    images, if they were made before.
    """
    if ensemble.calibration is None and len(set(data.validation.labels.tolist())) > 1:
        ensemble.calibration = ClassCalibration.fit(*predictions(ensemble, data.validation, predictor=predictor))
    members, targets = tested or predictions(ensemble, data.test, predictor=predictor)
    found = scores(members, targets) | {"engine": engine_of(predictor)}
    learned = ensemble.calibration
    if not isinstance(learned, ClassCalibration):
        return found | dict.fromkeys(("temperature", "calibrated_nll", "calibrated_ece"))
    calibrated = learned.probabilities(members)
    return found | {
        "temperature": learned.temperature,
        "calibrated_nll": metrics.nll(calibrated, targets),
        "calibrated_ece": metrics.ece(calibrated, targets),
    }


def scores(members: Tensor, targets: Tensor) -> dict[str, Any]:
    """Compute every metric of members' probabilities [members, samples, classes]."""
    probabilities = members.mean(0)
    accuracies = metrics.member_accuracies(members, targets)
    agreement = metrics.agreement(members, targets)
    return {
        "images": len(targets),
        "members": len(members),
        "accuracy": metrics.accuracy(probabilities, targets),
        "nll": metrics.nll(probabilities, targets),
        "brier": metrics.brier(probabilities, targets),
        "ece": metrics.ece(probabilities, targets),
        "aurc": metrics.aurc(probabilities, targets),
        "member_accuracies": accuracies,
        "mean_member_accuracy": sum(accuracies) / len(accuracies),
        "agreement": None if math.isnan(agreement) else agreement,  # JSON has no NaN
    }


def evaluate_shift(
    ensemble: Ensemble, data: Data, predictor: Predictor, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure on at most SHIFT_IMAGES test images, evenly over the split, under each corruption at each severity.

    `tell` is called with a line as each kind of corruption begins.
    """
    test = evenly(data.test, SHIFT_IMAGES)
    rows: list[dict[str, Any]] = []
    for place, kind in enumerate(KINDS, 1):
        tell(f"under shift, {place} of {len(KINDS)}: {kind} on {len(test):,} images")
        for severity in SEVERITIES:
            found = scores(*predictions(ensemble, test, spoil=Corruption(kind, severity), predictor=predictor))
            figures = {name: found[name] for name in ("images", "accuracy", "nll", "ece")}
            rows.append({"corruption": kind, "severity": severity} | figures)
    return rows


def evenly(split: DataSplit, most: int) -> DataSplit:
    """Return at most `most` rows of a split, evenly spaced, so that every class keeps its share."""
    if len(split) <= most:
        return split
    places = np.linspace(0, len(split) - 1, most).round().astype(int)
    return dataclasses.replace(split, rows=split.rows[places], labels=split.labels[places])


# How unusual a sample is, by its members' probabilities [members, samples, classes].
UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "1 - max p": lambda members: 1 - members.mean(0).amax(-1),
    "entropy": lambda members: metrics.uncertainty(members).total,
    "mutual information": lambda members: metrics.uncertainty(members).epistemic,
}


def told_apart(inside: Tensor, outside: Tensor) -> list[dict[str, Any]]:
    """Measure how well each score tells other samples, [members, samples, classes], from the data's own.

    Mutual information is left out for a single member, because it is the disagreement of several.
    """
    return [
        {"score": name} | dataclasses.asdict(metrics.ood(score(inside), score(outside)))
        for name, score in UNUSUAL.items()
        if len(inside) > 1 or name != "mutual information"
    ]


def predictions(
    ensemble: Ensemble, split: DataSplit, spoil: Spoil | None = None, *, predictor: Predictor | None = None
) -> tuple[Tensor, Tensor]:
    """Predict a whole split: probabilities [members, samples, classes] and labels [samples], on the CPU.

    `predictor` is what predicts for the ensemble; if not given, the fastest.
    """
    if not len(split):
        raise PluresError(f"{split.info.name} has no {split.name} images to evaluate on: give data with a test split")
    predictor, device = predictor or fastest(ensemble), device_of(ensemble)
    members = [predictor.predict(inputs.to(device), batch_size=BATCH).members.cpu() for inputs in _inputs(split, spoil)]
    return torch.cat(members, dim=1), torch.from_numpy(split.labels)


def fastest(ensemble: Ensemble) -> Predictor:
    """Return what predicts the same as an ensemble in the least time: an engine, if the method has them.

    The unfolded engine gives its bits, the owned one agrees to about 1e-5: `engine_of` names it.
    """
    return ensemble.engine(memory=ENGINE_MEMORY, fold=False)


def engine_of(predictor: Predictor) -> str | None:
    """Return the name of an engine, or None if the ensemble itself predicts."""
    return predictor.about if isinstance(predictor, Engine) else None


def device_of(ensemble: Ensemble) -> torch.device:
    """Return the device of an ensemble's weights."""
    return next((parameter.device for parameter in ensemble.parameters()), torch.device("cpu"))


def _inputs(split: DataSplit, spoil: Spoil | None) -> Iterator[Tensor]:
    """Yield what the network takes, block by block: the middle of the cached images, corrupted or not."""
    info = split.info
    block = max(BATCH, BLOCK_BYTES // (4 * info.channels * info.size**2))
    for start in range(0, len(split), block):
        pixels = torch.from_numpy(split.seen(slice(start, start + block)))
        yield info.normalise(pixels if spoil is None else spoil(pixels, start))
