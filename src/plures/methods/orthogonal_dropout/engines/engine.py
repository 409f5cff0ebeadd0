"""What every engine is: a way to predict with a trained split network, member by member."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plures.calling import Arguments
from plures.errors import PluresError
from plures.prediction import Prediction, Predictor


class Engine(Predictor, ABC):
    """Predict with a trained ensemble, faster or in less memory than its own forward.

        engine = ensemble.engine("lean")
        prediction = engine.predict(images)

    Whole data sets (`predict` with a `batch_size`) go through member by member, so that a member's weights stay near.
    An engine is made for the members trained at that moment: make another after further training.
    """

    members: list[int]

    @abstractmethod
    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined: members outside, batches inside."""
        return torch.stack([self.run(index, batches) for index in indices])

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis."""
        return self.of_members(list(range(len(self.members))), batches)

    def predict(
        self,
        inputs: Any,
        *,
        batch_size: int | None = None,
        abstain_below: float | None = None,
        members: Sequence[int] | None = None,
    ) -> Prediction:
        """Predict with all trained members, or with those asked for.

            engine.predict(images, members=[0, 1])

        Everything else is as in `ensemble.predict`.
        """
        if members is None:
            return super().predict(inputs, batch_size=batch_size, abstain_below=abstain_below)
        unknown = [member for member in members if member not in self.members]
        if unknown or not members or len(set(members)) < len(members):
            raise PluresError(f"members={list(members)}: use some of {self.members}, each once")
        some = _Some(self, [self.members.index(member) for member in members])
        return some.predict(inputs, batch_size=batch_size, abstain_below=abstain_below)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self.join([Arguments(args, kwargs)])


class _Some(Predictor):
    """Predict with some members of an engine."""

    def __init__(self, engine: Engine, indices: list[int]) -> None:
        super().__init__()
        self.engine, self.indices = engine, indices

    def join(self, batches: list[Any]) -> Tensor:
        return self.engine.of_members(self.indices, batches)
