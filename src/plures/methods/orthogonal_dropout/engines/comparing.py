"""Compare the first answers of an engine with those of the members."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plures.calling import arguments, batch_of, call, copied, logits_of, rows_of
from plures.methods.orthogonal_dropout.partition import SplitNetwork

CLOSE = 1e-5  # what answers may differ by, relative to their size
MOST_SAMPLES = 64  # of a batch that are compared


class MemberComparison:
    """Hold the members, as one split network, until an engine has been compared with them.

        comparison = MemberComparison(split)  # a split of its own, which nobody trains
        some = comparison.some(batch)
        error = comparison.error(some, comparison.expected(some), run)

    A batch of at least two samples is compared, whole and in parts, and one of another size: if samples influence each
    other, the parts differ from the whole.
    """

    def __init__(self, split: SplitNetwork) -> None:
        self.split = split
        self.sizes: set[int] = set()
        self.batched: set[tuple[bool, ...]] = set()
        self.finished = False
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    def needs(self, inputs: Any) -> bool:
        """Return whether a batch must still be compared, because none of its size was."""
        return not self.finished and (_size(inputs) not in self.sizes or batched(inputs) not in self.batched)

    def some(self, inputs: Any) -> Any:
        """Return the samples of a batch that are compared: all of them, unless there are many."""
        return rows_of(inputs, slice(MOST_SAMPLES)) if _size(inputs) > MOST_SAMPLES else inputs

    def expected(self, inputs: Any) -> Tensor:
        """Return the logits of all members for a batch as it is given."""
        networks = (self.split.checkout(member) for member in self.split.trained)
        with torch.no_grad():
            return torch.stack([logits_of(call(network, copied(inputs))) for network in networks])

    def error(self, inputs: Any, expected: Tensor, run: Callable[[Any], Tensor]) -> float:
        """Return how much the outputs of an engine differ from what is expected, relative to its size.

        `run` takes inputs and returns the logits of all members, [members, batch, ...].
        """
        half = -(-_size(inputs) // 2)
        answers = [run(inputs)]
        if _size(inputs) > 1:
            answers.append(torch.cat([run(rows_of(inputs, rows)) for rows in (slice(half), slice(half, None))], dim=1))
        return max(difference(answer, expected) for answer in answers)

    def passed(self, inputs: Any) -> None:
        """Take down that a batch was right."""
        self.sizes.add(_size(inputs))
        self.batched.add(batched(inputs))
        self.finished = len(self.sizes) > 1 and max(self.sizes) > 1

    def apply(self, fn: Any) -> None:
        """Convert or move the members as the engine is."""
        for part in (self.split.network, self.split.partition, self.split.private):
            part._apply(fn)  # type: ignore[no-untyped-call]


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference relative to what was expected; equal infinities and NaN do not differ.

    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, found - expected).double().norm()
    size = torch.where(expected.isfinite(), expected, 0.0).double().norm().clamp_min(1e-30)
    error = float(apart / size)
    return error if error == error else float("inf")


def batched(inputs: Any) -> tuple[bool, ...]:
    """Return which tensors among the inputs are as long as the batch.

    >>> batched((torch.zeros(4, 2), torch.zeros(3, 3)))
    (True, False)
    """
    given = arguments(inputs)
    tensors = [value for value in (*given.args, *given.kwargs.values()) if isinstance(value, Tensor)]
    return tuple(tensor.dim() > 0 and len(tensor) == _size(inputs) for tensor in tensors)


def _size(inputs: Any) -> int:
    batch = batch_of(inputs)
    return 0 if batch is None else len(batch)
