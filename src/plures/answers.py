"""The results of predict and regress: classes (also per pixel or token) or numbers, uncertainty, and guarantees."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plures.arrays import doubt
from plures.calibration import ClassCalibration, NumberCalibration
from plures.checks import number
from plures.errors import PluresError
from plures.losses import mean_and_variance

ABSTAINED = -1  # the label of a sample that the ensemble was asked not to decide


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The prediction of an ensemble for a batch of B samples, C classes and K members.

        prediction = ensemble.predict(images, abstain_below=0.8)
        prediction.label[0], prediction.confidence[0], prediction.epistemic[0]

    total = aleatoric + epistemic, in nats: total is the entropy of the mean, aleatoric the mean entropy of the members
    (noise in the data), and epistemic the disagreement of the members (what the model does not know). A temperature
    changes probabilities and confidence, but not these. For segmentation and tokens, [B, C, ...], everything that is
    [B] here is [B, ...].
    """

    probabilities: Tensor
    """[B, C]: the mean of the members' probabilities, calibrated if the ensemble is."""
    label: Tensor
    """[B]: the most probable class, or -1 if the ensemble abstains."""
    confidence: Tensor
    """[B]: the probability of the most probable class."""
    members: Tensor
    """[K, B, C]: each member's probabilities."""
    total: Tensor
    """[B]: the entropy of the mean."""
    aleatoric: Tensor
    """[B]: the mean entropy of the members."""
    epistemic: Tensor
    """[B]: total - aleatoric, the members' disagreement; never negative."""
    calibration: ClassCalibration | None = None
    """The calibration from held-out samples."""

    @property
    def abstained(self) -> Tensor:
        """[B]: whether the ensemble abstains."""
        return self.label == ABSTAINED

    def sets(self, coverage: float = 0.9, *, adaptive: bool = False) -> Tensor:
        """Return a set of classes for each sample, [B, C] of booleans, with the given coverage.

            prediction = ensemble.calibrate(held_out_images, held_out_labels).predict(images)
            prediction.sets(coverage=0.9).sum(1)  # the number of classes in each set

        Conformal prediction: the guarantee holds for every network, on average over samples from the distribution of
        the held-out samples. The default sets are the smallest on average, and may be empty. `adaptive` sets grow with
        the difficulty of the sample and always contain the most probable class.
        """
        return self._calibrated("sets").sets(self.members.mean(0), coverage, adaptive)

    def abstain(self, risk: float, *, delta: float = 0.05) -> "Prediction":
        """Abstain (label -1) often enough that at most a share `risk` of the remaining labels is wrong.

            prediction = ensemble.calibrate(held_out_images, held_out_labels).predict(images)
            careful = prediction.abstain(risk=0.01)
            careful.label[~careful.abstained]

        The guarantee holds with probability 1 - delta over the choice of the held-out samples: selection with
        guaranteed risk, by the uncalibrated confidence.
        """
        threshold = self._calibrated("abstain").selection(risk, delta).threshold
        confidence, label = self.members.mean(0).max(1)
        return replace(self, label=torch.where(confidence.double() >= threshold, label, ABSTAINED))

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        members, samples, classes = self.members.shape[:3]
        parts = [f"{samples} samples, {classes} classes, {members} members"]
        if self.label.numel():
            parts.append(f"mean confidence {self.confidence.mean():.3f}")
            parts.append(f"uncertainty {self.total.mean():.3f} nats, of which {self.epistemic.mean():.3f} epistemic")
        if abstained := int(self.abstained.sum()):
            parts.append(f"{abstained} abstained")
        if self.calibration is not None:
            parts.append("calibrated")
        return f"Prediction({'; '.join(parts)})"

    @classmethod
    def from_logits(
        cls, logits: Tensor, abstain_below: float | None = None, calibration: ClassCalibration | None = None
    ) -> "Prediction":
        """Make a prediction from the members' logits [K, B, C], which every ensemble's forward returns.

        prediction = Prediction.from_logits(ensemble(images))
        """
        if logits.dim() < 3:
            raise PluresError(f"logits have shape {tuple(logits.shape)}; expected [members, batch, classes]")
        if logits.shape[2] == 1:
            raise PluresError(
                "the network returns one number per sample, and one class always has probability 1: return two logits, "
                "or for a regression network call regress"
            )
        _refuse_nan(logits)
        members = single(logits).softmax(2)
        if bool(members.isnan().any()):
            member, sample, *_ = members.isnan().nonzero()[0].tolist()
            raise PluresError(f"member {member} returned infinite logits for sample {sample}: are the weights huge?")
        return cls.computed(members, calibration, abstain_below)

    @classmethod
    def computed(
        cls, members: Tensor, calibration: ClassCalibration | None = None, abstain_below: float | None = None
    ) -> "Prediction":
        """Compute a prediction without looking at the numbers: `predict` and exported files share these operations.

        Prediction.computed(ensemble(images).softmax(2)).label
        """
        if abstain_below is not None and not 0 <= abstain_below <= 1:
            raise PluresError(f"abstain_below={abstain_below}; use a number from 0 to 1")
        probabilities = members.mean(0) if calibration is None else calibration.probabilities(members)
        confidence, label = probabilities.max(1)
        if abstain_below is not None:
            label = torch.where(confidence < abstain_below, ABSTAINED, label)
        return cls(probabilities, label, confidence, members, *doubt(members, axis=2), calibration)

    def _calibrated(self, asked: str) -> ClassCalibration:
        if self.calibration is None:
            raise PluresError(f"{asked} needs held-out data: call ensemble.calibrate(inputs, targets) before predict")
        return self.calibration


