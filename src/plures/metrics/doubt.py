"""How unsure, and why: entropy, its two parts, and how well a score recognises the unfamiliar."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plures.metrics.arrays import Array, distributions, numbers


@dataclass(frozen=True)
class OutOfDistribution:
    """How well a score separates samples from outside the training distribution from those inside.

        ood(inside_scores, outside_scores).auroc

    `auroc` is the area under the ROC curve, `aupr` the average precision, and `fpr95` the fraction of inside samples
    that are flagged when at least 95 % of the outside samples are.
    """

    auroc: float
    aupr: float
    fpr95: float


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of each sample and its two parts, in nats.

        uncertainty(members).epistemic

    total = aleatoric + epistemic: the entropy of the mean, the mean entropy of the members, their disagreement.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def entropy(probabilities: Array) -> Tensor:
    """Return the entropy over the last axis in nats: shape [..., classes] becomes [...], and 0 log 0 = 0.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return _entropy(distributions("probabilities", probabilities, rank=None))


def uncertainty(members: Array) -> Uncertainty:
    """Split the uncertainty of each sample into noise and disagreement.

    >>> uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).epistemic
    tensor([0.6931])

    Aleatoric is what every member is unsure of; epistemic is what the members disagree about (the mutual information of
    label and member, never negative). Dense members [members, samples, classes, ...] give one number per place.
    """
    values = distributions("members", members, rank=3, dense=True)
    total, aleatoric = _entropy(values.mean(dim=0)), _entropy(values).mean(dim=0)
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp_min(0))


def ood(inside_scores: Array, outside_scores: Array) -> OutOfDistribution:
    """Measure how well a score separates samples from outside the training distribution from those inside.

    >>> ood(torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]))
    OutOfDistribution(auroc=1.0, aupr=1.0, fpr95=0.0)

    A higher score means more unusual; samples from outside are the positives. Equal scores are one threshold, as in
    scikit-learn.
    """
    inside = numbers("inside_scores", inside_scores, rank=1).detach().cpu().double()
    outside = numbers("outside_scores", outside_scores, rank=1).detach().cpu().double()
    thresholds, place = torch.unique(torch.cat([inside, outside]), return_inverse=True)
    # How many are at each threshold, and how many at or above it, from the most unusual score down.
    false_here = torch.bincount(place[: len(inside)], minlength=len(thresholds)).flip(0).double()
    true_here = torch.bincount(place[len(inside) :], minlength=len(thresholds)).flip(0).double()
    false, true = false_here.cumsum(0), true_here.cumsum(0)
    auroc = (false_here * (true - true_here / 2)).sum() / (len(inside) * len(outside))  # a tie is half a win
    aupr = (true_here * true / (true + false)).sum() / len(outside)
    fpr95 = false[true / len(outside) >= 0.95][0] / len(inside)
    return OutOfDistribution(float(auroc), float(aupr), float(fpr95))


def _entropy(values: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(values)
    return terms.sum(dim=-1).clamp_min(0)  # a row that sums to 1.0000001 would fall below 0
