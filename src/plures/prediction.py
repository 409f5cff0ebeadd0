"""What an ensemble says of a batch: probabilities, and how unsure it is of them."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from plures.calling import call, chunks, refuse_nan
from plures.errors import PluresError
from plures.metrics import uncertainty

ABSTAINED = -1  # the label of a sample that the ensemble was asked not to decide


@dataclass(frozen=True, eq=False)
class Prediction:
    """Read an ensemble's answer for a batch of B samples, C classes and K members.

        prediction = ensemble.predict(images, abstain_below=0.8)
        prediction.label[0], prediction.confidence[0], prediction.epistemic[0]

    total = aleatoric + epistemic, in nats: the entropy of the mean, the mean entropy of the members (noise in the
    data), and what the members disagree about (what the network does not know).
    """

    probabilities: Tensor
    """[B, C]: the mean of the members' probabilities."""
    label: Tensor
    """[B]: the most probable class, or -1 where the ensemble abstains."""
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

    @property
    def abstained(self) -> Tensor:
        """[B]: true where the confidence was below what the caller asked for."""
        return self.label == ABSTAINED

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def from_logits(cls, logits: Tensor, abstain_below: float | None = None) -> "Prediction":
        """Make a prediction of the members' logits [K, B, C], which every ensemble's forward returns.

        prediction = Prediction.from_logits(ensemble(images))
        """
        if logits.dim() != 3:
            raise PluresError(f"logits have shape {tuple(logits.shape)}; expected [members, batch, classes]")
        if abstain_below is not None and not 0 <= abstain_below <= 1:
            raise PluresError(f"abstain_below={abstain_below}; a confidence lies between 0 and 1")
        if bool(logits.isnan().any()):
            member, sample = logits.isnan().any(-1).nonzero()[0].tolist()
            raise PluresError(f"member {member} gave NaN for sample {sample}: are inputs or weights infinite?")
        members = logits.float().softmax(-1)
        probabilities = members.mean(0)
        confidence, label = probabilities.max(-1)
        if abstain_below is not None:
            label = torch.where(confidence < abstain_below, ABSTAINED, label)
        if not len(label):  # a batch of nothing has no uncertainty
            return cls(probabilities, label, confidence, members, confidence, confidence, confidence)
        split = uncertainty(members)
        return cls(probabilities, label, confidence, members, split.total, split.aleatoric, split.epistemic)


class Predictor(nn.Module):
    """Give every module that returns logits [members, batch, classes] its `predict`.

        prediction = ensemble.predict(images)

    Its networks stay in eval mode, whatever `train()` is told: predictors only predict.
    """

    def predict(self, inputs: Any, *, batch_size: int | None = None, abstain_below: float | None = None) -> Prediction:
        """Predict with all trained members.

            prediction = ensemble.predict(images, abstain_below=0.8)
            prediction.label, prediction.confidence, prediction.epistemic

        `inputs` is what the network takes: a tensor, a tuple of positional or a dict of named arguments. `batch_size`
        bounds how many samples are in the network at once. Where confidence lies below `abstain_below` the label is -1.
        """
        refuse_nan(inputs)
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                logits = self.join(list(chunks(inputs, batch_size)))
        finally:
            self.train(training)
        return Prediction.from_logits(logits, abstain_below)

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis."""
        return torch.cat([call(self, batch) for batch in batches], dim=1)

    def train(self, mode: bool = True) -> Self:
        """Set `training`, and leave the networks in eval mode."""
        super().train(False)
        self.training = mode
        return self
