"""Checks of arrays for all metrics, and the formulas that exported programs need without a check."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plures.errors import PluresError

Array = Tensor | NDArray[Any]

# A probability of 0 would cost an infinite NLL. float32 softmax cannot distinguish anything below this from 0.
TINY = torch.finfo(torch.float32).tiny
IGNORED = -100  # the target of a place without a label, as in torch's losses
_SHAPES = {None: "[..., classes]", 1: "[samples]", 2: "[samples, classes]", 3: "[members, samples, classes]"}


def labelled(name: str, values: Array, targets: Array, rank: int) -> tuple[Tensor, Tensor]:
    """Check probabilities and their targets against each other, on the CPU.

    Dense answers, [samples, classes, ...] with targets [samples, ...], come back with every place as a sample of its
    own, but for the places whose target is -100: those have no label, as for torch's own losses.
    """
    dense = isinstance(targets, Tensor | np.ndarray) and targets.ndim > 1
    checked = distributions(name, values, rank, dense).detach().cpu()
    places = checked.dim() - rank  # axes after the classes
    labels = tensor("targets", targets, rank=None if places else 1)
    shapes = f"{name} of shape {tuple(values.shape)}"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise PluresError(f"targets must be integer class numbers, got {labels.dtype} of shape {tuple(labels.shape)}.")
    labels = labels.cpu().long()
    classes = checked.shape[-1]
    if labels.shape != checked.shape[rank - 2 : -1]:
        part = "place" if places else "sample"
        raise PluresError(f"targets of shape {tuple(labels.shape)} must have one entry for each {part} of {shapes}.")
    if places:
        labels = labels.flatten()
        labelled_places = labels != IGNORED
        if not labelled_places.any():
            raise PluresError(f"all targets are {IGNORED}, which means unlabelled: at least one label is needed.")
        checked = checked.flatten(rank - 2, -2)[..., labelled_places, :]
        labels = labels[labelled_places]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise PluresError(f"targets must lie between 0 and {classes - 1} for {shapes}, got {wrong}.")
    return checked, labels


def is_right(values: Tensor, labels: Tensor) -> Tensor:
    """Return whether the most probable class is the label; among equally probable classes, the first counts."""
    return torch.eq(values.argmax(dim=-1), labels)


def distributions(name: str, values: Array, rank: int | None, dense: bool = False) -> Tensor:
    """Check values whose rows are distributions over the classes; they come back as float32 or float64.

    The classes are the last axis. If `dense` values have further axes after it, it is moved to the end.
    """
    checked = numbers(name, values, rank, dense)
    if dense and rank:
        checked = checked.movedim(rank - 1, -1)
    given, advice = f"{name} of shape {tuple(values.shape)}", "softmax first? these look like logits."
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


def numbers(name: str, values: Array, rank: int | None, dense: bool = False) -> Tensor:
    """Return real numbers as float32 or float64, on their device; raise an error for NaN and other types."""
    checked = tensor(name, values, rank, dense)
    given = f"{name} of shape {tuple(checked.shape)}"
    if checked.is_complex():
        raise PluresError(f"{given} must contain real numbers, got {checked.dtype}.")
    if checked.dtype not in (torch.float32, torch.float64):
        checked = checked.float() if checked.is_floating_point() else checked.double()
    if checked.isnan().any():
        raise PluresError(f"{given} contains NaN: check for a model that diverged or for broken inputs.")
    return checked


def tensor(name: str, values: Array, rank: int | None, dense: bool = False) -> Tensor:
    """Return values as a tensor that is not empty and has the given rank (None: any but 0; dense: or more)."""
    if isinstance(values, np.ndarray):
        try:  # a plain copy, because torch refuses negative strides and swapped bytes and warns of read-only memory
            values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise PluresError(f"{name} must contain numbers, got a numpy array of {values.dtype}.") from error
    if not isinstance(values, Tensor):
        raise PluresError(f"{name} must be a torch tensor or a numpy array, got {type(values).__name__}.")
    shape = tuple(values.shape)
    if len(shape) < (rank or 1) or (rank and not dense and len(shape) > rank):
        raise PluresError(f"{name} must have shape {_SHAPES[rank]}, got {shape}.")
    if 0 in shape:
        raise PluresError(f"{name} of shape {shape} is empty: at least one entry on every axis is needed.")
    return values


def soften(probabilities: Tensor, temperature: float, axis: int = -1) -> Tensor:
    """Apply a temperature as `tempered` does, without a check."""
    logs = probabilities.clamp_min(TINY).log()
    return torch.softmax((logs - logs.amax(dim=axis, keepdim=True)) / temperature, dim=axis)


def entropies(values: Tensor, axis: int = -1) -> Tensor:
    """Compute entropies as `entropy` does, without a check."""
    terms: Tensor = torch.special.entr(values)
    return terms.sum(dim=axis).clamp_min(0)  # a row that sums to 1.0000001 would fall below 0


def doubt(members: Tensor, axis: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, aleatoric and epistemic as `uncertainty` does, without a check; `axis` holds the classes."""
    total = entropies(members.mean(dim=0, keepdim=True), axis)[0]
    aleatoric = entropies(members, axis).mean(dim=0)
    return total, aleatoric, (total - aleatoric).clamp_min(0)
