"""Collect what the report shows about one ensemble, from its predictions for the test images."""

import base64
import io
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from plures import metrics
from plures.lab.compare.rows import Row
from plures.lab.data import DataSplit
from plures.lab.evaluation.evaluate import predictions
from plures.lab.method_names import Look
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import open_run
from plures.metrics import CalibrationTable

SHOWN = 6  # test images shown of each kind
LARGEST = 112  # pixels per side of an image in the page, as wide as it is shown


@dataclass(frozen=True)
class ShownImage:
    """A test image with the ensemble's prediction and its members' votes."""

    source: str  # a data: address
    number: int  # in the order of the test images
    truth: str
    label: str
    confidence: float
    epistemic: float  # nats
    votes: list[tuple[str, int]]  # the labels of the members, and of how many, the most frequent first


@dataclass(frozen=True, eq=False)
class Detail:
    """What the page shows of one run beyond its metrics."""

    name: str
    look: Look
    members: int
    metrics: Mapping[str, Any]  # as in metrics.json
    alone: CalibrationTable  # of the members' predictions, each alone
    alone_ece: float  # of one member, on average
    together: CalibrationTable  # of the ensemble's predictions
    added: tuple[tuple[float, float], ...]  # accuracy and NLL of the first one, two, three... members
    confidence: float  # of the predictions, on average
    chance: float  # the accuracy of always giving the most frequent class
    uncertain: tuple[ShownImage, ...]
    mistakes: tuple[ShownImage, ...]
    records: Sequence[Mapping[str, Any]]  # of the log: one per epoch

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy is within two standard errors of chance: the ensemble has learned nothing."""
        error = math.sqrt(self.chance * (1 - self.chance) / self.metrics["images"])
        return bool(self.metrics["accuracy"] <= self.chance + 2 * error)


def gather(row: Row, data_dir: Path | None, look: Look, *, trust_code: bool = False) -> Detail:
    """Predict the test images with the first run of a row, and return what the page needs."""
    run = open_run(row.runs[0].path, trust_code=trust_code)
    test = run.data(data_dir).test
    members, targets = predictions(run.ensemble, test)
    mean = members.mean(0)
    confidence, label = mean.max(-1)
    wrong = label != targets
    epistemic = metrics.uncertainty(members).epistemic
    shown = partial(_shown_image, test, members, targets)
    unsure = epistemic.argsort(descending=True, stable=True)[: SHOWN if len(members) > 1 else 0]
    sure = confidence.argsort(descending=True, stable=True)
    pooled = members.flatten(0, 1), targets.repeat(len(members))
    return Detail(
        name=row.name,
        look=look,
        members=len(members),
        metrics=row.runs[0].metrics,
        alone=metrics.calibration_table(*pooled),
        alone_ece=statistics.fmean(metrics.ece(one, targets) for one in members),
        together=metrics.calibration_table(mean, targets),
        added=tuple(
            (metrics.accuracy(first, targets), metrics.nll(first, targets))
            for first in (members[: count + 1].mean(0) for count in range(len(members)))
        ),
        confidence=float(confidence.mean()),
        chance=int(targets.bincount().max()) / len(targets),
        uncertain=tuple(map(shown, unsure.tolist())),
        mistakes=tuple(map(shown, sure[wrong[sure]][:SHOWN].tolist())),
        records=RunFolder(run.path).records(),
    )


def _shown_image(test: DataSplit, members: Tensor, targets: Tensor, number: int) -> ShownImage:
    names = test.info.classes
    answers = members[:, number]
    confidence, label = answers.mean(0).max(-1)
    return ShownImage(
        source=_data_address(test.seen(slice(number, number + 1))[0]),
        number=number,
        truth=names[int(targets[number])],
        label=names[int(label)],
        confidence=float(confidence),
        epistemic=float(metrics.uncertainty(answers[:, None]).epistemic),
        votes=Counter(names[vote] for vote in answers.argmax(-1).tolist()).most_common(),
    )


def _data_address(pixels: npt.NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
