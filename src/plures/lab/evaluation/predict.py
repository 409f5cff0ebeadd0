"""Predict image files with a finished run: what `plures predict` does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from plures.answers import ABSTAINED, Prediction
from plures.errors import PluresError, visible
from plures.files import told
from plures.lab.data import read_image
from plures.lab.data.images import EXTENSIONS, images_below
from plures.lab.evaluation.evaluate import BATCH, device_of
from plures.lab.runs.open import Run
from plures.prediction import Predictor


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction of an ensemble for one image file."""

    file: str
    label: str | None  # None: the ensemble abstains
    confidence: float
    epistemic: float  # nats: the disagreement of the members
    total: float  # nats: the whole uncertainty
    votes: list[str]  # each member's label
    probabilities: dict[str, float]  # of all classes
    classes: list[str] | None = None  # the set that contains the true class with the probability `coverage`


@dataclass(frozen=True)
class Failure:
    """A file that could not be predicted, and why."""

    file: str
    error: str


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a prediction; the bounds are those that the server checks."""

    abstain_below: Annotated[float, Meta(ge=0, le=1, description="no label if the confidence is lower")] | None = None
    coverage: Annotated[float, Meta(gt=0, lt=1, description="how likely `classes` has the true class")] | None = None
    risk: Annotated[float, Meta(gt=0, lt=1, description="the largest share of labels that may be wrong")] | None = None


def predict_files(
    run: Run, paths: Sequence[Path], wanted: Wanted, predictor: Predictor
) -> Iterator[ImagePrediction | Failure]:
    """Predict every image, or yield the reason why not: one bad file does not stop the others.

    Of folders, all images in them and their subfolders are predicted, sorted by name.
    """
    check_calibrated(run, wanted)
    waiting: list[tuple[Path, np.ndarray]] = []
    files = [(path, True) for path in reversed(paths)]
    while files:
        path, given = files.pop()
        try:
            with told("read", path):
                is_folder = given and path.is_dir()
                found = images_below(path) if is_folder else []
            files += [(one, False) for one in reversed(found)]
            if not is_folder:
                waiting.append((path, read_image(path, run.info)))
            elif not found:
                raise PluresError(f"the folder {path} contains no images ({', '.join(sorted(EXTENSIONS))})")
        except PluresError as error:
            yield Failure(visible(str(path)), str(error))
        if len(waiting) == BATCH or (waiting and not files):
            names, pixels = zip(*waiting, strict=True)
            inputs = run.info.normalise(torch.from_numpy(np.stack(pixels))).to(device_of(run.ensemble))
            prediction = predictor.predict(inputs, abstain_below=wanted.abstain_below)
            yield from image_predictions(prediction, [visible(str(one)) for one in names], run.info.classes, wanted)
            waiting = []


def check_calibrated(run: Run, wanted: Wanted) -> None:
    """Raise an error if guarantees are wanted from a run that is not calibrated."""
    if run.ensemble.calibration is None and (wanted.coverage is not None or wanted.risk is not None):
        raise PluresError(
            f"the run in {run.path} is not calibrated, so coverage and risk cannot be guaranteed: it had no validation "
            "images, or an earlier version trained it; remove its metrics.json and repeat its plures train command"
        )


def image_predictions(
    prediction: Prediction, files: Sequence[str], names: Sequence[str], wanted: Wanted
) -> list[ImagePrediction]:
    """Return a prediction image by image, with class names, sets and abstentions."""
    sets = None if wanted.coverage is None else prediction.sets(wanted.coverage).tolist()
    label = prediction.label
    if wanted.risk is not None:
        label = prediction.abstain(wanted.risk).label.where(~prediction.abstained, ABSTAINED)
    votes = prediction.members.argmax(-1).T.tolist()
    columns = (prediction.confidence, prediction.epistemic, prediction.total, prediction.probabilities)
    rows = zip(files, label.tolist(), votes, *(column.tolist() for column in columns), strict=True)
    return [
        ImagePrediction(
            file=file,
            label=None if label == ABSTAINED else names[label],
            confidence=confidence,
            epistemic=epistemic,
            total=total,
            votes=[names[vote] for vote in votes],
            probabilities=dict(zip(names, probabilities, strict=True)),
            classes=None if sets is None else [name for name, held in zip(names, sets[row], strict=True) if held],
        )
        for row, (file, label, votes, confidence, epistemic, total, probabilities) in enumerate(rows)
    ]
