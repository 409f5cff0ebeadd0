"""Prediction of classes or numbers, calibrated or not."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.answers import Prediction, Regression
from plures.calibration import Calibration, ClassCalibration, NumberCalibration
from plures.calling import Lender, arguments, batch_of, chunks, each_batched, pairs_of, refuse_nan
from plures.errors import PluresError
from plures.losses import GaussianNLL, Loss, classes_second, is_for_classes, is_for_numbers, name_of

log = logging.getLogger("plures")
Kind = TypeVar("Kind", ClassCalibration, NumberCalibration)


class Predictor(nn.Module):
    """Add `predict`, `regress` and `calibrate` to a module that returns logits [members, batch, classes].

        prediction = ensemble.calibrate(held_out_images, held_out_labels).predict(images)

    Its networks stay in eval mode, even after `train()`: predictors only predict. Any number of threads may predict at
    the same time, while others read, copy or save the predictor: each call changes only its own copy of the network's
    structure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss: Loss = F.cross_entropy  # it says what the outputs mean
        self.calibration: Calibration | None = None
        self._lender: Lender[Any] = Lender()
        self._run_once = 0.0  # the share of the parameters in modules that run once for all members
        self.register_load_state_dict_post_hook(_forget_calibration)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Accept the same inputs as `predict`: a tensor, a tuple of positional or a dict of named arguments."""
        named = len(args) == 1 and not kwargs and isinstance(args[0], Mapping)
        outputs = super().__call__(**args[0]) if named else super().__call__(*args, **kwargs)
        return classes_second(outputs, self.loss)

    def predict(
        self,
        inputs: Any,
        *,
        batch_size: int | None = None,
        abstain_below: float | None = None,
        calibrated: bool = True,
        members: Sequence[int] | None = None,
    ) -> Prediction:
        """Predict classes with all trained members, or with some of them.

            prediction = ensemble.predict(images, abstain_below=0.8)
            prediction.label, prediction.confidence, prediction.epistemic
            ensemble.predict(images, members=[0])  # the first member only

        - `inputs`: a tensor, a tuple of positional or a dict of named arguments of the network.
        - `batch_size`: the largest number of samples in the network at once. Every tensor that is as long as the first
          one is divided with it: keep a constant, such as class weights, in a buffer of the network.
        - `abstain_below`: if the confidence is lower, the label is -1.
        - `calibrated`: if False, a calibrated ensemble does not apply its temperature.
        - `members`: predict with these members only. Their prediction is not calibrated, because a calibration is for
          all members together.
        """
        if is_for_numbers(self.loss):
            raise PluresError(f"this ensemble was trained with {name_of(self.loss)} and returns numbers: call regress")
        refuse_nan(inputs)
        with torch.no_grad():
            logits = self._logits(inputs, batch_size, None if members is None else self._places_of(members))
            found = self._calibration_of(ClassCalibration, len(logits)) if calibrated and members is None else None
            return Prediction.from_logits(logits, abstain_below, found)

    def regress(self, inputs: Any, *, batch_size: int | None = None, calibrated: bool = True) -> Regression:
        """Predict numbers with all trained members: mean, standard deviation and its two parts.

            answer = forecaster.regress(x)
            answer.mean, answer.std, answer.epistemic, answer.interval(0.9)

        With the loss `plures.GaussianNLL` the network returns means and log-variances, [batch, 2 d]; with any other
        loss it returns means, [batch, d]. A calibrated ensemble scales its standard deviations, except with
        `calibrated=False`.
        """
        if is_for_classes(self.loss):
            raise PluresError(
                f"this ensemble was trained with {name_of(self.loss)} and returns logits of classes: call predict, or "
                "give a loss for numbers, loss=plures.GaussianNLL() or torch's mse_loss"
            )
        refuse_nan(inputs)
        with torch.no_grad():
            outputs = self._logits(inputs, batch_size)
        found = self._calibration_of(NumberCalibration, len(outputs)) if calibrated else None
        return Regression.from_outputs(outputs, variance=isinstance(self.loss, GaussianNLL), calibration=found)

    def calibrate(self, inputs: Any, targets: Any = None, *, batch_size: int | None = None) -> Self:
        """Calibrate the confidence on held-out data, and return the ensemble.

            ensemble.calibrate(held_out_images, held_out_labels, batch_size=256)
            ensemble.calibrate(held_out_loader)  # batches of inputs and targets
            ensemble.calibrate(None)  # remove the calibration

        A temperature is fitted after averaging. The scores that `Prediction.sets`, `Prediction.abstain` and
        `Regression.interval` need are kept. `plures.save` stores all of this. Use data that you neither train on nor
        report results on.
        """
        self.calibration = None if inputs is None else self._fitted(_batches(inputs, targets), batch_size)
        return self

    @property
    @abstractmethod
    def trained(self) -> list[int]:
        """The members that can predict, in the order of the outputs."""

    def train(self, mode: bool = True) -> Self:
        """Set `training`, and leave the networks in eval mode."""
        super().train(False)
        self.training = mode
        return self

    def _outputs(self, batches: list[Any], chosen: Sequence[int] | None = None) -> Tensor:
        """Return the outputs for several batches, joined, of all trained members or of some (places among them)."""
        raw = [nn.Module.__call__(self, *args, **kwargs) for args, kwargs in map(arguments, batches)]
        outputs = torch.cat(raw, dim=1)
        return outputs if chosen is None else outputs[list(chosen)]

    def _places_of(self, members: Sequence[int]) -> list[int]:
        known = self.trained
        if not members or len(set(members)) < len(members) or not set(members) <= set(known):
            raise PluresError(f"members={list(members)}: use one or more of {known}, each once")
        return [known.index(member) for member in members]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._lender.clear()  # on another device or in another type they would no longer fit
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _logits(self, inputs: Any, batch_size: int | None, chosen: Sequence[int] | None = None) -> Tensor:
        torch.get_num_threads()  # only then does a new thread of Python compute with as many as set_num_threads said
        batch = batch_of(inputs)
        if batch is not None and not len(batch):
            # Few layers take a batch of nothing: a sample of zeros shows the shape of the answer.
            one = each_batched(inputs, lambda empty: empty.new_zeros(1, *empty.shape[1:]))
            return classes_second(self._outputs([one], chosen), self.loss)[:, :0]
        try:
            outputs = self._outputs(list(chunks(inputs, batch_size)), chosen)
        except RuntimeError as error:
            self._refuse_other_dtype(inputs, error)
            raise
        return classes_second(outputs, self.loss)

    def _refuse_other_dtype(self, inputs: Any, error: RuntimeError) -> None:
        """Raise an error that names both if the inputs have another precision than the ensemble."""
        args, kwargs = arguments(inputs)
        given = {one.dtype for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()}
        own = {one.dtype for one in self.parameters() if one.is_floating_point()}
        if given and own and not given & own:
            name, wanted = (", ".join(sorted(map(str, kinds))) for kinds in (given, own))
            raise PluresError(
                f"the inputs are {name}, but the ensemble is {wanted}: convert one with .to(...)"
            ) from error

    def _calibration_of(self, kind: type[Kind], members: int) -> Kind | None:
        found = self.calibration if isinstance(self.calibration, kind) else None
        if found is not None and found.members != members:
            raise PluresError(
                f"this ensemble was calibrated with {found.members} members and has {members} now: calibrate it again, "
                "or call with calibrated=False"
            )
        return found

    def _fitted(self, batches: Iterable[tuple[Any, Tensor]], size: int | None) -> Calibration:
        answers: list[Prediction | Regression] = []
        truth = []
        numbers = not is_for_classes(self.loss)
        for inputs, targets in batches:
            numbers = is_for_numbers(self.loss) or (numbers and targets.is_floating_point())
            ask: Callable[..., Prediction | Regression] = self.regress if numbers else self.predict
            answers.append(ask(inputs, batch_size=size, calibrated=False))
            truth.append(targets.detach().cpu())
            if len(answers[-1]) != len(targets):
                raise PluresError(f"{len(answers[-1])} held-out samples have {len(targets)} targets: give one for each")
        if not sum(map(len, answers)):
            raise PluresError("there are no held-out samples: calibrate on at least one, better on a few hundred")
        members = torch.cat([one.members.cpu() for one in answers], dim=1)
        if not numbers:
            return ClassCalibration.fit(members, torch.cat(truth))
        means, stds = (torch.cat([getattr(one, name).cpu() for one in answers]) for name in ("mean", "std"))
        return NumberCalibration.fit(means, stds, torch.cat(truth), len(members))


def _forget_calibration(predictor: Predictor, _incompatible: object) -> None:
    if predictor.calibration is not None:
        predictor.calibration = None
        log.warning("the calibration was of other weights than the loaded ones and is removed: call calibrate again")


def _batches(inputs: Any, targets: Any) -> Iterable[tuple[Any, Tensor]]:
    """Read held-out data: inputs with targets, or a loader of both."""
    if targets is None and (isinstance(inputs, Tensor | Mapping | str) or not isinstance(inputs, Iterable)):
        raise PluresError(f"{type(inputs).__name__} has no targets: give both, or a loader of (inputs, targets)")
    return pairs_of(inputs if targets is None else [(inputs, targets)])
