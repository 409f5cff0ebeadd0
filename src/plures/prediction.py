"""What an ensemble says of a batch, and everything that can say it: probabilities, and how unsure they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from plures.calling import Arguments, batch_of, call, chunks, refuse_nan, rows_of
from plures.errors import PluresError
from plures.metrics import uncertainty

ABSTAINED = -1  # the label of a sample that the ensemble was asked not to decide
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        members, samples, classes = self.members.shape
        parts = [f"{samples} samples, {classes} classes, {members} members"]
        if samples:
            parts.append(f"mean confidence {self.confidence.mean():.3f}")
            parts.append(f"uncertainty {self.total.mean():.3f} nats, of which {self.epistemic.mean():.3f} epistemic")
        if abstained := int(self.abstained.sum()):
            parts.append(f"{abstained} abstained")
        return f"Prediction({'; '.join(parts)})"

    @classmethod
    def from_logits(cls, logits: Tensor, abstain_below: float | None = None) -> "Prediction":
        """Make a prediction of the members' logits [K, B, C], which every ensemble's forward returns.

        prediction = Prediction.from_logits(ensemble(images))
        """
        if logits.dim() != 3:
            raise PluresError(f"logits have shape {tuple(logits.shape)}; expected [members, batch, classes]")
        if logits.shape[-1] == 1:
            raise PluresError(
                "the network returns one number per sample, and one class always has probability 1: return two logits, "
                "or for a regression network read the members' numbers from ensemble(inputs)"
            )
        if abstain_below is not None and not 0 <= abstain_below <= 1:
            raise PluresError(f"abstain_below={abstain_below}; a confidence lies between 0 and 1")
        if bool(logits.isnan().any()):
            member, sample = logits.isnan().any(-1).nonzero()[0].tolist()
            raise PluresError(f"member {member} returned NaN for sample {sample}: are inputs or weights infinite?")
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

    Its networks stay in eval mode, whatever `train()` says: predictors only predict. Any number of threads may
    predict at the same time, and read, copy or save the predictor meanwhile: what a call changes in a network while it
    runs, it changes in a copy of the network's structure that no other call has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[tuple[object, Any]] = []  # structures that no call uses now, with what they were copied from

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what `predict` takes: a tensor, a tuple of positional or a dict of named arguments."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            return super().__call__(**args[0])
        return super().__call__(*args, **kwargs)

    def predict(self, inputs: Any, *, batch_size: int | None = None, abstain_below: float | None = None) -> Prediction:
        """Predict with all trained members.

            prediction = ensemble.predict(images, abstain_below=0.8)
            prediction.label, prediction.confidence, prediction.epistemic

        `inputs` is what the network takes: a tensor, a tuple of positional or a dict of named arguments. `batch_size`
        bounds how many samples are in the network at once. Where confidence lies below `abstain_below` the label is -1.
        """
        refuse_nan(inputs)
        with torch.no_grad():
            return Prediction.from_logits(self._logits(inputs, batch_size), abstain_below)

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis."""
        return torch.cat([call(self, batch) for batch in batches], dim=1)

    def train(self, mode: bool = True) -> Self:
        """Set `training`, and leave the networks in eval mode."""
        super().train(False)
        self.training = mode
        return self

    def structure(self) -> Any:
        """Make what `borrow` lends: a copy of the structure that a call changes while it runs."""
        raise NotImplementedError

    def borrow(self, run: Callable[[Any], Result]) -> Result:
        """Run something on a structure that no other call has meanwhile."""
        # Hooks that the user has put on the networks since, or removed, must hold for the copy, too.
        now = [(*one._forward_pre_hooks, *one._forward_hooks, one.training) for one in self.modules()]
        try:
            known, lent = self._idle.pop()
        except IndexError:  # as many threads are at work as ever were
            known, lent = None, None
        if known != now:
            lent = self.structure()
        try:
            return run(lent)
        finally:
            self._idle.append((now, lent))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what calls borrow: a copy, in memory or in another process, makes its own."""
        return {**self.__dict__, "_idle": []}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._idle.clear()  # on another device or in another type they would no longer fit
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _logits(self, inputs: Any, batch_size: int | None) -> Tensor:
        batch = batch_of(inputs)
        if batch is not None and not len(batch):
            # Few layers take a batch of nothing: a sample of zeros shows the shape of the answer.
            one = Arguments(*(_like_one(part, batch) for part in rows_of(inputs, slice(None))))
            return self.join([one])[:, :0]
        return self.join(list(chunks(inputs, batch_size)))


def _like_one(part: Any, batch: Tensor) -> Any:
    def one(value: Any) -> Any:
        empty = isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(batch)
        return value.new_zeros(1, *value.shape[1:]) if empty else value

    return {name: one(value) for name, value in part.items()} if isinstance(part, dict) else tuple(map(one, part))
