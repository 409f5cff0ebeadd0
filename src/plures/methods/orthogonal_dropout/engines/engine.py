"""What every engine is: a way to predict with a trained split network, member by member."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from plures.calling import Arguments
from plures.prediction import Predictor


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

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis: members outside, batches inside."""
        return torch.stack([self.run(index, batches) for index in range(len(self.members))])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self.join([Arguments(args, kwargs)])
