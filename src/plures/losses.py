"""Losses, which define what outputs mean: the class axis, or which numbers are means and variances."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.errors import PluresError

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Train a classifier whose class axis is not the second.

        ensemble = plures.DeepEnsemble(tagger, loss=plures.CrossEntropy(class_axis=-1))  # [batch, tokens, classes]
        for stage in ensemble.stages():
            stage(tokens, tags).backward()
        ensemble(tokens)  # [members, batch, classes, tokens]

    The ensemble itself returns the classes after the batch, as torch's losses expect them. Targets of -100 are ignored.
    """

    class_axis: int = 1
    """The axis of the network's output that holds the classes."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits [batch, ...] with the classes on `class_axis`."""
        return F.cross_entropy(logits.movedim(self.class_axis, 1), targets)


@dataclass(frozen=True)
class GaussianNLL:
    """Train a regression network that returns means and log-variances, [batch, 2 d], on targets [batch, d].

        forecaster = plures.DeepEnsemble(regressor, loss=plures.GaussianNLL())
        for stage in forecaster.stages():
            stage(x, y).backward()
        forecaster.regress(x).std

    The first half of the outputs are the means, the second half the logarithms of the variances. The loss is torch's
    GaussianNLLLoss.
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, without its constant term."""
        mean, variance = mean_and_variance(outputs)
        if targets.dim() == 1 and mean.shape[1] == 1:
            targets = targets[:, None]
        if targets.shape != mean.shape:
            raise PluresError(
                f"the network returned {list(outputs.shape)}, means and log-variances of {list(mean.shape)} numbers, "
                f"for targets of shape {list(targets.shape)}: give targets of the means' shape"
            )
        return F.gaussian_nll_loss(mean, targets, variance)


def mean_and_variance(outputs: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    """Split what a network returns into means and variances."""
    if outputs.dim() <= axis or outputs.shape[axis] % 2:
        raise PluresError(
            f"the network returned {list(outputs.shape)}; means and log-variances need [batch, 2 d], an even number"
        )
    mean, log_variance = outputs.chunk(2, dim=axis)
    return mean, log_variance.exp()


NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss")
NUMBER_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.GaussianNLLLoss, nn.PoissonNLLLoss)


def is_for_numbers(loss: Loss) -> bool:
    """Return whether a loss is known to train regression."""
    return isinstance(loss, (GaussianNLL, *NUMBER_LOSSES)) or any(loss is getattr(F, name) for name in NUMBERS)


def is_for_classes(loss: Loss) -> bool:
    """Return whether a loss is known to train classification."""
    return loss is F.cross_entropy or isinstance(loss, CrossEntropy | nn.CrossEntropyLoss)


def averages_rows(loss: Loss) -> bool:
    """Return whether a loss is known to be a mean over all rows, so that those of several members are one call."""
    return loss is F.cross_entropy or loss is F.mse_loss or isinstance(loss, CrossEntropy | GaussianNLL)


def class_axis(loss: Loss) -> int:
    """Return the axis of a network's output that holds the classes."""
    return loss.class_axis if isinstance(loss, CrossEntropy) else 1


def as_json(loss: Loss) -> dict[str, Any] | None:
    """Return the description of a loss in a file, or None for a custom loss."""
    if isinstance(loss, CrossEntropy):
        return {"name": "CrossEntropy", "class_axis": loss.class_axis}
    if isinstance(loss, GaussianNLL):
        return {"name": "GaussianNLL"}
    if loss is F.mse_loss or (type(loss) is nn.MSELoss and loss.reduction == "mean"):
        return {"name": "mse_loss"}
    return None


def from_json(description: dict[str, Any] | None) -> Loss | None:
    """Return the loss that a file describes, or None."""
    match description:
        case {"name": "CrossEntropy", "class_axis": int(axis)}:
            return CrossEntropy(axis)
        case {"name": "GaussianNLL"}:
            return GaussianNLL()
        case {"name": "mse_loss"}:
            return F.mse_loss
    return None


def name_of(loss: Loss) -> str:
    """Return the name of a loss for an error message."""
    return getattr(loss, "__name__", type(loss).__name__)


def classes_second(outputs: Tensor, loss: Loss) -> Tensor:
    """Move the classes of [members, batch, ...] to the axis after the batch, as every ensemble returns them."""
    axis = class_axis(loss)
    return outputs if axis == 1 else torch.movedim(outputs, axis + 1 if axis >= 0 else axis, 2)


def loss_of_all(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the mean probability of members; for other losses than of classes, the mean of theirs."""
    if is_for_classes(loss) and not targets.is_floating_point():
        each = classes_second(outputs, loss).float().log_softmax(2)
        return F.nll_loss(each.logsumexp(0) - math.log(len(each)), targets)
    return torch.stack([loss(one, targets) for one in outputs]).mean()
