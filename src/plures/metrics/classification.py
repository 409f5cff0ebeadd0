"""Metrics of classification and diversity: accuracy, NLL, Brier score, selective risk, agreement of members."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plures.metrics.arrays import TINY, Array, distributions, is_right, labelled


def accuracy(probabilities: Array, targets: Array) -> float:
    """Return the fraction of samples whose most probable class is the target.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.5

    Among equally probable classes, the first counts.
    """
    return float(is_right(*labelled("probabilities", probabilities, targets, rank=2)).double().mean())


def nll(probabilities: Array, targets: Array) -> float:
    """Return the negative log-likelihood: the mean of -log of the probability given to the target.

    >>> nll(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    0.0

    Probabilities below the smallest normal float32 (1.2e-38) count as that number, so one sample adds at most 87.3.
    """
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    given = values.gather(1, labels[:, None]).double().clamp_min(TINY)
    return float(given.reciprocal().log().mean())  # log(1 / p) rather than -log(p): a perfect score is 0.0, not -0.0


def brier(probabilities: Array, targets: Array) -> float:
    """Return the Brier score: the squared distance to the one-hot target, summed over classes, mean over samples.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5

    It is between 0 and 2.
    """
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    one = torch.ones(len(labels), 1, dtype=torch.float64)
    return float(values.double().scatter_add(1, labels[:, None], -one).square().sum(dim=1).mean())


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate of the most confident samples, for every number of them.

        curve = risk_coverage(probabilities, targets)
        plot(curve.coverage, curve.risk)

    Entry i is about the i + 1 most confident samples: their share of all samples, and their error rate.
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage(probabilities: Array, targets: Array) -> RiskCoverage:
    """Return the risk-coverage curve: the error rate if only the most confident samples are predicted.

    >>> risk_coverage(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)

    Equally confident samples each count with the mean error of their group, so the order of samples has no effect.
    """
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    wrong = (~is_right(values, labels)).double()
    _, group, count = torch.unique(values.amax(dim=1), return_inverse=True, return_counts=True)
    error = torch.bincount(group, weights=wrong) / count
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    risk = error.flip(0).repeat_interleave(count.flip(0)).cumsum(0) / answered
    return RiskCoverage(answered / len(wrong), risk)


def aurc(probabilities: Array, targets: Array) -> float:
    """Return the area under the risk-coverage curve: the error rate of the i most confident samples, averaged over i.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.25
    """
    return float(risk_coverage(probabilities, targets).risk.mean())


def member_accuracies(members: Array, targets: Array) -> list[float]:
    """Return the accuracy of each member alone.

    >>> member_accuracies(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]), torch.tensor([0]))
    [1.0, 0.0]
    """
    right = is_right(*labelled("members", members, targets, rank=3))
    return [float(one) for one in right.double().mean(dim=1)]


def agreement(members: Array, targets: Array) -> float:
    """Return the inter-rater kappa of the members' mistakes (Kuncheva and Whitaker, 2003); lower is more diverse.

    >>> agreement(torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.9, 0.1], [0.2, 0.8]]]), torch.tensor([0, 0]))
    1.0

    It is 1 when all members fail on the same samples and 0 when they fail independently. If all members are
    always right, or always wrong, it is 1; for one member it is NaN.
    """
    right = is_right(*labelled("members", members, targets, rank=3))
    size, samples = right.shape
    if size == 1:
        return math.nan
    mean = float(right.double().mean())
    if mean in (0.0, 1.0):
        return 1.0
    votes = right.sum(dim=0)
    split = float((votes * (size - votes)).sum()) / size
    return 1 - split / (samples * (size - 1) * mean * (1 - mean))


def disagreement(members: Array) -> Tensor:
    """Return, for each pair of members, the fraction of samples that they label differently.

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    tensor([[0., 1.],
            [1., 0.]], dtype=torch.float64)
    """
    labels = distributions("members", members, rank=3, dense=True).detach().cpu().argmax(dim=-1).flatten(1)
    return torch.stack([(labels != one).double().mean(dim=1) for one in labels])
