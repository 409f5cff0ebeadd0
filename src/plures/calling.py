"""How a network is called: its arguments, in chunks, and the logits that it returns."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plures.errors import PluresError

_SWAPPING = threading.RLock()


def swapping() -> AbstractContextManager[object]:
    """Let one thread at a time run a network with other tensors in it: two would restore each other's.

    with swapping(): ...
    """
    return nullcontext() if torch.compiler.is_compiling() else _SWAPPING


class Arguments(NamedTuple):
    """Hold what a network is called with, where a tensor, a tuple or a dict does not say it all.

    call(network, Arguments((images,), {"mask": mask}))
    """

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
    """Call a network on a tensor, a tuple of positional or a dict of named arguments.

    output = call(network, {"pixel_values": images})
    """
    args, kwargs = arguments(inputs)
    return network(*args, **kwargs)


def call_with(network: nn.Module, values: Mapping[str, Tensor], inputs: Any) -> Any:
    """Call a network with other tensors in the place of its own; a name that it does not have is an error.

    output = call_with(network, {"fc.weight": weight}, images)
    """
    with swapping():
        everything = dict(network.named_parameters()) | dict(network.named_buffers()) | dict(values)
        return functional_call(network, everything, *arguments(inputs), strict=True)


def logits_of(output: Any) -> Tensor:
    """Take the logits from what a network returned: a tensor, or an object with `.logits` as in transformers.

    logits = logits_of(network(images))
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise PluresError(f"the network returned {type(output).__name__}; expected a tensor or an object with .logits")
    return logits


def refuse_nan(inputs: Any) -> None:
    """Refuse inputs with NaN, naming the first sample that has one.

    refuse_nan(images)
    """
    args, kwargs = arguments(inputs)
    for tensor in (*args, *kwargs.values()):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and bool(tensor.isnan().any()):
            place = tensor.isnan().nonzero()[0].tolist()
            raise PluresError(f"the inputs hold NaN, first at {place}: clean the data before predicting")


def chunks(inputs: Any, size: int | None) -> Iterator[Any]:
    """Cut a batch of inputs into batches of at most `size` samples.

        for chunk in chunks({"pixel_values": images}, 32): ...

    The first tensor says how many samples there are; what has another length goes along whole.
    """
    args, kwargs = arguments(inputs)
    batched = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0]
    if size is None or not batched:
        yield inputs
        return
    if size < 1:
        raise PluresError(f"batch_size={size}; it must be at least 1")
    length = len(batched[0])
    for start in range(0, max(length, 1), size):

        def cut(value: Any, start: int = start) -> Any:
            batched_too = isinstance(value, Tensor) and value.dim() > 0 and len(value) == length
            return value[start : start + size] if batched_too else value

        yield Arguments(tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()})
