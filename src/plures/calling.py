"""How a network is called: its arguments, in chunks, by several threads, and the logits that it returns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from plures.errors import PluresError

TARGETS = ("labels", "label", "targets", "target")  # the names that a batch may have for them
Structure = TypeVar("Structure")
Result = TypeVar("Result")


class Arguments(NamedTuple):
    """The arguments of a call, if a tensor, a tuple or a dict does not say it all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(inputs: Any) -> Arguments:
    """Read inputs as arguments: one tensor, a tuple of positional or a dict of named ones.

    >>> arguments({"x": 3})
    Arguments(args=(), kwargs={'x': 3})
    """
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def call(network: nn.Module, inputs: Any) -> Any:
    """Call a network on a tensor, a tuple of positional or a dict of named arguments."""
    args, kwargs = arguments(inputs)
    return network(*args, **kwargs)


def call_with(network: nn.Module, values: Mapping[str, Tensor], at: Mapping[str, str], inputs: Any) -> Any:
    """Call a network that no other thread uses with other tensors in the place of its own; `at` is its `places`."""
    # Tied tensors are named one by one: to let torch look for them takes longer than a small layer runs.
    given = {place: values[first] for place, first in at.items() if first in values}
    return functional_call(network, given, *arguments(inputs), tie_weights=False)


def logits_of(output: Any) -> Tensor:
    """Return the logits of what a network returned: a tensor, or an object with `.logits` as in transformers."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise PluresError(f"the network returned {type(output).__name__}; expected a tensor or an object with .logits")
    return logits


def refuse_nan(inputs: Any) -> None:
    """Refuse inputs with NaN, naming the first sample that has one, and arrays that are not tensors."""
    args, kwargs = arguments(inputs)
    for tensor in (*args, *kwargs.values()):
        if isinstance(tensor, np.ndarray):
            raise PluresError("the inputs are a numpy array: convert it with torch.from_numpy")
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and bool(tensor.isnan().any()):
            place = tensor.isnan().nonzero()[0].tolist()
            raise PluresError(f"the inputs contain NaN, first at {place}: clean the data before predicting")


def batch_of(inputs: Any) -> Tensor | None:
    """Find the tensor whose first axis is the batch: the first one that has an axis."""
    args, kwargs = arguments(inputs)
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0), None)


def each_batched(inputs: Any, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Change every tensor of a batch of inputs; what has another length than the batch goes along as it is."""
    args, kwargs = arguments(inputs)
    batch = batch_of(inputs)

    def changed(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and batch is not None and len(value) == len(batch)
        return change(value) if batched else value

    return Arguments(tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()})


def rows_of(inputs: Any, rows: slice | Tensor) -> Arguments:
    """Return some samples of a batch of inputs."""
    return each_batched(inputs, lambda one: one[rows.to(one.device) if isinstance(rows, Tensor) else rows])


def chunks(inputs: Any, size: int | None) -> Iterator[Any]:
    """Cut a batch of inputs into batches of at most `size` samples."""
    if size is not None and size < 1:
        raise PluresError(f"batch_size={size}; it must be at least 1")
    batch = batch_of(inputs)
    if size is None or batch is None:
        yield inputs
        return
    for start in range(0, max(len(batch), 1), size):
        yield rows_of(inputs, slice(start, start + size))


def pairs_of(loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Read batches of (inputs, targets), or dicts with labels."""
    for batch in loader:
        if isinstance(batch, Mapping):
            name = next((one for one in TARGETS if one in batch), None)
            if name is None:
                raise PluresError(f"a batch has {', '.join(map(str, batch))}, and none of {', '.join(TARGETS)}")
            inputs, targets = {key: value for key, value in batch.items() if key != name}, batch[name]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
        else:
            raise PluresError(
                f"the loader gave {type(batch).__name__}; expected pairs of inputs and targets, or dicts with labels"
            )
        try:
            numbers = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PluresError(f"the targets are not numbers ({error}): give them as one tensor") from error
        yield inputs, numbers


def copied(inputs: Any) -> Arguments:
    """Copy the tensors of a batch of inputs, for a network that may change them in place."""
    return Arguments(*tree_map_only(Tensor, Tensor.clone, tuple(arguments(inputs))))


class Lender(Generic[Structure]):
    """Lend a structure to one call at a time: any number of threads may run a network whose hooks or tensors change.

    A returned structure is lent again. Copies, also in another process, start with an empty lender.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[object, Structure]] = []  # with the state of the modules when they were made

    def lend(
        self,
        owner: nn.Module,
        make: Callable[[], Structure],
        run: Callable[[Structure], Result],
        held: Sequence[Tensor | None] | None = None,
    ) -> Result:
        """Run a function on a structure that no other call uses at the same time; make one if all are in use.

        A structure is made anew if one of the tensors `held` has changed, by default all those of the owner.
        """
        # Hooks that the user has put on the modules since, or removed, must hold for the structure, too. It may have
        # the tensors themselves, and know which buffers are equal.
        modules = list(owner.modules())
        now: list[tuple[Any, ...]] = [(*one._forward_pre_hooks, *one._forward_hooks, one.training) for one in modules]
        if held is None:
            held = [tensor for one in modules for tensor in (*one._parameters.values(), *one._buffers.values())]
        now += [(id(tensor), None if tensor is None or tensor.is_inference() else tensor._version) for tensor in held]
        try:
            known, lent = self._idle.pop()
        except IndexError:
            known, lent = now, make()
        if known != now:
            lent = make()
        try:
            return run(lent)
        finally:
            self._idle.append((now, lent))

    def clear(self) -> None:
        """Forget all structures, for example because their tensors have moved to another device."""
        self._idle.clear()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
