"""The outputs of an exported file: from those of the members to the fields of a `Prediction` or a `Regression`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from plures.calibration import ClassCalibration, NumberCalibration
from plures.calling import Arguments, arguments
from plures.ensemble import Ensemble
from plures.losses import GaussianNLL, is_for_numbers, mean_and_variance
from plures.metrics.arrays import TINY


class Answer(nn.Module, ABC):
    """Turn what a file is given into a dict of tensors, named as `outputs` says.

        ClassAnswer(members, arguments(images))(images)["probabilities"]

    It takes the tensors among the arguments that `like` shows, one by one; the others are fixed. `preprocess` turns
    what the file is given into what the network takes: pixels into normalised images.
    """

    outputs: ClassVar[tuple[str, ...]]

    def __init__(self, members: nn.Module, like: Arguments, preprocess: nn.Module | None = None) -> None:
        super().__init__()
        self.members = members
        self.preprocess = preprocess
        self.like = like
        self.eval()

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return all outputs by name."""
        given = filled(self.like, tensors)
        if self.preprocess is not None:
            given = arguments(self.preprocess(*given.args, **given.kwargs))
        values = self.say(self.members(*given.args, **given.kwargs))
        return dict(zip(self.outputs, values, strict=True))

    @abstractmethod
    def say(self, given: Tensor) -> tuple[Tensor, ...]:
        """Turn what the members return into the outputs, in their order."""


class ClassAnswer(Answer):
    """Answer as `predict` does; the temperatures of a calibrated ensemble are in the answer.

    ClassAnswer(members, arguments(images), calibration=ensemble.calibration)(images)["label"]
    """

    outputs = ("probabilities", "label", "confidence", "total", "aleatoric", "epistemic", "members")

    def __init__(
        self,
        members: nn.Module,
        like: Arguments,
        preprocess: nn.Module | None = None,
        calibration: ClassCalibration | None = None,
    ) -> None:
        super().__init__(members, like, preprocess)
        self.own_temperatures: list[float] = [] if calibration is None else calibration.member_temperatures.tolist()
        self.temperature = 1.0 if calibration is None else calibration.temperature

    def say(self, given: Tensor) -> tuple[Tensor, ...]:
        """Turn the members' logits into probabilities and doubts."""
        members = given.float().softmax(2)
        mean = warmed = members.mean(0)
        if any(own != 1 for own in self.own_temperatures):
            warmed = torch.stack([_tempered(members[i], own) for i, own in enumerate(self.own_temperatures)]).mean(0)
        probabilities = warmed if self.temperature == 1 else _tempered(warmed, self.temperature)
        confidence, label = probabilities.max(1)
        total, aleatoric = _entropy(mean, 1), _entropy(members, 2).mean(0)
        epistemic = (total - aleatoric).clamp_min(0)
        return probabilities, label, confidence, total, aleatoric, epistemic, members


class NumberAnswer(Answer):
    """Answer as `regress` does; the scale of a calibrated ensemble is in the answer.

    NumberAnswer(members, arguments(x), variance=True)(x)["std"]
    """

    outputs = ("mean", "std", "aleatoric", "epistemic", "members")
    scale: Tensor

    def __init__(
        self,
        members: nn.Module,
        like: Arguments,
        preprocess: nn.Module | None = None,
        calibration: NumberCalibration | None = None,
        *,
        variance: bool = False,
    ) -> None:
        super().__init__(members, like, preprocess)
        self.variance = variance
        self.register_buffer("scale", torch.ones(1) if calibration is None else calibration.scale.float())

    def say(self, given: Tensor) -> tuple[Tensor, ...]:
        """Turn the members' outputs into means and variances."""
        outputs = (given if given.dim() == 3 else given.unsqueeze(-1)).float()
        means, variances = mean_and_variance(outputs, axis=2) if self.variance else (outputs, torch.zeros_like(outputs))
        mean = means.mean(0)
        square = self.scale.square()
        epistemic = square * (means - mean).square().mean(0)
        aleatoric = square * variances.mean(0)
        return mean, (aleatoric + epistemic).sqrt(), aleatoric, epistemic, means


def answer_of(
    ensemble: Ensemble, members: nn.Module, example_inputs: object, preprocess: nn.Module | None = None
) -> Answer:
    """Choose what a file answers by what the ensemble was trained for.

    answer_of(ensemble, members_of(ensemble), images)
    """
    like = arguments(example_inputs)
    if is_for_numbers(ensemble.loss):
        scales = ensemble.calibration if isinstance(ensemble.calibration, NumberCalibration) else None
        return NumberAnswer(members, like, preprocess, scales, variance=isinstance(ensemble.loss, GaussianNLL))
    temperatures = ensemble.calibration if isinstance(ensemble.calibration, ClassCalibration) else None
    return ClassAnswer(members, like, preprocess, temperatures)


def named_tensors(given: Arguments) -> dict[str, Tensor]:
    """Name the tensors among a network's arguments: `inputs`, `inputs_1`, ... by position, others by their own name.

    >>> list(named_tensors(arguments({"pixel_values": torch.zeros(1)})))
    ['pixel_values']
    """
    places = [f"inputs_{place}" if place else "inputs" for place in range(len(given.args))]
    named = dict(zip(places, given.args, strict=True)) | given.kwargs
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def filled(like: Arguments, values: Sequence[Tensor]) -> Arguments:
    """Put other tensors into the place of those among some arguments, in the order of `named_tensors`.

    filled(arguments(images), [pixels])
    """
    rest = iter(values)
    args = tuple(next(rest) if isinstance(value, Tensor) else value for value in like.args)
    kwargs = {name: next(rest) if isinstance(value, Tensor) else value for name, value in like.kwargs.items()}
    return Arguments(args, kwargs)


def _tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Apply a temperature as `plures.metrics.tempered` does, by operations that every runtime has."""
    return (probabilities.clamp_min(TINY).log() / temperature).softmax(1)


def _entropy(probabilities: Tensor, axis: int) -> Tensor:
    return (probabilities * -probabilities.clamp_min(TINY).log()).sum(axis).clamp_min(0)
