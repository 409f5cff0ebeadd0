"""Which tensors of a network are split among the members, which are private to each, which are shared by all."""

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from plures.checks import nearest, one_of
from plures.errors import PluresError
from plures.tensors import ALL_FROZEN, canonical, check_network, layers, own_tensors, tensors


class Role(StrEnum):
    """The role of one named tensor when the network is split.

        roles = plures.roles(network)
        roles["stem.weight"] = plures.Role.PRIVATE  # or the string "private"

    SPLIT: one owner per entry. PRIVATE: one copy per member. SHARED: frozen, used by all members.
    """

    SPLIT = "split"
    PRIVATE = "private"
    SHARED = "shared"


Classifier = Literal["private", "split", "fixed"]

# Small tensors are private: copies cost next to nothing, and each member decides for itself. Large ones are split. A
# classifier of 1.8 % of a network (CIFAR100) was better split than private, one of 0.2 % (CIFAR10) as good.
SMALL_SHARE = 0.01  # of the numbers of the network
SMALL_COUNT = 2**13  # numbers, too few to matter
ADAPTER_SHARE = 0.1  # of the numbers of a network: if no more are trainable, they adapt a frozen network


def roles(network: nn.Module, last: str | None = None, *, embeddings: str | None = None) -> dict[str, Role]:
    """Return the role of every named tensor of a network; edit the result and pass it to a method.

        roles = plures.roles(network, last="head.fc")
        roles["head.fc.weight"] = roles["head.fc.bias"] = "shared"  # the classifier, fixed as in the paper
        ensemble = plures.OrthogonalDropout(network, roles=roles)

    Weights of linear, convolution, attention and recurrent layers are split. Norm layers (parameters and buffers),
    biases, depthwise convolutions, tokens and all other tensors are private. Parameters that the network has frozen are
    shared. If at most a tenth of the network is trainable (adapters such as LoRA, or a new head), all of that is
    private. Tensors tied under several names have one role: shared before private before split.

    - `last`: the name of the classifier; by default, the last Linear, or without a Linear the last layer if it is a
      1x1 convolution. It is private if small and split if large.
    - `embeddings`: one role for all embeddings ("shared" keeps those of a large pre-trained network as they are); by
      default, they are private if small and split if large.
    """
    check_network(network)
    one_of("embeddings", embeddings, (None, *Role))
    names = tensors(network)
    modules = dict(network.named_modules(remove_duplicate=False))
    found = _last_layer(network) if last is None else _named_classifier(modules, last)
    of_classifier = set() if found is None else {id(parameter) for parameter in modules[found].parameters()}
    splittable = {
        f"{path}.{attribute}".lstrip("."): module
        for path, module in modules.items()
        for attribute in _splittable_attributes(module)
    }
    most = max(SMALL_COUNT, SMALL_SHARE * sum(tensor.numel() for tensor in own_tensors(network).values()))
    adapts = has_adapters(network)
    result: dict[str, Role] = {}
    for name, tensor in names.items():
        aliases = [other for other, candidate in names.items() if candidate is tensor]
        embeds = [alias for alias in aliases if isinstance(splittable.get(alias), EMBEDDINGS)]
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if frozen:
            result[name] = Role.SHARED
        elif embeds and embeddings is not None:
            result[name] = Role(embeddings)
        elif adapts or not all(alias in splittable for alias in aliases):
            result[name] = Role.PRIVATE
        else:
            optional = embeds or id(tensor) in of_classifier
            result[name] = Role.PRIVATE if optional and tensor.numel() <= most else Role.SPLIT
    if not any(name in splittable for name in result):
        raise PluresError(
            f"{type(network).__name__} has nothing to split: no weight of a linear, convolution, attention or "
            "recurrent layer"
        )
    if Role.SPLIT not in result.values() and not adapts:  # a network of one layer: that is what there is to split
        for name, tensor in names.items():
            if name in splittable and result[name] is Role.PRIVATE and tensor.dim() > 1:
                result[name] = Role.SPLIT
    return result


def roles_for(network: nn.Module, members: int) -> dict[str, Role]:
    """Return the roles for members that train together: small weights with fewer inputs than members are private.

    Split by kernels among five members, a first convolution over three colours would leave each half of its outputs.
    """
    known, result = tensors(network), roles(network)
    most = max(SMALL_COUNT, SMALL_SHARE * sum(tensor.numel() for tensor in own_tensors(network).values()))
    for name, tensor in known.items():
        if result[name] is Role.SPLIT and tensor.shape[1] < members and tensor.numel() <= most:
            result[name] = Role.PRIVATE
    return result if Role.SPLIT in result.values() else roles(network)


def has_adapters(network: nn.Module) -> bool:
    """Return whether a network is frozen but for a small part; refuse one that is frozen altogether.

    >>> network = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 2))
    >>> has_adapters(network)
    True
    """
    counts = {True: 0, False: 0}
    for tensor in own_tensors(network).values():
        counts[isinstance(tensor, nn.Parameter) and tensor.requires_grad] += tensor.numel()
    if not counts[True] and any(True for _ in network.parameters()):
        raise PluresError(ALL_FROZEN)
    frozen = sum(tensor.numel() for tensor in network.parameters() if not tensor.requires_grad)
    return frozen > 0 and counts[True] <= ADAPTER_SHARE * sum(counts.values())


