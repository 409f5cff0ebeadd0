"""Metrics of regression: error, likelihood, CRPS and intervals.

Means, standard deviations and targets are [samples] or [samples, outputs]; members have one more axis in front.
"""

import math

import torch
from torch import Tensor

from plures.errors import PluresError
from plures.metrics.arrays import Array, numbers


def rmse(mean: Array, targets: Array) -> float:
    """Return the root of the mean squared error, over all samples and outputs.

    >>> round(rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 1.0])), 4)
    2.8284
    """
    found, true = _alike(mean=mean, targets=targets)
    return float((found - true).square().mean().sqrt())


def gaussian_nll(mean: Array, std: Array, targets: Array) -> float:
    """Return the negative log-likelihood of the targets under one normal distribution each, in nats.

    >>> round(gaussian_nll(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0])), 4)
    0.9189
    """
    found, spread, true = _alike(mean=mean, std=std, targets=targets)
    return mixture_nll(found[None], spread[None], true)


def mixture_nll(means: Array, stds: Array, targets: Array) -> float:
    """Return the negative log-likelihood of the targets under the mixture of the members' normal distributions.

    >>> round(mixture_nll(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0])), 4)
    0.9189

    It is never above the mean of the members' own `gaussian_nll`.
    """
    found, spreads, true = _members(means, stds, targets)
    lowest = float(spreads.min())
    if lowest <= 0:
        raise PluresError(f"std has the entry {lowest:.4g}: a likelihood needs standard deviations above 0.")
    normal = torch.distributions.Normal(found, spreads, validate_args=False)
    density = normal.log_prob(true)  # type: ignore[no-untyped-call]
    return float(-(density.logsumexp(dim=0) - math.log(len(found))).mean())


def gaussian_crps(mean: Array, std: Array, targets: Array) -> float:
    """Return the continuous ranked probability score of one normal distribution each, in the unit of the targets.

    >>> round(gaussian_crps(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0])), 4)
    0.2337

    A standard deviation of 0 is allowed: the score is then the absolute error.
    """
    found, spread, true = _alike(mean=mean, std=std, targets=targets)
    return mixture_crps(found[None], spread[None], true)


def mixture_crps(means: Array, stds: Array, targets: Array) -> float:
    """Return the continuous ranked probability score of the mixture of the members' normal distributions.

    >>> round(mixture_crps(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0])), 4)
    0.2337

    Exact, without sampling (Grimit and others, 2006): the expected distance to the target, minus half the expected
    distance between two draws.
    """
    found, spreads, true = _members(means, stds, targets)
    to_target = _expected_distance(found - true, spreads).mean(dim=0)
    # One member against all others at a time: all pairs at once would take members times the memory.
    pairs = [
        _expected_distance(found - one, (spreads**2 + own**2).sqrt()) for one, own in zip(found, spreads, strict=True)
    ]
    between = sum(pair.mean(dim=0) for pair in pairs) / len(found)
    return float((to_target - between / 2).mean())


def interval_coverage(lower: Array, upper: Array, targets: Array) -> float:
    """Return the fraction of targets that lie in their interval, bounds included.

    >>> interval_coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.5
    """
    low, high, true = _alike(lower=lower, upper=upper, targets=targets)
    return float(((low <= true) & (true <= high)).double().mean())


def interval_width(lower: Array, upper: Array) -> float:
    """Return the mean width of the intervals, in the unit of the targets.

    >>> interval_width(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 2.0]))
    1.5
    """
    low, high = _alike(lower=lower, upper=upper)
    return float((high - low).mean())


def _expected_distance(mean: Tensor, std: Tensor) -> Tensor:
    """Return E|x| of normal x; |mean| if the standard deviation is 0."""
    ratio = mean / torch.where(std > 0, std, 1)
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    spread = 2 * std * density + mean * torch.erf(ratio / math.sqrt(2))
    return torch.where(std > 0, spread, mean.abs())


def _alike(**arrays: Array) -> list[Tensor]:
    """Check numbers of one shape, as float64 on the CPU."""
    checked = {name: numbers(name, values, rank=None).detach().cpu().double() for name, values in arrays.items()}
    (first, like), *others = checked.items()
    for name, values in others:
        if values.shape != like.shape:
            raise PluresError(
                f"{name} of shape {tuple(values.shape)} must have the shape of {first}, {tuple(like.shape)}."
            )
    if "std" in checked and float(checked["std"].min()) < 0:
        raise PluresError(f"std has the negative entry {float(checked['std'].min()):.4g}.")
    return list(checked.values())


def _members(means: Array, stds: Array, targets: Array) -> list[Tensor]:
    found = numbers("means", means, rank=None)
    true = numbers("targets", targets, rank=None).to(found.device)
    if found.shape[1:] != true.shape:
        raise PluresError(
            f"means of shape {tuple(found.shape)} must be [members, ...] of targets of shape {tuple(true.shape)}."
        )
    return _alike(means=found, std=stds, targets=true.expand_as(found))
