"""Network architectures: functions that return modules, and the names that recipes give to them."""

import inspect
import math
import os
from collections.abc import Callable

import torch
from torch import nn

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.method_names import imported, is_code
from plures.lab.models.resnet import (
    check_sizes,
    resnet8,
    resnet18,
    resnet20,
    resnet50,
    wide_resnet,
    wide_resnet10_2,
    wide_resnet28_10,
)

__all__ = ["build", "mlp", "resnet8", "resnet18", "resnet20", "resnet50", "wide_resnet", "wide_resnet28_10"]


COPIES = 4  # weights, gradients, momentum and a copy: the least that training needs


def mlp(classes: int, channels: int = 1, size: int = 8, width: int = 128, depth: int = 2) -> nn.Sequential:
    """Return a network with `depth` hidden layers of `width` units, for images of size x size pixels.

    network = mlp(classes=10, channels=1, size=8)
    """
    check_sizes(classes=classes, channels=channels, size=size, width=width, depth=depth)
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = channels * size * size
    for _ in range(depth):
        hidden = nn.Linear(inputs, width)
        nn.init.kaiming_normal_(hidden.weight, nonlinearity="relu")
        nn.init.zeros_(hidden.bias)
        layers += [hidden, nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def _accepted(model: str, function: Callable[..., nn.Module], options: dict[str, object]) -> dict[str, object]:
    """Return the options that a function accepts besides `classes` and `channels`, which it must accept."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise PluresError(f"the model {model!r} must be a function or class written in Python") from None
    accepted = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if not takes_all and not {"classes", "channels"} <= set(accepted):
        raise PluresError(f"the model {model!r} must accept classes= and channels=, but takes ({', '.join(accepted)})")
    chosen = options if takes_all else {name: value for name, value in options.items() if name in accepted}
    try:
        signature.bind(classes=0, channels=0, **chosen)
    except TypeError as error:
        raise PluresError(f"the model {model!r} must need nothing but classes= and channels=: {error}") from None
    return chosen


def _check_memory(model: str, sketch: nn.Module) -> None:
    """Raise an error if this machine has too little memory: the system would kill the process without a message."""
    needed = COPIES * sum(parameter.nbytes for parameter in sketch.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if needed > there:
        raise PluresError(
            f"training the model {model!r} of this width and size takes {needed:,} bytes, but this machine "
            f"has {there:,}: choose a smaller width, or smaller images"
        )


BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function
    for function in (resnet8, resnet18, resnet20, resnet50, wide_resnet, wide_resnet10_2, wide_resnet28_10, mlp)
}


def build(model: str, classes: int, channels: int, **options: object) -> nn.Module:
    """Return a network by its built-in name or by any importable `module:function`.

        build("resnet18", classes=10, channels=3, width=16)
        build("mypackage.networks:small", classes=10, channels=3, size=32)

    The function is called with `classes` and `channels`, and with those options that its signature accepts. The module
    may be in the working directory.
    """
    if not is_code(model) and model not in BUILT_IN:
        raise unknown("model", model, [*BUILT_IN, "module:function"])
    function = imported("model", model) if is_code(model) else BUILT_IN[model]
    chosen = _accepted(model, function, options)
    try:
        if not is_code(model):
            with torch.device("meta"):  # on which weights take no memory
                _check_memory(model, function(classes=classes, channels=channels, **chosen))
        network = function(classes=classes, channels=channels, **chosen)
    except (RuntimeError, MemoryError) as error:  # such as too little memory
        raise PluresError(f"the model {model!r} cannot be built: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(network, nn.Module):
        raise PluresError(f"the model {model!r} must return a torch.nn.Module, but returned {type(network).__name__}")
    return network
