"""Pure functions of probabilities and targets: how good, how sure and how diverse an ensemble is.

Everything takes torch tensors or numpy arrays. Metrics are summed in float64 and come back as floats; the functions
that prediction needs (`entropy`, `uncertainty`, `tempered`) keep device and dtype, half precision becomes float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plures.errors import PluresError

Array = Tensor | NDArray[Any]

# A probability of 0 would cost an infinite NLL. float32 softmax cannot tell anything below this from 0.
_TINY = torch.finfo(torch.float32).tiny
_SHAPES = {1: "[samples]", 2: "[samples, classes]", 3: "[members, samples, classes]"}


@dataclass(frozen=True, eq=False)
class CalibrationTable:
    """Confidence and accuracy of the samples, by bins of confidence.

        table = calibration_table(probabilities, targets)
        plot(table.confidence, table.accuracy)

    One entry per bin: its edges, how many samples fell into it, their mean confidence and their accuracy.
    Empty bins have count, confidence and accuracy 0.
    """

    lower: Tensor
    upper: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


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


def accuracy(probabilities: Array, targets: Array) -> float:
    """Return the fraction of samples whose most probable class is the target.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.5

    Of equally probable classes the first counts.
    """
    return float(_right(*_labelled("probabilities", probabilities, targets, rank=2)).double().mean())


def nll(probabilities: Array, targets: Array) -> float:
    """Return the negative log-likelihood: the mean of -log of the probability given to the target.

    >>> nll(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    0.0

    Probabilities below the smallest normal float32 (1.2e-38) count as that number, so one sample costs 87.3 at most.
    """
    values, labels = _labelled("probabilities", probabilities, targets, rank=2)
    given = values.gather(1, labels[:, None]).double().clamp_min(_TINY)
    return float(given.reciprocal().log().mean())  # log(1 / p) rather than -log(p): a perfect score is 0.0, not -0.0


def brier(probabilities: Array, targets: Array) -> float:
    """Return the Brier score: the squared distance to the one-hot target, summed over classes, mean over samples.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5

    It lies between 0 and 2.
    """
    values, labels = _labelled("probabilities", probabilities, targets, rank=2)
    one = torch.ones(len(labels), 1, dtype=torch.float64)
    return float(values.double().scatter_add(1, labels[:, None], -one).square().sum(dim=1).mean())


def calibration_table(probabilities: Array, targets: Array, bins: int = 15) -> CalibrationTable:
    """Compare confidence and accuracy in bins of equal width.

    >>> calibration_table(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]), bins=2).count
    tensor([0, 2])

    The confidence is the largest probability. A bin includes its upper edge and not its lower one.
    """
    if not isinstance(bins, int | np.integer) or bins < 1:
        raise PluresError(f"bins must be a whole number of at least 1, got {bins!r}.")
    values, labels = _labelled("probabilities", probabilities, targets, rank=2)
    confidence = values.amax(dim=1).double()
    edges = torch.linspace(0, 1, int(bins) + 1, dtype=torch.float64)
    # Inner edges only: a rounded confidence a little above 1 belongs to the last bin.
    place = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(place, minlength=int(bins))

    def mean_per_bin(amounts: Tensor) -> Tensor:
        return torch.bincount(place, weights=amounts, minlength=int(bins)) / count.clamp_min(1)

    right = _right(values, labels).double()
    return CalibrationTable(edges[:-1], edges[1:], count, mean_per_bin(confidence), mean_per_bin(right))


def ece(probabilities: Array, targets: Array, bins: int = 15) -> float:
    """Return the expected calibration error: the gap between confidence and accuracy.

    >>> ece(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))
    0.25

    It is averaged over the bins of `calibration_table`, weighted by their count.
    """
    table = calibration_table(probabilities, targets, bins)
    return float((table.count * (table.accuracy - table.confidence).abs()).sum() / table.count.sum())


def aurc(probabilities: Array, targets: Array) -> float:
    """Return the area under the risk-coverage curve: the error rate of the i most confident samples, averaged over i.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.25

    Equally confident samples each count with the mean error of their group, so the order of samples has no effect.
    """
    values, labels = _labelled("probabilities", probabilities, targets, rank=2)
    wrong = (~_right(values, labels)).double()
    _, group, count = torch.unique(values.amax(dim=1), return_inverse=True, return_counts=True)
    error = torch.bincount(group, weights=wrong) / count
    risk = error.flip(0).repeat_interleave(count.flip(0)).cumsum(0) / torch.arange(1, len(wrong) + 1)
    return float(risk.mean())


def member_accuracies(members: Array, targets: Array) -> list[float]:
    """Return the accuracy of each member alone.

    >>> member_accuracies(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]), torch.tensor([0]))
    [1.0, 0.0]
    """
    right = _right(*_labelled("members", members, targets, rank=3))
    return [float(one) for one in right.double().mean(dim=1)]


def agreement(members: Array, targets: Array) -> float:
    """Return the inter-rater kappa of the members' mistakes (Kuncheva and Whitaker, 2003); lower is more diverse.

    >>> agreement(torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.9, 0.1], [0.2, 0.8]]]), torch.tensor([0, 0]))
    1.0

    It is 1 when all members fail on the same samples and 0 when they fail independently. Where all are right or all are
    wrong everywhere it is 1; for one member it is NaN.
    """
    right = _right(*_labelled("members", members, targets, rank=3))
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
    """Return for each pair of members the fraction of samples that they label differently.

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    tensor([[0., 1.],
            [1., 0.]], dtype=torch.float64)
    """
    labels = _probabilities("members", members, rank=3).detach().cpu().argmax(dim=-1)
    return torch.stack([(labels != one).double().mean(dim=1) for one in labels])


def ood(inside_scores: Array, outside_scores: Array) -> OutOfDistribution:
    """Measure how well a score separates samples from outside the training distribution from those inside.

    >>> ood(torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]))
    OutOfDistribution(auroc=1.0, aupr=1.0, fpr95=0.0)

    A higher score means more unusual; samples from outside are the positives. Equal scores are one threshold, as in
    scikit-learn.
    """
    inside = _numbers("inside_scores", inside_scores, rank=1).detach().cpu().double()
    outside = _numbers("outside_scores", outside_scores, rank=1).detach().cpu().double()
    thresholds, place = torch.unique(torch.cat([inside, outside]), return_inverse=True)
    # How many are at each threshold, and how many at or above it, from the most unusual score down.
    false_here = torch.bincount(place[: len(inside)], minlength=len(thresholds)).flip(0).double()
    true_here = torch.bincount(place[len(inside) :], minlength=len(thresholds)).flip(0).double()
    false, true = false_here.cumsum(0), true_here.cumsum(0)
    auroc = (false_here * (true - true_here / 2)).sum() / (len(inside) * len(outside))  # a tie is half a win
    aupr = (true_here * true / (true + false)).sum() / len(outside)
    fpr95 = false[true / len(outside) >= 0.95][0] / len(inside)
    return OutOfDistribution(float(auroc), float(aupr), float(fpr95))


def entropy(probabilities: Array) -> Tensor:
    """Return the entropy over the last axis in nats: shape [..., classes] becomes [...], and 0 log 0 = 0.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return _entropy(_probabilities("probabilities", probabilities, rank=None))


