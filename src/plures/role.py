"""Which tensors of a network are split among the members, which are private to each, which are shared by all."""

from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from plures.errors import PluresError


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


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """List the tensors that make up a network's state, tied ones under each of their names.

        >>> list(tensors(nn.BatchNorm1d(3)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']

    Buffers that are not saved (`persistent=False`) are part of the architecture and not listed.
    """
    kept = network.state_dict(keep_vars=True)
    parameters = dict(network.named_parameters(remove_duplicate=False))
    buffers = dict(network.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in (parameters | buffers).items() if name in kept}


def own_tensors(network: nn.Module) -> dict[str, Tensor]:
    """List the tensors of a network's state once each: tied ones under their first name.

    >>> list(own_tensors(nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    first = canonical(network)
    return {name: tensor for name, tensor in tensors(network).items() if first[name] == name}


def canonical(network: nn.Module) -> dict[str, str]:
    """Map each name of a tensor to the first name that the same tensor has.

    >>> canonical(nn.Linear(2, 3))
    {'weight': 'weight', 'bias': 'bias'}
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors(network).items()}


def aliases(network: nn.Module) -> dict[str, str]:
    """Name the tied tensors: each further name, and the first one that the same tensor has.

    >>> aliases(nn.Linear(2, 3))
    {}
    """
    return {name: first for name, first in canonical(network).items() if name != first}


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


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Word the end of an error: the known names that look like the unknown one.

    >>> nearest("fc.wieght", {"fc.weight": 1})
    '; did you mean fc.weight?'
    """
    matches = get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def refuse_unfinished(network: nn.Module) -> None:
    """Refuse a network with lazy layers that have not seen a batch yet.

    refuse_unfinished(nn.LazyLinear(3))
    """
    for name, tensor in tensors(network).items():
        if is_lazy(tensor):
            raise PluresError(f"{name!r} has no shape yet: run {type(network).__name__} on a batch before splitting it")


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