@dataclass(frozen=True, eq=False, repr=False)
class Regression:
    """The prediction of a regression ensemble for a batch of B samples, D numbers each and K members.

        answer = forecaster.regress(x)
        answer.mean[0], answer.std[0]
        lower, upper = answer.interval(0.9)

    By the law of total variance, std ** 2 = aleatoric + epistemic: the mean of the members' variances (noise in the
    data) plus the variance of their means (what the model does not know).
    """

    mean: Tensor
    """[B, D]: the mean of the members' means."""
    std: Tensor
    """[B, D]: the standard deviation of the answer."""
    aleatoric: Tensor
    """[B, D]: the mean of the members' variances; 0 if the network gives no variance."""
    epistemic: Tensor
    """[B, D]: the variance of the members' means."""
    members: Tensor
    """[K, B, D]: each member's mean."""
    variances: Tensor | None = None
    """[K, B, D]: each member's variance, if the network gives one."""
    calibration: NumberCalibration | None = None
    """The calibration from held-out samples, already applied to `std` and its parts."""

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        members, samples, outputs = self.members.shape
        words = f"{samples} samples, {outputs} numbers, {members} members"
        if samples:
            share = float((self.epistemic.sum() / (self.std.square().sum() + 1e-30)).clamp(0, 1))
            words += f"; mean standard deviation {self.std.mean():.4g}, {share:.0%} of the variance epistemic"
        return f"Regression({words}{'; calibrated' if self.calibration else ''})"

    @classmethod
    def from_outputs(
        cls, outputs: Tensor, *, variance: bool = False, calibration: NumberCalibration | None = None
    ) -> "Regression":
        """Make a prediction from outputs of members: means [K, B, D]; with `variance` also log-variances [K, B, 2 D].

        >>> two = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])  # means 1 and 3, both with variance 1
        >>> answer = Regression.from_outputs(two, variance=True)
        >>> answer.mean.item(), answer.aleatoric.item(), answer.epistemic.item()
        (2.0, 1.0, 1.0)
        """
        if outputs.dim() not in (2, 3):
            raise PluresError(
                f"outputs have shape {tuple(outputs.shape)}; regression expects [members, batch, numbers]"
            )
        values = single(outputs)
        values = values[..., None] if values.dim() == 2 else values  # a network of one number without an axis for it
        means, variances = mean_and_variance(values, axis=2) if variance else (values, None)
        mean = means.mean(0)
        epistemic = (means - mean).square().mean(0)
        aleatoric = torch.zeros_like(epistemic) if variances is None else variances.mean(0)
        if calibration is not None:
            square = calibration.scale.to(epistemic).square()
            epistemic, aleatoric = square * epistemic, square * aleatoric
        std = (aleatoric + epistemic).sqrt()
        if not torch.compiler.is_exporting():  # a file does not look at its numbers
            _refuse_nan(outputs)
            finite = mean.isfinite() & std.isfinite()
            if not bool(finite.all()):
                sample = int(finite.logical_not().nonzero()[0, 0])
                raise PluresError(f"the members returned infinite numbers for sample {sample}: are the weights huge?")
        return cls(mean, std, aleatoric, epistemic, means, variances, calibration)

    def interval(self, coverage: float = 0.9, *, normalised: bool | None = None) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper bound, [B, D], between which each number lies with the given probability.

            lower, upper = forecaster.regress(x).interval(0.9)

        For a calibrated ensemble this is a guarantee (conformal prediction), however good or bad the network is. With
        `normalised` (the default if the network returns variances), the width is proportional to the standard
        deviation; otherwise all intervals have the same width. Without calibration, a normal distribution is assumed.
        """
        number("coverage", coverage, "a number between 0 and 1", above=0, below=1)
        if self.calibration is None:
            half = math.sqrt(2) * torch.erfinv(torch.tensor(coverage)).item() * self.std
        else:
            normalised = self.variances is not None if normalised is None else normalised
            plain = self.std / self.calibration.scale.to(self.std)
            half = self.calibration.half_width(plain, coverage, normalised)
        return self.mean - half, self.mean + half


def single(outputs: Tensor) -> Tensor:
    """Return outputs of half precision in float32; float32 and float64 stay as they are."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _refuse_nan(outputs: Tensor) -> None:
    if bool(outputs.isnan().any()):
        member, sample = outputs.isnan().nonzero()[0, :2].tolist()
        raise PluresError(f"member {member} returned NaN for sample {sample}: are inputs or weights infinite?")
