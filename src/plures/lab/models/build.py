"""Make a network from the name of a function."""

import importlib
import inspect
import operator
from collections.abc import Callable

from torch import nn

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.models.mlp import mlp
from plures.lab.models.resnet import resnet8, resnet18, resnet20, resnet50
from plures.lab.models.wide_resnet import wide_resnet, wide_resnet10_2, wide_resnet28_10

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function
    for function in (resnet8, resnet18, resnet20, resnet50, wide_resnet, wide_resnet10_2, wide_resnet28_10, mlp)
}


def build(model: str, classes: int, channels: int, **options: object) -> nn.Module:
    """Make a network from a built-in name or from any importable `module:function`.

        build("resnet18", classes=10, channels=3, width=16)
        build("mypackage.networks:small", classes=10, channels=3, size=32)

    The function is called with `classes` and `channels` and with those of the options that its signature accepts.
    """
    function = _imported(model) if ":" in model else BUILT_IN.get(model)
    if function is None:
        raise unknown("model", model, [*BUILT_IN, "module:function"])
    accepted = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if not takes_all and not {"classes", "channels"} <= set(accepted):
        raise PluresError(f"The model {model!r} must accept classes= and channels=, but takes ({', '.join(accepted)}).")
    chosen = options if takes_all else {name: value for name, value in options.items() if name in accepted}
    network = function(classes=classes, channels=channels, **chosen)
    if not isinstance(network, nn.Module):
        raise PluresError(f"The model {model!r} must return a torch.nn.Module, but returned {type(network).__name__}.")
    return network


def _imported(model: str) -> Callable[..., object]:
    module, _, name = model.partition(":")
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
    except AttributeError:
        raise PluresError(f"The module {module!r} has no {name!r}, which the model {model!r} asks for.") from None
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise PluresError(
            f"The module {module!r} of the model {model!r} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if not callable(function):
        raise PluresError(f"The model {model!r} must be a function or class, but is a {type(function).__name__}.")
    return function  # type: ignore[no-any-return]
