"""Finetuning that also learns from the members trained before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plures.calling import call
from plures.checks import number
from plures.ensemble import Ensemble, Stage, Step, check_classes
from plures.errors import PluresError
from plures.losses import Loss, class_axis, is_for_classes, name_of


class Distilled(Stage):
    """Train a member on its targets and on what the trained members before it say.

        stage = Distilled(network, step, loss, commit, said=lambda inputs: opinion(ensemble, inputs), share=0.5)

    `said` gives probabilities, with the classes where the network has them; `share` is their part of the loss. It is a
    plain function, so that a copy of the stage, for a moving average for example, does not copy the ensemble.
    """

    def __init__(
        self,
        network: nn.Module,
        step: Step,
        loss: Loss,
        commit: Callable[[Stage], None],
        said: Callable[[Any], Tensor],
        share: float,
    ) -> None:
        super().__init__(network, step, loss, commit)
        self.said = said
        self.share = share
        self.axis = class_axis(loss)  # a training loop may wrap the loss

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        logits = self.logits(inputs)
        check_classes(self.loss, logits, targets)
        disagreement = -(self.said(inputs) * logits.log_softmax(self.axis)).sum(self.axis).mean()
        return (1 - self.share) * self.loss(logits, targets) + self.share * disagreement


def opinion(ensemble: Ensemble, inputs: Any) -> Tensor:
    """Give the mean probabilities of an ensemble's trained members, without gradients."""
    axis = class_axis(ensemble.loss)
    with torch.no_grad():
        logits: Tensor = call(ensemble, inputs)
        return logits.softmax(axis + 1 if axis >= 0 else axis).mean(0)


def check_share(distill: float | None, loss: Loss) -> float | None:
    """Refuse a share of the loss that is none, or one of a loss that is not of classes."""
    if distill is None:
        return None
    number("distill", distill, "a share of the loss between 0 and 1, or leave it out", above=0, below=1)
    if not is_for_classes(loss):
        raise PluresError(f"distill={distill} needs the probabilities of classes, but the loss is {name_of(loss)}")
    return distill