def resolve_roles(
    network: nn.Module, given: Mapping[str, str] | None, classifier: Classifier | None
) -> tuple[dict[str, Role], Classifier | None]:
    """Return the roles with that of the classifier set, and one word for the latter.

    Without `classifier`, it keeps the role that `roles` gave it.
    """
    one_of("classifier", classifier, (None, *get_args(Classifier)))
    chosen: dict[str, str] = dict(roles(network) if given is None else given)
    names = tensors(network)
    targets = classifier_tensors(network)
    if classifier == "fixed" and not targets:
        raise PluresError(
            f"{type(network).__name__} has no Linear and no last 1x1 convolution that could be the classifier: give "
            "the layer that returns the logits the role 'shared' in roles="
        )
    if classifier is not None:
        for name in targets:
            matrix = Role.SPLIT if names[name].dim() > 1 else Role.PRIVATE
            chosen[name] = {"fixed": Role.SHARED, "private": Role.PRIVATE, "split": matrix}[classifier]
    resolved = check_roles(network, chosen)
    words: dict[Role, Classifier] = {Role.SHARED: "fixed", Role.PRIVATE: "private", Role.SPLIT: "split"}
    weight = next((resolved[name] for name in targets if names[name].dim() > 1), None)
    return resolved, classifier if weight is None else words[weight]


def classifier_tensors(network: nn.Module) -> list[str]:
    """Return the names of the classifier's trainable tensors."""
    last = _last_layer(network)
    own = set() if last is None else {id(parameter) for parameter in network.get_submodule(last).parameters()}
    return [name for name, tensor in tensors(network).items() if tensor.requires_grad and id(tensor) in own]


def names_of_shared(given: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors with the role shared."""
    return [name for name, role in given.items() if role == Role.SHARED]


def check_roles(network: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """Return the roles as `Role` values; raise if one of them is impossible."""
    names = tensors(network)
    for name in given:
        if name not in names:
            raise PluresError(f"roles name {name!r}, which the network does not have{nearest(name, names)}")
    result: dict[str, Role] = {}
    first = canonical(network)
    for name, tensor in names.items():
        if name not in given:
            raise PluresError(f"roles lack {name!r}: start from plures.roles(network), which names them all")
        if given[name] not in list(Role):
            raise PluresError(f"the role of {name!r} is {given[name]!r}; use one of {', '.join(Role)}")
        role = result[name] = Role(given[name])
        if role is Role.SPLIT and not isinstance(tensor, nn.Parameter):
            raise PluresError(f"{name!r} is a buffer and cannot be split; make it private or shared")
        if role is Role.SPLIT and not tensor.is_floating_point():
            raise PluresError(f"{name!r} has dtype {tensor.dtype} and cannot be split; make it private or shared")
        if role is not result[first[name]]:
            raise PluresError(f"{first[name]!r} and {name!r} are one tied tensor and must have one role")
    if Role.SPLIT not in result.values() and all(one.requires_grad for one in network.parameters()):
        raise PluresError(f"{type(network).__name__} has nothing to split: no tensor (past last=) has the role 'split'")
    return result


def check_pretrained(network: nn.Module) -> None:
    """Refuse a network whose weights cannot be changed one by one: a quantised one, or one with merged adapters."""
    check_network(network)
    for path, module in network.named_modules():
        if getattr(module, "merged_adapters", None):
            raise PluresError(
                f"the adapters of {path!r} are merged into its weights, and would not train: call unmerge_adapter() or "
                "merge_and_unload() before"
            )
        numbers = all(one.dtype in FLOATS for one in module.parameters(recurse=False))
        if not numbers or getattr(module, "_packed_params", None) is not None:
            raise PluresError(
                f"{path!r} is quantised, and single weights of it cannot be changed: take the network in float32, "
                "bfloat16 or float16"
            )


def check_head(network: nn.Module, shared: Container[str]) -> None:
    """Refuse a classifier that members of a trained network share although it is new: it would stay random."""
    path = _last_layer(network)
    layer = None if path is None else network.get_submodule(path)
    if not isinstance(layer, nn.Linear) or f"{path}.weight".lstrip(".") not in shared or layer.weight.is_meta:
        return
    bound = layer.in_features**-0.5  # of the uniform numbers that torch draws; transformers draws others, and zeros
    largest, spread = float(layer.weight.abs().max()), float(layer.weight.float().std())
    drawn = 0.9 * bound < largest <= 1.01 * bound and 0.9 * bound < 3**0.5 * spread < 1.1 * bound
    if drawn or (layer.bias is not None and not bool(layer.bias.any())):
        raise PluresError(
            f"the classifier {path!r} is shared by all members and was never trained, so it would stay random: call "
            "requires_grad_(True) on it, give it the role 'private', or load its trained weights"
        )


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _splittable_attributes(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, _ConvNd):
        # A depthwise kernel has a handful of weights: a fifth of them is not a kernel.
        return () if 1 < module.groups == module.in_channels else ("weight",)
    if isinstance(module, nn.Linear):
        return ("weight",)
    if isinstance(module, nn.MultiheadAttention):
        return ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    if isinstance(module, EMBEDDINGS):
        return () if module.sparse else ("weight",)  # a masked weight has no sparse gradient
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return tuple(name for name, _ in module.named_parameters(recurse=False) if name.startswith("weight"))
    return ()


def _last_layer(network: nn.Module) -> str | None:
    """Return the name of the layer that gives the logits, as far as its kind tells."""
    known = list(reversed(layers(network).items()))
    linear = next((path for path, layer in known if isinstance(layer, nn.Linear)), None)
    if linear is None and known and isinstance(known[0][1], _ConvNd) and set(known[0][1].kernel_size) == {1}:
        return known[0][0]
    return linear


def _named_classifier(modules: Mapping[str, nn.Module], name: str) -> str:
    if name not in modules:
        raise PluresError(f"last={name!r} is not a module of the network{nearest(name, modules)}")
    if not isinstance(modules[name], nn.Linear | _ConvNd):
        kind = type(modules[name]).__name__
        raise PluresError(f"last={name!r} is a {kind}; name the Linear or convolution that gives the logits")
    return name
