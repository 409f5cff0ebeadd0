"""Calibration on held-out data: temperatures, and the scores that guarantees need.

The ensemble's file stores it, so a process that never saw the data gives the same predictions and guarantees.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from plures.arrays import labelled, numbers, soften
from plures.errors import PluresError
from plures.guarantees import Selection, adaptive_scores, ambiguity_scores, of_targets, quantile, select
from plures.metrics import nll, temperature, tempered

MARGINS = 101  # margins of members on demand: 0, 0.01, ..., 1


@dataclass(frozen=True, eq=False)
class ClassCalibration:
    """What held-out samples taught a classifier.

    The scores are those of the uncalibrated probabilities: guarantees are exact only if nothing about the score was
    fitted on the samples that it is compared with.
    """

    kind: ClassVar[str] = "classes"
    temperatures: Tensor
    """[members]: the temperature of the mean of the first members; the last one is the ensemble's."""
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
    kept: Tensor
    """[members - 1, margins]: of samples with this margin between the two most probable classes after 1, 2, ...
    members, the share whose label no further member changes; it rises with the margin."""

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
        temperatures = [_best(flat[: count + 1].mean(0), labels) for count in range(len(flat))]
        after = nll(tempered(plain, temperatures[-1]), labels)
        ordered = plain.sort(dim=1, descending=True, stable=True).indices
        rank = (ordered.eq(labels[:, None]).int().argmax(dim=1) + 1).int()
        # Places of one image are not drawn independently of each other: nothing is kept of them.
        some = slice(0, 0) if members.dim() > 3 else slice(None)
        return cls(
            torch.tensor(temperatures, dtype=torch.float64),
            torch.tensor([nll(plain, labels), after], dtype=torch.float64),
            plain.gather(1, labels[:, None]).squeeze(1)[some],
            of_targets(adaptive_scores(plain), labels)[some],
            rank[some],
            plain.amax(1)[some],
            _kept(flat)[:, some],
        )

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.temperatures)

    @property
    def temperature(self) -> float:
        """The temperature of the mean of all members."""
        return float(self.temperatures[-1])

    def shapes(self) -> dict[str, list[int]]:
        """Return the expected shape of each field."""
        members, samples = self.temperatures.numel(), self.probability.numel()
        each = {name: [samples] for name in ("probability", "before", "rank", "confidence")}
        kept = [max(members - 1, 0), MARGINS if samples else 0]
        return {"temperatures": [members], "nll": [2], **each, "kept": kept}

    @cached_property
    def constants(self) -> list[float]:
        """The temperatures, as an exported program holds them."""
        return self.temperatures.tolist()

    def probabilities(self, members: Tensor) -> Tensor:
        """Average and calibrate the probabilities of the first members, [members or fewer, batch, classes, ...]."""
        return soften(members.mean(0), self.constants[len(members) - 1], axis=1)

    def sets(self, probabilities: Tensor, coverage: float, adaptive: bool) -> Tensor:
        """Return the classes in each sample's set, [batch, classes] of booleans, from uncalibrated probabilities."""
        self._need_samples("sets of classes")
        if not adaptive:
            return ambiguity_scores(probabilities) <= quantile(1 - self.probability.double(), coverage)
        return adaptive_scores(probabilities) <= quantile(self.before, coverage).to(probabilities.device)

    def selection(self, risk: float, delta: float) -> Selection:
        """Return the confidence threshold above which the error rate is at most `risk`."""
        self._need_samples("answers with a bounded risk")
        return select(self.confidence, self.rank == 1, risk, delta)

    def margins(self, until: float) -> list[float]:
        """Return the margins after 1, 2, ... members with which a share `until` of the labels stays the same."""
        self._need_samples("members on demand")
        enough = (self.kept >= until).sum(dim=1)  # the shares rise, so all margins from the first one on are enough
        return [(MARGINS - int(count)) / (MARGINS - 1) for count in enough]

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
    count: Tensor
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
        usable = bool((spread > 0).all())
        scale = torch.where(ratio > 0, ratio, 1) if usable else torch.ones_like(ratio)
        return cls(residual, spread, scale, torch.tensor(members))

    @property
    def members(self) -> int:
        """The number of members."""
        return int(self.count)

    def shapes(self) -> dict[str, list[int]]:
        """Return the expected shape of each field."""
        shape = list(self.residual.shape)
        return {"residual": shape, "std": shape, "scale": shape[1:], "count": []}

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
WHOLE = ("rank", "count")
POSITIVE = ("temperatures", "scale")


def to_tensors(calibration: Calibration | None) -> dict[str, Tensor]:
    """Return the tensors that a file stores of a calibration, by name."""
    if calibration is None:
        return {}
    return {PREFIX + field.name: getattr(calibration, field.name) for field in fields(calibration)}


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
    made = cls(**stored)
    expected = made.shapes()
    for name, tensor in stored.items():
        if list(tensor.shape) != expected[name] or tensor.is_floating_point() == (name in WHOLE):
            raise PluresError(
                f"the calibration in the file is damaged: its {name} have shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}; expected {expected[name]}"
            )
        lowest = 0 if name not in POSITIVE else torch.finfo(tensor.dtype).tiny
        if tensor.is_complex() or not bool(((tensor >= lowest) & tensor.isfinite()).all()):
            raise PluresError(f"the calibration in the file is damaged: its {name} are not finite and positive")
    return made


def _best(probabilities: Tensor, labels: Tensor) -> float:
    """Return the best temperature, or 1 if rounding would make the NLL worse.

    If all held-out labels are right, the NLL falls with the temperature without end. One more might have been wrong, so
    labels are then smoothed by the rule of succession, as in Platt (1999): nobody is sure after a few dozen samples.
    """
    all_right = bool((probabilities.argmax(1) == labels).all())
    found = temperature(probabilities, labels, 1 / (len(labels) + 2) if all_right else 0.0)
    return found if nll(tempered(probabilities, found), labels) <= nll(probabilities, labels) else 1.0


def _kept(members: Tensor) -> Tensor:
    """Return the share of labels that stay the same, for each number of members and each margin."""
    final = members.mean(0).argmax(dim=1)
    rows = []
    for count in range(1, len(members)):
        mean = members[:count].mean(0)
        first, second = mean.topk(2, dim=1).values.unbind(1)
        stays = mean.argmax(dim=1) == final
        step = ((first - second) * (MARGINS - 1)).floor().long().clamp(0, MARGINS - 1)
        total = torch.bincount(step, minlength=MARGINS)
        pooled = _rising(torch.bincount(step[stays], minlength=MARGINS).tolist(), total.tolist())
        # One more sample might have changed its label, so few samples prove little; a larger margin is no worse.
        careful = [share * all_ / (all_ + 1) for share, all_ in pooled]
        rows.append(list(itertools.accumulate(careful, max)))
    return torch.tensor(rows) if rows else torch.zeros(0, MARGINS)


def _rising(same: list[int], total: list[int]) -> list[tuple[float, int]]:
    """Estimate a share that rises from bin to bin, with its number of samples, by isotonic regression."""
    pools: list[list[int]] = []  # same, total, bins
    for kept, all_ in zip(same, total, strict=True):
        pools.append([kept, all_, 1])
        # Bins that fall are pooled; an empty bin joins the one below it.
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] >= pools[-1][0] * pools[-2][1]:
            last = pools.pop()
            pools[-1] = [mine + its for mine, its in zip(pools[-1], last, strict=True)]
    return [(kept / all_ if all_ else 0.0, all_) for kept, all_, bins in pools for _ in range(bins)]
