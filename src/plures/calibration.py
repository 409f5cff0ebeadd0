"""Calibration on held-out data: a temperature, and the scores that guarantees need.

The ensemble's file stores it, so a process that never saw the data gives the same predictions and guarantees.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from plures.arrays import TINY, labelled, numbers, soften
from plures.errors import PluresError
from plures.guarantees import Selection, adaptive_scores, quantile, select
from plures.metrics import nll, temperature, tempered


@dataclass(frozen=True, eq=False)
class ClassCalibration:
    """What held-out samples taught a classifier.

    The scores are those of the uncalibrated probabilities: guarantees are exact only if nothing about the score was
    fitted on the samples that it is compared with.
    """

    kind: ClassVar[str] = "classes"
    members: int
    """The number of members."""
    temperature: float
    """The temperature of the mean of all members."""
    nll: Tensor
    """[2]: the NLL of the held-out samples before and after."""
    probability: Tensor
    """[samples]: the probability of the true class."""
    before: Tensor
    """[samples]: the probability of all classes that are more probable than the true one."""
    rank: Tensor
    """[samples]: the place of the true class among the most probable, from 1."""
    confidence: Tensor
    """[samples]: the largest probability."""

    @classmethod
    def fit(cls, members: Tensor, targets: Tensor) -> Self:
        """Learn from the members' probabilities [members, samples, classes, ...] and targets [samples, ...]."""
        if members.dim() > 3 and targets.dim() == 1:
            raise PluresError(
                f"targets of shape {list(targets.shape)} must have one class for each place of the answers, "
                f"{[members.shape[1], *members.shape[3:]]}"
            )
        flat, labels = labelled("members", members, targets, rank=3)
        if not bool((labels != labels[0]).any()):
            which = f"all {len(labels)} held-out targets are" if len(labels) > 1 else "the only held-out target is"
            raise PluresError(f"{which} class {int(labels[0])}: calibrate on data of several classes")
        plain = flat.mean(0)
        temperature = _best(plain, labels)
        after = nll(tempered(plain, temperature), labels)
        ordered = plain.sort(dim=1, descending=True, stable=True).indices
        rank = (ordered.eq(labels[:, None]).int().argmax(dim=1) + 1).int()
        # Places of one image are not drawn independently of each other: nothing is kept of them.
        some = slice(0, 0) if members.dim() > 3 else slice(None)
        return cls(
            len(flat),
            temperature,
            torch.tensor([nll(plain, labels), after], dtype=torch.float64),
            plain.gather(1, labels[:, None]).squeeze(1)[some],
            adaptive_scores(plain).gather(1, labels[:, None]).squeeze(1)[some],
            rank[some],
            plain.amax(1)[some],
        )

    def shapes(self) -> dict[str, list[int]]:
        """Return the expected shape of each field."""
        each = {name: [len(self.probability)] for name in ("probability", "before", "rank", "confidence")}
        return {"members": [], "temperature": [], "nll": [2], **each}

    def probabilities(self, members: Tensor) -> Tensor:
        """Average and calibrate the probabilities of the members, [members, batch, classes, ...]."""
        return soften(members.mean(0), self.temperature, axis=1)

    def sets(self, probabilities: Tensor, coverage: float, adaptive: bool) -> Tensor:
        """Return the classes in each sample's set, [batch, classes] of booleans, from uncalibrated probabilities."""
        self._need_samples("sets of classes")
        if not adaptive:
            return 1 - probabilities.double() <= quantile(1 - self.probability.double(), coverage)
        return adaptive_scores(probabilities) <= quantile(self.before, coverage).to(probabilities.device)

    def selection(self, risk: float, delta: float) -> Selection:
        """Return the confidence threshold above which the error rate is at most `risk`."""
        self._need_samples("answers with a bounded risk")
        return select(self.confidence, self.rank == 1, risk, delta)

    def summary(self) -> str:
        """Return a description of one line."""
        before, after = self.nll.tolist()
        held_out = f" on {len(self.probability)} held-out samples" if len(self.probability) else ""
        return f"calibrated{held_out}: temperature {self.temperature:.3f}, NLL {before:.4f} -> {after:.4f}"

    def _need_samples(self, what: str) -> None:
        if not len(self.probability):
            raise PluresError(
                f"{what} need one prediction per sample: the pixels or tokens of one sample are not independent, so "
                "nothing can be guaranteed for them"
            )


