"""What every engine is: members that predict faster, and are compared with the ensemble's own."""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plures.calling import Arguments
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.engines.comparing import CLOSE, MemberComparison
from plures.methods.orthogonal_dropout.partition import SplitNetwork
from plures.prediction import Predictor

log = logging.getLogger("plures")


class Engine(Predictor, ABC):
    """Predict with a trained ensemble, faster than with the ensemble itself.

        engine = ensemble.engine()
        prediction = engine.predict(images)

    An engine holds the members that were trained when it was created: create another after further training.

    The outputs of its first batches are compared with those of the members. Until a batch of at least two samples and
    one of another size were compared, the engine holds the split network for this. If the outputs differ, each member
    runs as a separate network from then on, and a warning in the log says so.
    """

    _apart = True
    kind: ClassVar[str]
    members: list[int]

    def __init__(self) -> None:
        super().__init__()
        self._comparison: MemberComparison | None = None

    @property
    def about(self) -> str:
        """What predicts, in a word or two."""
        return self.kind

    @property
    def trained(self) -> list[int]:
        """The members that predict, in the order of the outputs."""
        return self.members

    @abstractmethod
    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined."""

    @abstractmethod
    def _run_members_apart(self, split: SplitNetwork) -> None:
        """Run each member as a separate network from now on."""

    def _outputs(self, batches: list[Any], chosen: Sequence[int] | None = None) -> Tensor:
        if self._comparison is not None:
            if torch.compiler.is_exporting():
                raise PluresError("predict two batches of different sizes before exporting: engines are compared first")
            # torch.compiler.disable imports the compiler, which takes a second: only if somebody has imported it.
            compare = self._compare
            if "torch._dynamo" in sys.modules:
                compare = torch.compiler.disable(compare)  # type: ignore[no-untyped-call]
            for batch in batches:
                compare(batch)
        return self.of_members(list(range(len(self.members)) if chosen is None else chosen), batches)

    def _compare(self, batch: Any) -> None:
        """Compare a batch with the members, if none of its size was; let these go when enough was compared."""
        comparison = self._comparison
        if comparison is None or not comparison.needs(batch):
            return
        with comparison.lock:
            if not comparison.needs(batch):  # another thread was faster
                return
            some = comparison.some(batch)
            expected = comparison.expected(some)  # an error of the network itself is raised
            reason = self._why_wrong(comparison, some, expected)
            if reason is None:
                comparison.passed(batch)
            else:
                log.warning("the %s engine runs each member as a separate network: %s", self.kind, reason)
                self._run_members_apart(comparison.split)
                comparison.finished = True
            if comparison.finished:
                self._comparison = None

    def _why_wrong(self, comparison: MemberComparison, inputs: Any, expected: Tensor) -> str | None:
        everyone = list(range(len(self.members)))
        try:
            with torch.no_grad():
                error = comparison.error(inputs, expected, lambda some: self.of_members(everyone, [some]))
        except Exception as refused:  # whatever a layer raises on a batch that holds all members
            return str(refused)
        return None if error <= CLOSE else f"its outputs differ by {error:.1g}"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self._outputs([Arguments(args, kwargs)])

    def _apply(self, fn: Any, recurse: bool = True) -> "Engine":
        if self._comparison is not None:
            self._comparison.apply(fn)
        return super()._apply(fn, recurse)
