"""Predict image files with a finished run: what `plures predict` does."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from plures.answers import ABSTAINED
from plures.errors import PluresError, visible
from plures.lab.data import read_image
from plures.lab.data.pictures import EXTENSIONS, pictures_below, reading
from plures.lab.evaluation.evaluate import BATCH, device_of
from plures.lab.runs.open import Run
from plures.prediction import Predictor


@dataclass(frozen=True)
class Answer:
    """What an ensemble says of one file."""

    file: str
    label: str | None  # None: the ensemble abstains
    confidence: float
    epistemic: float  # nats that the members disagree by
    total: float  # nats of uncertainty in all
    votes: list[str]  # each member's label
    classes: list[str] | None = None  # the set that holds the true class as often as was asked for


@dataclass(frozen=True)
class Failure:
    """A file that could not be predicted, and why."""

    file: str
    error: str


def picture_files(paths: Sequence[Path]) -> Iterator[Path | Failure]:
    """Go through files, and through the pictures in folders and their subfolders by name."""
    for path in paths:
        try:
            with reading(path):
                found = pictures_below(path) if path.is_dir() else [path]
        except PluresError as error:
            yield Failure(visible(str(path)), str(error))
            continue
        if not found:
            accepted = ", ".join(sorted(EXTENSIONS))
            yield Failure(visible(str(path)), visible(f"the folder {path} contains no images ({accepted})"))
        yield from found


@dataclass(frozen=True)
class Wanted:
    """What is asked of an ensemble beyond its labels."""

    abstain_below: float | None = None  # give no label where the confidence lies below
    coverage: float | None = None  # give sets of classes that hold the true one so often
    risk: float | None = None  # give labels of which at most this share is wrong


def predict_files(
    run: Run, paths: Sequence[Path], wanted: Wanted, predictor: Predictor | None = None
) -> Iterator[Answer | Failure]:
    """Predict every picture, or say why it cannot be: one bad file does not stop the others.

        for result in predict_files(run, [Path("wren.png")], Wanted(coverage=0.9)): ...

    `predictor` is what predicts for the run's ensemble: an engine, or the ensemble itself if not given.
    """
    predictor = predictor or run.ensemble
    if run.ensemble.calibration is None and (wanted.coverage is not None or wanted.risk is not None):
        raise PluresError(
            f"the run in {run.path} is not calibrated, so it can guarantee nothing: it had no validation images, or an "
            "earlier version trained it; remove its metrics.json and repeat its plures train command"
        )
    waiting: list[tuple[Path, np.ndarray]] = []
    for path in picture_files(paths):
        if isinstance(path, Failure):
            yield path
            continue
        try:
            waiting.append((path, read_image(path, run.info)))
        except PluresError as error:
            yield Failure(visible(str(path)), str(error))
        if len(waiting) == BATCH:
            yield from _predict(run, predictor, waiting, wanted)
            waiting = []
    if waiting:
        yield from _predict(run, predictor, waiting, wanted)


def _predict(
    run: Run, predictor: Predictor, pictures: list[tuple[Path, np.ndarray]], wanted: Wanted
) -> Iterator[Answer]:
    pixels = torch.from_numpy(np.stack([pixels for _, pixels in pictures]))
    inputs = run.info.normalise(pixels).to(device_of(run.ensemble))
    prediction = predictor.predict(inputs, abstain_below=wanted.abstain_below)
    sets = None if wanted.coverage is None else prediction.sets(wanted.coverage)
    if wanted.risk is not None:
        careful = prediction.abstain(wanted.risk)
        prediction = dataclasses.replace(prediction, label=careful.label.where(~prediction.abstained, ABSTAINED))
    names = run.info.classes
    votes = prediction.members.argmax(-1)
    for row, (path, _) in enumerate(pictures):
        label = int(prediction.label[row])
        yield Answer(
            file=visible(str(path)),
            label=None if label == ABSTAINED else names[label],
            confidence=float(prediction.confidence[row]),
            epistemic=float(prediction.epistemic[row]),
            total=float(prediction.total[row]),
            votes=[names[int(vote)] for vote in votes[:, row]],
            classes=None if sets is None else [name for name, held in zip(names, sets[row], strict=True) if held],
        )
