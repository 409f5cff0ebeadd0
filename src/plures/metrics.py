"""Pure functions of predictions and targets: quality, calibration and diversity.

All functions take torch tensors or numpy arrays. Metrics are summed in float64 and returned as floats; `uncertainty`
and `tempered` keep device and dtype, except that half precision becomes float32. Instead of probabilities
[samples, classes], those of segmentation or tokens, [samples, classes, ...] with targets [samples, ...], work as well.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plures.arrays import TINY, Array, distributions, doubt, is_right, labelled, numbers, soften
from plures.checks import whole_number
from plures.errors import PluresError


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


def risk_coverage(probabilities: Array, targets: Array) -> Tensor:
    """Return the risk-coverage curve: entry i is the error rate of the i + 1 most confident samples.

    >>> risk_coverage(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    tensor([0.0000, 0.5000], dtype=torch.float64)

    Equally confident samples each count with the mean error of their group, so the order of samples has no effect.
    """
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    wrong = (~is_right(values, labels)).double()
    _, group, count = torch.unique(values.amax(dim=1), return_inverse=True, return_counts=True)
    error = torch.bincount(group, weights=wrong) / count
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    risk: Tensor = error.flip(0).repeat_interleave(count.flip(0)).cumsum(0) / answered
    return risk


def aurc(probabilities: Array, targets: Array) -> float:
    """Return the area under the risk-coverage curve: the error rate of the i most confident samples, averaged over i.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.25
    """
    return float(risk_coverage(probabilities, targets).mean())


@dataclass(frozen=True, eq=False)
class CalibrationTable:
    """Confidence and accuracy of the samples, by bins of confidence.

        table = calibration_table(probabilities, targets)
        plot(table.confidence, table.accuracy)

    One entry per bin: its number of samples, their mean confidence and their accuracy.
    Empty bins have count, confidence and accuracy 0.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def calibration_table(probabilities: Array, targets: Array, bins: int = 15) -> CalibrationTable:
    """Compare confidence and accuracy in bins of equal width.

    >>> calibration_table(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]), bins=2).count
    tensor([0, 2])

    The confidence is the largest probability. A bin includes its upper edge and not its lower one.
    """
    bins = whole_number("bins", bins)
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    confidence = values.amax(dim=1).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    # Inner edges only: a rounded confidence a little above 1 falls into the last bin.
    place = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(place, minlength=bins)

    def mean_per_bin(amounts: Tensor) -> Tensor:
        return torch.bincount(place, weights=amounts, minlength=bins) / count.clamp_min(1)

    right = is_right(values, labels).double()
    return CalibrationTable(count, mean_per_bin(confidence), mean_per_bin(right))


def ece(probabilities: Array, targets: Array, bins: int = 15) -> float:
    """Return the expected calibration error: the gap between confidence and accuracy.

    >>> ece(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))
    0.25

    It is averaged over the bins of `calibration_table`, weighted by their count.
    """
    table = calibration_table(probabilities, targets, bins)
    return float((table.count * (table.accuracy - table.confidence).abs()).sum() / table.count.sum())


def temperature(probabilities: Array, targets: Array, smoothing: float = 0.0) -> float:
    """Return the temperature that minimises the NLL of `tempered(probabilities, temperature)`.

        held_out = temperature(probabilities, targets)
        calibrated = tempered(test_probabilities, held_out)

    It is between 0.01 and 100, and 1 if every temperature is equally good. With `smoothing`, this share of each label
    is spread over all classes. Fit it on held-out data, never on the data that you report results on.
    """
    values, labels = labelled("probabilities", probabilities, targets, rank=2)
    logits = values.double().clamp_min(TINY).log()
    logits -= logits.amax(dim=1, keepdim=True)
    target = torch.lerp(logits.gather(1, labels[:, None]).squeeze(1), logits.mean(1), smoothing)
    low, middle, high = -math.log(100), 0.0, math.log(100)
    # NLL is convex in 1 / temperature, so its slope changes sign once and bisection cannot miss the minimum.
    while high - low > 1e-7:
        middle = (low + high) / 2
        expected = (torch.softmax(logits / math.exp(middle), dim=1) * logits).sum(dim=1)
        slope = float((expected - target).mean())
        if slope == 0:
            break
        low, high = (middle, high) if slope > 0 else (low, middle)
    return math.exp(middle)


def tempered(probabilities: Array, temperature: float) -> Tensor:
    """Apply a temperature: softmax(log p / temperature) over the last axis.

    >>> tempered(torch.tensor([[0.9, 0.1]]), 2.0)
    tensor([[0.7500, 0.2500]])

    A temperature above 1 makes predictions less confident, one below 1 more confident. Probabilities below the smallest
    normal float32 count as that number, as in `nll`, so a temperature can also raise a probability of 0.
    """
    if not TINY <= temperature < math.inf:
        raise PluresError(f"temperature must be positive and finite, got {temperature!r}.")
    return soften(distributions("probabilities", probabilities, rank=None), temperature)


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of each sample and its two parts, in nats.

        uncertainty(members).epistemic

    total = aleatoric + epistemic: the entropy of the mean, the mean entropy of the members, their disagreement.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def uncertainty(members: Array) -> Uncertainty:
    """Split the uncertainty of each sample into noise in the data and disagreement of the members.

    >>> uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).epistemic
    tensor([0.6931])

    Aleatoric is the mean entropy of the members; epistemic is their disagreement (the mutual information between label
    and member, never negative). Members [members, samples, classes, ...] give one number per pixel or token.
    """
    return Uncertainty(*doubt(distributions("members", members, rank=3, dense=True)))


@dataclass(frozen=True)
class OutOfDistribution:
    """How well a score separates out-of-distribution samples from in-distribution samples.

        ood(inside_scores, outside_scores).auroc

    `auroc` is the area under the ROC curve, `aupr` the average precision, and `fpr95` the fraction of in-distribution
    samples that are flagged when at least 95 % of the out-of-distribution samples are.
    """

    auroc: float
    aupr: float
    fpr95: float


def ood(inside_scores: Array, outside_scores: Array) -> OutOfDistribution:
    """Measure how well a score separates out-of-distribution samples from in-distribution samples.

    >>> ood(torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]))
    OutOfDistribution(auroc=1.0, aupr=1.0, fpr95=0.0)

    A higher score means less familiar; out-of-distribution samples are the positives. Equal scores share one threshold,
    as in scikit-learn.
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
