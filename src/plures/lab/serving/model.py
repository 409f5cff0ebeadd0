"""The network behind the server: loaded once, asked in batches."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plures.lab.evaluation.predict import Answer
from plures.lab.runs.open import Run


@dataclass(frozen=True)
class Row:
    """What the ensemble says of one picture, as class numbers."""

    label: int
    confidence: float
    epistemic: float
    total: float
    votes: list[int]


class Model:
    """Answer batches of prepared pictures with a finished run.

    model = Model(open_run("runs/birds"))
    model.answer_many([pixels])[0].confidence
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.info
        ensemble: Any = run.ensemble
        self.device = next((parameter.device for parameter in ensemble.parameters()), torch.device("cpu"))
        # A split ensemble chooses the engine that is the fastest here; the other methods run as they are.
        self.predictor = ensemble.engine() if hasattr(ensemble, "engine") else ensemble

    def answer_many(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Row]:
        """Answer pictures that are prepared: uint8 [size, size, channels]."""
        inputs = self.info.normalise(torch.from_numpy(np.stack(pictures))).to(self.device)
        found = self.predictor.predict(inputs)
        columns = (found.label, found.confidence, found.epistemic, found.total, found.members.argmax(-1).T)
        return [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def as_json(self, name: str, row: Row, abstain_below: float | None) -> dict[str, Any]:
        """Word an answer as `plures predict --json` does."""
        names = self.info.classes
        undecided = abstain_below is not None and row.confidence < abstain_below
        return asdict(
            Answer(
                file=name,
                label=None if undecided else names[row.label],
                confidence=row.confidence,
                epistemic=row.epistemic,
                total=row.total,
                votes=[names[vote] for vote in row.votes],
            )
        )
