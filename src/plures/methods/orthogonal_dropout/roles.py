"""Which tensors of a network are split among the members, which are private to each, which are shared by all."""

from collections.abc import Mapping
from enum import StrEnum

from torch import nn
from torch.nn.modules.conv import _ConvNd

from plures.checks import nearest
from plures.errors import PluresError
from plures.tensors import canonical, refuse_unfinished, tensors


class Role(StrEnum):
    """What becomes of one named tensor when the network is split.

        roles = plures.roles(network)
        roles["stem.weight"] = plures.Role.PRIVATE  # the string "private" works, too

    SPLIT: one owner per entry. PRIVATE: one copy per member. SHARED: frozen, used by all members.
    """

    SPLIT = "split"
    PRIVATE = "private"
    SHARED = "shared"


def roles(network: nn.Module, classifier: str | None = None) -> dict[str, Role]:
    """Give every named tensor of a network its role; edit the result and hand it to a method.

        roles = plures.roles(network, classifier="head.fc")
        ensemble = plures.OrthogonalDropout(network, roles=roles)

    Weights of linear and convolution layers and attention projections are split. Norm layers (parameters and
    buffers), biases, depthwise convolutions, embeddings, tokens and anything else are private. The classifier, by
    default the last Linear, is shared, and so is every other parameter that the network itself has frozen. Tensors
    tied under several names have one role: shared before private before split.
    """
    names = tensors(network)
    refuse_unfinished(network)
    modules = dict(network.named_modules())
    splittable = {
        f"{path}.{attribute}".lstrip("."): module
        for path, module in modules.items()
        for attribute in _splittable_attributes(module)
    }
    found = _last_linear(network) if classifier is None else _named_classifier(modules, classifier)
    of_classifier = set() if found is None else {id(parameter) for parameter in modules[found].parameters()}

    result: dict[str, Role] = {}
    for name, tensor in names.items():
        aliases = [other for other, candidate in names.items() if candidate is tensor]
        if id(tensor) in of_classifier or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            result[name] = Role.SHARED
        elif all(alias in splittable for alias in aliases):
            result[name] = Role.SPLIT
        else:
            result[name] = Role.PRIVATE
    if not any(name in splittable for name in result):
        raise PluresError(
            f"{type(network).__name__} has nothing to split: no weight of a Linear, convolution or attention layer"
        )
    return result


def check_roles(network: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """Return the roles as `Role` values, or say which of them cannot hold.

    roles = check_roles(network, {"weight": "split", "bias": "private"})
    """
    names = tensors(network)
    for name in given:
        if name not in names:
            raise PluresError(f"roles name {name!r}, which the network does not have{nearest(name, names)}")
    result: dict[str, Role] = {}
    first = canonical(network)
    for name, tensor in names.items():
        if name not in given:
            raise PluresError(f"roles say nothing of {name!r}: start from plures.roles(network), which names them all")
        if given[name] not in list(Role):
            raise PluresError(f"the role of {name!r} is {given[name]!r}; use one of {', '.join(Role)}")
        role = result[name] = Role(given[name])
        if role is Role.SPLIT and not isinstance(tensor, nn.Parameter):
            raise PluresError(f"{name!r} is a buffer and cannot be split; make it private or shared")
        if role is Role.SPLIT and not tensor.is_floating_point():
            raise PluresError(f"{name!r} has dtype {tensor.dtype} and cannot be split; make it private or shared")
        if role is not result[first[name]]:
            raise PluresError(f"{first[name]!r} and {name!r} are one tied tensor and must have one role")
    if Role.SPLIT not in result.values():
        raise PluresError(f"{type(network).__name__} has nothing to split: no tensor has the role 'split'")
    return result


def _splittable_attributes(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, _ConvNd):
        # A depthwise kernel has a handful of weights: a fifth of them is no kernel.
        return () if 1 < module.groups == module.in_channels else ("weight",)
    if isinstance(module, nn.Linear):
        return ("weight",)
    if isinstance(module, nn.MultiheadAttention):
        return ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    return ()


def _last_linear(network: nn.Module) -> str | None:
    inside_attention = {
        id(child)
        for module in network.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    linear = [
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside_attention
    ]
    return linear[-1] if linear else None


def _named_classifier(modules: Mapping[str, nn.Module], name: str) -> str:
    if name not in modules:
        raise PluresError(f"classifier={name!r} is no module of the network{nearest(name, modules)}")
    if not isinstance(modules[name], nn.Linear | _ConvNd):
        kind = type(modules[name]).__name__
        raise PluresError(f"classifier={name!r} is a {kind}; name the Linear or convolution that gives the logits")
    return name