def uncertainty(members: Array) -> Uncertainty:
    """Split the uncertainty of each sample into noise and disagreement.

    >>> uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).epistemic
    tensor([0.6931])

    Aleatoric is what every member is unsure of; epistemic is what the members disagree about (the mutual information of
    label and member, never negative).
    """
    values = _probabilities("members", members, rank=3)
    total, aleatoric = _entropy(values.mean(dim=0)), _entropy(values).mean(dim=0)
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp_min(0))


def temperature(probabilities: Array, targets: Array) -> float:
    """Find the temperature that minimises the NLL of `tempered(probabilities, temperature)`.

        held_out = temperature(probabilities, targets)
        calibrated = tempered(test_probabilities, held_out)

    It lies between 0.01 and 100, and is 1 where every temperature is as good. Fit it on held-out data, never on the
    data that you report.
    """
    values, labels = _labelled("probabilities", probabilities, targets, rank=2)
    logits = _logits(values.double())
    target = logits.gather(1, labels[:, None]).squeeze(1)
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

    A temperature above 1 makes probabilities less sure, one below 1 more sure. Probabilities below the smallest normal
    float32 count as that number, as in `nll`, so that a temperature can mend a probability of 0.
    """
    if not _TINY <= temperature < math.inf:
        raise PluresError(f"temperature must be positive and finite, got {temperature!r}.")
    return torch.softmax(_logits(_probabilities("probabilities", probabilities, rank=None)) / temperature, dim=-1)


def _right(values: Tensor, labels: Tensor) -> Tensor:
    return torch.eq(values.argmax(dim=-1), labels)


def _entropy(values: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(values)
    return terms.sum(dim=-1).clamp_min(0)  # a row that sums to 1.0000001 would fall below 0


def _logits(values: Tensor) -> Tensor:
    logs = values.clamp_min(_TINY).log()
    return logs - logs.amax(dim=-1, keepdim=True)


def _labelled(name: str, values: Array, targets: Array, rank: int) -> tuple[Tensor, Tensor]:
    """Probabilities and their targets, checked against each other, on the CPU."""
    checked = _probabilities(name, values, rank).detach().cpu()
    labels = _tensor("targets", targets, rank=1)
    shapes = f"{name} of shape {tuple(checked.shape)}"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise PluresError(f"targets must be integer class numbers, got {labels.dtype} of shape {tuple(labels.shape)}.")
    labels = labels.cpu().long()
    samples, classes = checked.shape[-2:]
    if len(labels) != samples:
        raise PluresError(f"targets of shape {tuple(labels.shape)} must have one entry for each sample of {shapes}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise PluresError(f"targets must lie between 0 and {classes - 1} for {shapes}, got {wrong}.")
    return checked, labels


def _probabilities(name: str, values: Array, rank: int | None) -> Tensor:
    """Values whose rows are distributions over the last axis, as float32 or float64."""
    checked = _numbers(name, values, rank)
    given, advice = f"{name} of shape {tuple(checked.shape)}", "softmax first? these look like logits."
    lowest = float(checked.detach().min())
    if lowest < 0:
        raise PluresError(f"{given} has the negative entry {lowest:.4g}: {advice}")
    sums = checked.detach().sum(dim=-1).flatten()
    gaps = (sums - 1).abs()
    # Rounded to bfloat16, even a perfect row misses 1 by up to 0.002.
    tolerance = 1e-2 if isinstance(values, Tensor) and values.dtype == torch.bfloat16 else 1e-3
    if gaps.max() > tolerance:
        raise PluresError(f"{given} has a row that sums to {float(sums[gaps.argmax()]):.4g}, not 1: {advice}")
    return checked


def _numbers(name: str, values: Array, rank: int | None) -> Tensor:
    """Values as float32 or float64 without NaN, on the device where they are."""
    checked = _tensor(name, values, rank)
    given = f"{name} of shape {tuple(checked.shape)}"
    if checked.is_complex():
        raise PluresError(f"{given} must hold real numbers, got {checked.dtype}.")
    if checked.dtype not in (torch.float32, torch.float64):
        checked = checked.float() if checked.is_floating_point() else checked.double()
    if checked.isnan().any():
        raise PluresError(f"{given} contains NaN: look for a model that diverged or a broken input.")
    return checked


def _tensor(name: str, values: Array, rank: int | None) -> Tensor:
    """Values as a tensor of the rank asked for (None: any but 0) that is not empty."""
    if isinstance(values, np.ndarray):
        try:  # a plain copy, because torch refuses negative strides and swapped bytes and warns of read-only memory
            values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise PluresError(f"{name} must hold numbers, got a numpy array of {values.dtype}.") from error
    if not isinstance(values, Tensor):
        raise PluresError(f"{name} must be a torch tensor or a numpy array, got {type(values).__name__}.")
    shape = tuple(values.shape)
    if len(shape) != rank if rank else not shape:
        raise PluresError(f"{name} must have shape {_SHAPES[rank] if rank else '[..., classes]'}, got {shape}.")
    if 0 in shape:
        raise PluresError(f"{name} of shape {shape} is empty: at least one entry on every axis is needed.")
    return values
