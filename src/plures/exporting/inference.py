"""What an exported file computes, as one module: preprocessing, members, prediction."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from plures.answers import Prediction, Regression, single
from plures.calibration import ClassCalibration, NumberCalibration
from plures.calling import Arguments, arguments
from plures.ensemble import Ensemble
from plures.exporting.members import members_of
from plures.losses import GaussianNLL, is_for_numbers

CLASS_OUTPUTS = ("probabilities", "label", "confidence", "total", "aleatoric", "epistemic", "members")
NUMBER_OUTPUTS = ("mean", "std", "aleatoric", "epistemic", "members")


class Inference(nn.Module):
    """Compute the fields of a `Prediction` or a `Regression`, by name, with the operations of `predict` and `regress`.

        Inference(ensemble, images)(images)["probabilities"]

    It takes the tensors among `example_inputs` one by one; other arguments keep their value. The ensemble's calibration
    is part of it. `preprocess` turns the inputs of the file into those of the network: pixels into normalised images.
    """

    def __init__(self, ensemble: Ensemble, example_inputs: object, preprocess: nn.Module | None = None) -> None:
        super().__init__()
        self.members = members_of(ensemble)
        self.preprocess = None if preprocess is None else copy.deepcopy(preprocess).eval()
        self.like = arguments(example_inputs)
        self.calibration = ensemble.calibration
        self.numbers = is_for_numbers(ensemble.loss) or isinstance(self.calibration, NumberCalibration)
        self.variance = isinstance(ensemble.loss, GaussianNLL)
        self.outputs = NUMBER_OUTPUTS if self.numbers else CLASS_OUTPUTS
        if isinstance(self.calibration, ClassCalibration):
            assert self.calibration.constants  # read before tracing, which cannot read numbers out of tensors

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return all outputs by name."""
        args, kwargs = self.prepared(filled(self.like, tensors))
        found = self.finished(self.members(*args, **kwargs))
        return {name: getattr(found, name) for name in self.outputs}

    def live(self, ensemble: Ensemble, given: Arguments) -> dict[str, Tensor]:
        """Return what the ensemble itself predicts for arguments of the file, by name."""
        inputs = self.prepared(given)
        found = ensemble.regress(inputs) if self.numbers else ensemble.predict(inputs)
        return {name: getattr(found, name) for name in self.outputs}

    def prepared(self, given: Arguments) -> Arguments:
        """Return the arguments of the network for those of the file."""
        return given if self.preprocess is None else arguments(self.preprocess(*given.args, **given.kwargs))

    def finished(self, outputs: Tensor) -> Prediction | Regression:
        """Return the prediction that the outputs of all members make."""
        if self.numbers:
            scales = self.calibration if isinstance(self.calibration, NumberCalibration) else None
            return Regression.computed(outputs, variance=self.variance, calibration=scales)
        temperatures = self.calibration if isinstance(self.calibration, ClassCalibration) else None
        return Prediction.computed(single(outputs).softmax(2), temperatures)


def named_tensors(given: Arguments) -> dict[str, Tensor]:
    """Return the tensors among arguments by name: `inputs`, `inputs_1`, ... by position, others by their own name.

    >>> list(named_tensors(arguments({"pixel_values": torch.zeros(1)})))
    ['pixel_values']
    """
    places = [f"inputs_{place}" if place else "inputs" for place in range(len(given.args))]
    named = dict(zip(places, given.args, strict=True)) | given.kwargs
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def filled(like: Arguments, values: Sequence[Tensor]) -> Arguments:
    """Replace the tensors among some arguments by others, in the order of `named_tensors`.

    filled(arguments(images), [pixels])
    """
    rest = iter(values)
    args = tuple(next(rest) if isinstance(value, Tensor) else value for value in like.args)
    kwargs = {name: next(rest) if isinstance(value, Tensor) else value for name, value in like.kwargs.items()}
    return Arguments(args, kwargs)