@dataclass(frozen=True, eq=False)
class NumberCalibration:
    """What held-out samples taught a regression ensemble.

    `scale` [outputs] is what standard deviations must be multiplied by to make the held-out targets most likely; the
    intervals use the uncalibrated ones, as do the sets of a classifier.
    """

    kind: ClassVar[str] = "numbers"
    residual: Tensor
    """[samples, outputs]: the distance between mean and target."""
    std: Tensor
    """[samples, outputs]: the standard deviation that the ensemble gave."""
    scale: Tensor
    """[outputs]: the factor of standard deviations."""
    members: int
    """The number of members."""

    @classmethod
    def fit(cls, mean: Tensor, std: Tensor, targets: Tensor, members: int) -> Self:
        """Learn from means, standard deviations and targets [samples, outputs]."""
        true = numbers("targets", targets, rank=None).detach().cpu()
        true = true[:, None] if true.dim() == 1 and mean.dim() == 2 and mean.shape[1] == 1 else true
        if true.shape != mean.shape:
            raise PluresError(f"targets of shape {list(true.shape)} do not fit predictions of shape {list(mean.shape)}")
        residual = (true - mean.cpu()).abs().double()
        spread = std.cpu().double()
        ratio = (residual / torch.where(spread > 0, spread, 1)).square().mean(dim=0).sqrt()
        scale = torch.where(ratio > 0, ratio, 1) if bool((spread > 0).all()) else torch.ones_like(ratio)
        return cls(residual, spread, scale, members)

    def shapes(self) -> dict[str, list[int]]:
        """Return the expected shape of each field."""
        shape = list(self.residual.shape)
        return {"residual": shape, "std": shape, "scale": shape[1:], "members": []}

    def half_width(self, std: Tensor, coverage: float, normalised: bool) -> Tensor:
        """Return half the width of intervals around means with uncalibrated standard deviations `std`."""
        if not normalised:
            return quantile(self.residual, coverage).to(std).expand_as(std)
        if not bool((self.std > 0).all()):
            raise PluresError("some held-out standard deviations are 0: use intervals with normalised=False")
        return quantile(self.residual / self.std, coverage).to(std) * std

    def summary(self) -> str:
        """Return a description of one line."""
        factors = ", ".join(f"{factor:.3f}" for factor in self.scale.flatten().tolist()[:5])
        return f"calibrated on {len(self.residual)} held-out samples: standard deviations x {factors}"


Calibration = ClassCalibration | NumberCalibration
PREFIX = "calibration."
WHOLE = ("rank", "members")
POSITIVE = ("temperature", "scale")


def to_tensors(calibration: Calibration | None) -> dict[str, Tensor]:
    """Return the tensors that a file stores of a calibration, by name."""
    if calibration is None:
        return {}
    values = {PREFIX + field.name: getattr(calibration, field.name) for field in fields(calibration)}
    kinds = {float: torch.float64, int: torch.int64}
    return {name: torch.as_tensor(one, dtype=kinds.get(type(one))) for name, one in values.items()}


def from_tensors(kind: str | None, read: Callable[[str], Tensor]) -> Calibration | None:
    """Return the calibration that a file stores, checked, or None."""
    if kind is None:
        return None
    cls = next((one for one in (ClassCalibration, NumberCalibration) if one.kind == kind), None)
    if cls is None:
        raise PluresError(
            f"the file has a calibration of kind {kind!r}, which this version cannot read: upgrade plures"
        )
    stored = {field.name: read(PREFIX + field.name) for field in fields(cls)}
    plain: dict[str, Any] = {name: tensor if tensor.dim() else tensor.item() for name, tensor in stored.items()}
    made: Calibration = cls(**plain)
    expected = made.shapes()
    for name, tensor in stored.items():
        other_kind = tensor.is_floating_point() == (name in WHOLE) or tensor.dtype == torch.bool
        if list(tensor.shape) != expected[name] or other_kind:
            raise PluresError(
                f"the calibration in the file is damaged: its {name} have shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}; expected {expected[name]}"
            )
        lowest = max(TINY, torch.finfo(tensor.dtype).tiny) if name in POSITIVE else 0  # float32 divides by it
        if tensor.is_complex() or not bool(((tensor >= lowest) & tensor.isfinite()).all()):
            raise PluresError(f"the calibration in the file is damaged: its {name} are not finite and positive")
    return made


def _best(probabilities: Tensor, labels: Tensor) -> float:
    """Return the best temperature, or 1 if rounding would make the NLL worse.

    If all held-out labels are right, the NLL falls with the temperature without end. One more might have been wrong, so
    labels are then smoothed by the rule of succession, as in Platt (1999): a few dozen samples are no proof.
    """
    all_right = bool((probabilities.argmax(1) == labels).all())
    found = temperature(probabilities, labels, 1 / (len(labels) + 2) if all_right else 0.0)
    return found if nll(tempered(probabilities, found), labels) <= nll(probabilities, labels) else 1.0
