"""What every engine is: members that predict faster, and are compared with the ensemble's own."""

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plures.calling import Arguments, arguments, batch_of, call, copied, logits_of, rows_of
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.prediction import Predictor

log = logging.getLogger("plures")
CLOSE = 1e-5  # what outputs may differ by, relative to their size


class MemberComparison:
    """Hold the members, as one split network, until an engine has been compared with them.

    A batch of at least two samples is compared, whole and in two parts, and one of another size: if samples influence
    each other, the parts differ from the whole.
    """

    def __init__(self, split: SplitNetwork) -> None:
        self.split = split  # a copy, which nobody trains
        self.sizes: set[int] = set()
        self.batched: set[tuple[bool, ...]] = set()
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    @property
    def finished(self) -> bool:
        """Whether enough batches were compared."""
        return len(self.sizes) > 1 and max(self.sizes) > 1

    def needs(self, inputs: Any) -> bool:
        """Return whether a batch must still be compared, because none of its size was."""
        return not self.finished and (size_of(inputs) not in self.sizes or batched(inputs) not in self.batched)

    def expected(self, inputs: Any) -> Tensor:
        """Return the logits of all members for a batch as it is given."""
        networks = (self.split.checkout(member) for member in self.split.trained)
        with torch.no_grad():
            return torch.stack([logits_of(call(network, copied(inputs))) for network in networks])


class Engine(Predictor, ABC):
    """Predict with a trained ensemble, faster than with the ensemble itself.

        engine = ensemble.engine()
        prediction = engine.predict(images)

    An engine holds the members that were trained when it was created: create another after further training.

    The outputs of its first batches are compared with those of the members. Until a batch of at least two samples and
    one of another size were compared, the engine holds the split network for this. If the outputs differ, each member
    runs as a separate network from then on, and a warning in the log says so.
    """

    kind: ClassVar[str]
    members: list[int]

    def __init__(self) -> None:
        super().__init__()
        self._comparison: MemberComparison | None = None

    @property
    def about(self) -> str:
        """What predicts, and how much of it runs once for all members: known after the first batch."""
        return f"{self.kind}, {self._run_once:.0%} of the parameters run once" if self._run_once else self.kind

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
            if self._comparison is None or not comparison.needs(batch):  # another thread was faster
                return
            reason = self._why_wrong(batch, comparison.expected(batch))  # an error of the network itself is raised
            if reason is None:
                comparison.sizes.add(size_of(batch))
                comparison.batched.add(batched(batch))
            else:
                log.warning("the %s engine runs each member as a separate network: %s", self.kind, reason)
                self._run_members_apart(comparison.split)
            if reason is not None or comparison.finished:
                self._comparison = None

    def _why_wrong(self, batch: Any, expected: Tensor) -> str | None:
        everyone = list(range(len(self.members)))
        half = -(-size_of(batch) // 2)
        halves = [rows_of(batch, slice(half)), rows_of(batch, slice(half, None))]
        try:
            with torch.no_grad():
                outputs = [self.of_members(everyone, [batch])]
                if size_of(batch) > 1:
                    outputs.append(torch.cat([self.of_members(everyone, [part]) for part in halves], dim=1))
                error = max(difference(output, expected) for output in outputs)
        except Exception as refused:  # whatever a layer raises on a batch that holds all members
            return str(refused)
        return None if error <= CLOSE else f"its outputs differ by {error:.1g}"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self._outputs([Arguments(args, kwargs)])

    def _apply(self, fn: Any, recurse: bool = True) -> "Engine":
        if self._comparison is not None:
            split = self._comparison.split
            for part in (split.network, split.partition, split.private, split.background):
                if part is not None:
                    part._apply(fn)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference relative to what was expected; equal infinities and NaN do not differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, found - expected).double().norm()
    size = torch.where(expected.isfinite(), expected, 0.0).double().norm().clamp_min(1e-30)
    error = float(apart / size)
    return error if error == error else float("inf")


def batched(inputs: Any) -> tuple[bool, ...]:
    """Return which tensors among the inputs are as long as the batch."""
    given = arguments(inputs)
    tensors = [value for value in (*given.args, *given.kwargs.values()) if isinstance(value, Tensor)]
    return tuple(tensor.dim() > 0 and len(tensor) == size_of(inputs) for tensor in tensors)


def size_of(inputs: Any) -> int:
    """Return the number of samples in a batch; 0 if it has no tensor."""
    batch = batch_of(inputs)
    return 0 if batch is None else len(batch)
