"""Which tensors of a network are split among the members, which are private to each, which are shared by all."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from plures.checks import nearest, one_of
from plures.errors import PluresError
from plures.tensors import canonical, check_network, layers, own_tensors, tensors


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
# classifier of 1.8 % of a network (CIFAR100) was better split than private, one of 0.2 % (CIFAR10) as good: results.md.
SMALL_SHARE = 0.01  # of the numbers of the network
SMALL_COUNT = 2**13  # numbers, too few to matter


def roles(
    network: nn.Module, classifier: str | None = None, *, fixed: bool = False, embeddings: str | None = None
) -> dict[str, Role]:
    """Return the role of every named tensor of a network; edit the result and pass it to a method.

        roles = plures.roles(network, classifier="head.fc")
        ensemble = plures.OrthogonalDropout(network, roles=roles)

    Weights of linear, convolution, attention and recurrent layers are split. Norm layers (parameters and buffers),
    biases, depthwise convolutions, tokens and all other tensors are private. Parameters that the network has frozen are
    shared. Tensors tied under several names have one role: shared before private before split.

    - `classifier`: the name of the classifier; by default, the last Linear. It is private if small and split if large.
    - `fixed`: make the classifier shared, as in the paper.
    - `embeddings`: one role for all embeddings ("shared" keeps those of a large pre-trained network as they are); by
      default, they are private if small and split if large.
    """
    check_network(network)
    one_of("embeddings", embeddings, (None, *Role))
    names = tensors(network)
    modules = dict(network.named_modules(remove_duplicate=False))
    found = _last_linear(network) if classifier is None else _named_classifier(modules, classifier)
    of_classifier = set() if found is None else {id(parameter) for parameter in modules[found].parameters()}
    splittable = {
        f"{path}.{attribute}".lstrip("."): module
        for path, module in modules.items()
        for attribute in _splittable_attributes(module)
    }
    total = sum(tensor.numel() for tensor in own_tensors(network).values())

    def small(tensor: Tensor) -> bool:
        return tensor.numel() <= max(SMALL_COUNT, SMALL_SHARE * total)

    result: dict[str, Role] = {}
    for name, tensor in names.items():
        aliases = [other for other, candidate in names.items() if candidate is tensor]
        embeds = [alias for alias in aliases if isinstance(splittable.get(alias), EMBEDDINGS)]
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if frozen or (fixed and id(tensor) in of_classifier):
            result[name] = Role.SHARED
        elif embeds and embeddings is not None:
            result[name] = Role(embeddings)
        elif not all(alias in splittable for alias in aliases):
            result[name] = Role.PRIVATE
        else:
            optional = embeds or id(tensor) in of_classifier
            result[name] = Role.PRIVATE if optional and small(tensor) else Role.SPLIT
    if not any(name in splittable for name in result):
        raise PluresError(
            f"{type(network).__name__} has nothing to split: no weight of a linear, convolution, attention or "
            "recurrent layer"
        )
    if Role.SPLIT not in result.values():  # a network of one layer: that is what there is to split
        for name, tensor in names.items():
            if name in splittable and result[name] is Role.PRIVATE and tensor.dim() > 1:
                result[name] = Role.SPLIT
    return result


def resolve_roles(
    network: nn.Module, given: Mapping[str, str] | None, classifier: Classifier | None
) -> tuple[dict[str, Role], Classifier | None]:
    """Say what becomes of the classifier; return the roles, and in a word what became of it.

    Left out, the classifier keeps the role that `roles` gave it.
    """
    one_of("classifier", classifier, (None, *get_args(Classifier)))
    chosen: dict[str, str] = dict(roles(network) if given is None else given)
    names = tensors(network)
    targets = classifier_tensors(network, chosen)
    if classifier == "fixed" and not targets:
        raise PluresError(
            f"{type(network).__name__} has no Linear layer that could be the classifier: name the layer that gives the "
            "logits with roles=plures.roles(network, classifier=..., fixed=True)"
        )
    if classifier is not None:
        for name in targets:
            matrix = Role.SPLIT if names[name].dim() > 1 else Role.PRIVATE
            chosen[name] = {"fixed": Role.SHARED, "private": Role.PRIVATE, "split": matrix}[classifier]
    resolved = check_roles(network, chosen)
    words: dict[Role, Classifier] = {Role.SHARED: "fixed", Role.PRIVATE: "private", Role.SPLIT: "split"}
    weight = next((resolved[name] for name in targets if names[name].dim() > 1), None)
    return resolved, classifier if weight is None else words[weight]


def classifier_tensors(network: nn.Module, given: Mapping[str, str] | None = None) -> list[str]:
    """Name the trainable tensors of the classifier: of the last Linear, or of the layers that are shared in its place.

        classifier_tensors(network)  # ["fc.weight", "fc.bias"]

    Embeddings may be shared, too, and are no classifier.
    """
    names = {name: tensor for name, tensor in tensors(network).items() if tensor.requires_grad}
    last = _last_linear(network)
    own = set() if last is None else {id(parameter) for parameter in network.get_submodule(last).parameters()}
    of_last = [name for name, tensor in names.items() if id(tensor) in own]
    embeddings = [module for module in network.modules() if isinstance(module, EMBEDDINGS)]
    embed = {id(parameter) for module in embeddings for parameter in module.parameters()} - own
    shared = [name for name in names_of_shared(given) if name in names and id(names[name]) not in embed]
    return shared if shared and not set(shared) & set(of_last) else of_last


def names_of_shared(given: Mapping[str, str] | None) -> list[str]:
    """Name the tensors that given roles make shared."""
    return [name for name, role in (given or {}).items() if role == Role.SHARED]


def check_roles(network: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """Return the roles as `Role` values, or say which of them cannot hold."""
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
    if Role.SPLIT not in result.values():
        raise PluresError(f"{type(network).__name__} has nothing to split: no tensor has the role 'split'")
    return result


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


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


def _last_linear(network: nn.Module) -> str | None:
    return next((path for path, layer in reversed(layers(network).items()) if isinstance(layer, nn.Linear)), None)


def _named_classifier(modules: Mapping[str, nn.Module], name: str) -> str:
    if name not in modules:
        raise PluresError(f"classifier={name!r} is not a module of the network{nearest(name, modules)}")
    if not isinstance(modules[name], nn.Linear | _ConvNd):
        kind = type(modules[name]).__name__
        raise PluresError(f"classifier={name!r} is a {kind}; name the Linear or convolution that gives the logits")
    return name
