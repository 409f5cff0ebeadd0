"""Guarantees with a known probability: sets and intervals with a given coverage, and predictions with bounded risk.

Pure functions of scores on held-out samples. They assume only that the held-out samples have the same distribution as
future samples, and were not used for training.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from plures.arrays import Array, distributions, numbers, tensor
from plures.checks import number
from plures.errors import PluresError

ROUNDING = 1e-9  # 0.9 * 10 is 9, whatever floating point makes of it


class Selection(NamedTuple):
    """A confidence threshold, and the guarantee for the samples that reach it.

        selection = select(confidence, right, risk=0.01)
        answered = confidence >= selection.threshold

    With probability 1 - delta, the error rate of the samples that reach the threshold is at most `bound`. `answered` is
    the fraction of the held-out samples that reach it.
    """

    threshold: float
    bound: float
    answered: float


def quantile(scores: Array, coverage: float) -> Tensor:
    """Return a score that a new sample does not exceed, with probability `coverage` or more.

    >>> quantile(torch.arange(1.0, 20.0), coverage=0.9)
    tensor(18., dtype=torch.float64)

    Among n held-out scores [n] or [n, outputs] it is the k-th smallest with k = ceil((n + 1) coverage), which makes the
    guarantee exact for every n (Vovk and others, 2005); the plain quantile would be too low.
    """
    held_out = numbers("scores", scores, rank=None).double()
    number("coverage", coverage, "a number between 0 and 1", above=0, below=1)
    rank = max(1, math.ceil((len(held_out) + 1) * coverage - ROUNDING))
    if rank > len(held_out):
        raise PluresError(
            f"coverage={coverage} needs at least {held_out_for_coverage(coverage)} held-out samples, but there are "
            f"{len(held_out)}: choose a lower coverage or calibrate on more samples"
        )
    return held_out.kthvalue(rank, dim=0).values


def held_out_for_coverage(coverage: float) -> int:
    """Return the smallest number of held-out samples for a coverage.

    >>> held_out_for_coverage(0.99)
    99
    """
    return max(1, math.ceil((coverage - ROUNDING) / (1 - coverage)))


def adaptive_scores(probabilities: Array) -> Tensor:
    """Score every class by the probability of all classes before it; sets from this score grow with the difficulty.

    >>> adaptive_scores(torch.tensor([[0.25, 0.75]]))
    tensor([[0.7500, 0.0000]], dtype=torch.float64)

    The adaptive sets of Romano, Sesia and Candes (2020) without their random number: the most probable class always
    belongs to the set.
    """
    values = distributions("probabilities", probabilities, rank=2).double()
    ordered, classes = values.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    return torch.empty_like(values).scatter_(1, classes, before.clamp_min(0))


def risk_bound(errors: int, answered: int, delta: float) -> float:
    """Bound an error rate from above: the true rate exceeds the bound with probability `delta` at most.

    >>> round(risk_bound(errors=0, answered=100, delta=0.05), 4)
    0.0295

    The largest rate at which this number of errors or fewer still occurs with probability `delta` (Clopper and Pearson,
    1934).
    """
    number("delta", delta, "a number between 0 and 1", above=0, below=1)
    if errors >= answered:
        return 1.0
    counts = torch.arange(errors + 1, dtype=torch.float64)
    choose = math.lgamma(answered + 1) - torch.lgamma(counts + 1) - torch.lgamma(answered - counts + 1)
    low, high = errors / answered, 1.0
    while high - low > 1e-12 and low < (rate := (low + high) / 2) < high:
        terms = choose + counts * math.log(rate) + (answered - counts) * math.log1p(-rate)
        low, high = (rate, high) if float(terms.logsumexp(0)) > math.log(delta) else (low, rate)
    return high


def select(confidence: Array, right: Array, risk: float, delta: float = 0.05) -> Selection:
    """Return the lowest confidence threshold with an error rate of at most `risk`.

        selection = select(confidence, right, risk=0.01)

    `confidence` [samples] and `right` [samples] belong to held-out samples. The guarantee holds with probability
    1 - delta over the choice of these samples (selection with guaranteed risk; Geifman and El-Yaniv, 2017): the
    threshold is found by bisection, and every threshold that is tried uses up a share of delta.
    """
    number("risk", risk, "a number between 0 and 1", above=0, below=1)
    number("delta", delta, "a number between 0 and 1", above=0, below=1)
    sure = numbers("confidence", confidence, rank=1).detach().cpu().double()
    order = sure.argsort(descending=True, stable=True)
    wrong = (~tensor("right", right, rank=1).detach().cpu().bool())[order].cumsum(0)
    ascending = sure[order].flip(0).contiguous()
    count = len(sure)
    share = delta / _thresholds(count)
    # Fewer answers than these prove nothing, even when all are right: the search starts above them.
    low, high, best, lowest = _all_right(risk, share) - 1, count + 1, None, 1.0
    while high - low > 1:  # answering `high` samples breaks the guarantee
        middle = (low + high) // 2
        threshold = float(sure[order[middle - 1]])
        answered = count - int(torch.searchsorted(ascending, threshold))  # equally sure samples are answered, too
        bound = risk_bound(int(wrong[answered - 1]), answered, share)
        lowest = min(lowest, bound)
        if bound <= risk:
            low, best = middle, Selection(threshold, bound, answered / count)
        else:
            high = middle
    if best is not None:
        return best
    if count < (takes := held_out_for_risk(risk, delta)):
        raise PluresError(
            f"risk={risk} with delta={delta} needs at least {takes} held-out samples, but there are {count}: choose a "
            "higher risk or calibrate on more samples"
        )
    raise PluresError(
        f"risk={risk} with delta={delta} cannot be guaranteed: even the most confident of the {count} held-out samples "
        f"are wrong too often, and the lowest bound is {lowest:.3g}; choose a higher risk or calibrate on more samples"
    )


def held_out_for_risk(risk: float, delta: float = 0.05) -> int:
    """Return the smallest number of held-out samples for a risk; it suffices if all predictions are right.

    >>> held_out_for_risk(0.01)
    528
    """
    number("risk", risk, "a number between 0 and 1", above=0, below=1)
    number("delta", delta, "a number between 0 and 1", above=0, below=1)
    count = 1
    while (takes := _all_right(risk, delta / _thresholds(count))) > count:
        count = takes  # more samples mean more thresholds and a smaller share each, so no count between would do
    return count


def _all_right(risk: float, delta: float) -> int:
    """Return the number of labels, all of them right, that bound the error rate: (1 - risk) ** number <= delta."""
    # A share of the smallest delta is zero, and one over the smallest risk infinite.
    return max(1, math.ceil(min(math.log(max(delta, 5e-324)) / math.log1p(-risk), 2.0**62) - 1e-9))


def _thresholds(count: int) -> int:
    """Return the largest number of thresholds that a bisection between 0 and count + 1 tries."""
    return math.ceil(math.log2(count + 1))
