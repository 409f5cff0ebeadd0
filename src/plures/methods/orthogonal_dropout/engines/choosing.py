"""Which engine predicts: a rule that counts multiplications and what is moved, not a measurement."""

import copy
import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from plures.errors import PluresError
from plures.graph import Graph, graph_of
from plures.methods.orthogonal_dropout.engines.engine import Engine
from plures.methods.orthogonal_dropout.engines.layers import OwnedConvolution, Parts
from plures.methods.orthogonal_dropout.engines.owned import Owned, why_impossible
from plures.methods.orthogonal_dropout.engines.rewriting import Replacer, same_for_all
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.methods.orthogonal_dropout.roles import EMBEDDINGS, Role
from plures.native.library import why_unavailable
from plures.tensors import layers, own_tensors

log = logging.getLogger("plures")

# What all members of a layer cost in dense layers of one network, if the kernels do worst: docs/engines.md says what
# was measured. A layer that runs member by member costs as many as there are members, and the way there and back.
COST_OF_KERNELS, COST_OF_WEIGHTS = 1.75, 2.5
COST_OF_LINEAR = {"block": 1.5, "weight": 2.0}
PIXELS = 64  # that a kernel is used at, if it is not known
MOVED = 16  # multiplications that take as long as to read or write one number


def made(split: SplitNetwork, kind: str | None, memory: int | None, fold: bool) -> Engine:
    """Make an engine of one kind, or the fastest one whose weights fit into `memory` bytes."""
    with torch.inference_mode(False), torch.no_grad():
        split = copy.deepcopy(split)  # the ensemble may be trained further
        graph = graph_of(split.network)
        if kind is None:
            kind = _fastest(split, graph, memory)
        if kind == "owned":
            return Owned(split, graph, fold)
        return Unfolded(split, graph if fold else None)


def _fastest(split: SplitNetwork, graph: Graph | None, memory: int | None) -> str:
    """Return the fastest kind that fits; write into the log which one, and if only a library is missing."""
    weights = own_tensors(split.network)
    copies = {name: 1 if split.roles[name] is Role.SHARED else len(split.trained) for name in weights}
    unfolded = sum(copies[name] * tensor.nbytes for name, tensor in weights.items())
    owned = len(split.trained) * sum(row.nbytes for row in split.private.rows(0).values())  # and the lists
    owned += sum(weights[name].nbytes + 2 * owners.numel() for name, owners in split.owners().items())
    fits = [kind for kind, size in (("owned", owned), ("unfolded", unfolded)) if memory is None or size <= memory]
    faster = "owned" in fits and is_owned_faster(split, graph)
    if not faster and fits == ["owned"] and why_impossible(split, graph) is not None:
        fits = []
    if not fits:
        raise PluresError(
            f"no engine fits into {memory} bytes: the owned engine needs {owned}, the unfolded one {unfolded}; predict "
            "with the ensemble itself"
        )
    kind = "owned" if faster or "unfolded" not in fits else "unfolded"
    reason = why_unavailable()
    if reason is not None and split.background is None and os.environ.get("PLURES_NATIVE") != "0":
        log.warning("the %s engine predicts, because the faster one is unavailable: %s", kind, reason)
    log.info("engine: %s", kind)
    return kind


def is_owned_faster(split: SplitNetwork, graph: Graph | None) -> bool:
    """Return whether the owned engine can run here and should be faster than each member as a separate network."""
    if why_impossible(split, graph) is not None:
        return False
    parts = Parts(split, {})
    if graph is None:
        return saves_without_graph(split.network, parts)
    shapes = _shapes(graph)
    once = same_for_all(graph, parts)
    costs = [_costs(node, graph, parts, shapes, once) for node in graph.nodes]
    return sum(owned for owned, _ in costs) < sum(apart for _, apart in costs)


def saves_without_graph(network: nn.Module, parts: Parts) -> bool:
    """Return whether the linear layers of an untraced network save more than its other layers lose: by weights."""
    replacer, saved, members = Replacer(parts), 0.0, len(parts.members)
    for name, tensor in own_tensors(network).items():
        path = name.split(".")[:-1]
        modules = {place: network.get_submodule(place) for place in (".".join(path[:n]) for n in range(len(path) + 1))}
        leaf = next((one for place, one in modules.items() if replacer.is_leaf(place, one)), None)
        holder, role, owners = modules[".".join(path)], parts.role(name), parts.owners.get(name)
        if owners is not None and isinstance(leaf, nn.Linear | nn.MultiheadAttention):
            each = COST_OF_LINEAR["weight" if owners.numel() == tensor.numel() else "block"]
            saved += tensor.numel() * (members - each)
        elif tensor.dim() > 1 and not isinstance(holder, EMBEDDINGS):  # cut into members, or computed for each of them
            pixels = PIXELS if isinstance(holder, _ConvNd) else 1
            saved -= tensor.numel() * pixels * members * (1.0 if role is Role.SHARED else 0.5)
    return saved > 0


def _costs(
    node: fx.Node, graph: Graph, parts: Parts, shapes: dict[fx.Node, torch.Size], once: set[fx.Node]
) -> tuple[float, float]:
    """Return what a node costs in the owned engine, and as one network for each member, in multiplications."""
    members, owned, apart = len(parts.members), 0.0, 0.0
    shape = shapes.get(node, torch.Size([1]))
    given = [shapes[one].numel() for one in node.all_input_nodes if one in shapes and one.op != "get_attr"]
    moved = MOVED * (shape.numel() + sum(given)) if node in shapes else 0
    for weight, layer, spatial in _weights(node, graph, shape):
        tensor = parts.own(weight)
        if tensor is None:
            continue
        products = float(tensor.numel() * max(spatial, 1))
        if node in once:
            owned, apart = owned + products + moved, apart + products + moved
            continue
        apart += members * (products + moved)
        owners = parts.owners.get(parts.first(weight))
        each = _cost(layer, owners, tensor, parts, weight.rpartition(".")[0])
        # What runs member by member is laid out anew, cut into members, and joined again.
        owned += members * (products + 3 * moved) if each is None else each * products + members * moved
    return owned, apart


def _weights(node: fx.Node, graph: Graph, shape: torch.Size) -> Iterator[tuple[str, nn.Module | None, int]]:
    """Yield the weights that a node multiplies by, the layer, and how many numbers of a channel each multiplies."""
    if node.op in ("call_function", "call_method"):
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                yield str(given.target), None, shape[2:].numel()
    for name, layer in graph.layers[node].named_modules() if node in graph.layers else ():
        if isinstance(layer, nn.Linear | _ConvNd):
            spatial = shape[2:].numel() if isinstance(layer, _ConvNd) else shape[1:-1].numel()
            yield f"{node.target}.{name}".rstrip(".") + ".weight", layer, spatial


def _cost(layer: nn.Module | None, owners: Tensor | None, weight: Tensor, parts: Parts, name: str) -> float | None:
    """Return how many dense layers the kernels of all members cost; None if they cannot run it."""
    single = owners is not None and owners.numel() == weight.numel()
    if isinstance(layer, nn.Linear):
        return len(parts.members) if owners is None else COST_OF_LINEAR["weight" if single else "block"]
    if layer is None or not OwnedConvolution.fits(layer, parts, name):
        return None
    several = single and weight[0, 0].numel() > 1  # single weights of larger kernels
    return len(parts.members) if owners is None else COST_OF_WEIGHTS if several else COST_OF_KERNELS


def _shapes(graph: Graph) -> dict[fx.Node, torch.Size]:
    """Return the shapes for one sample of a size that the network takes; none, if that cannot be found out."""
    for size in dict.fromkeys(_likely_inputs(graph.network)):
        try:
            return graph.shapes(torch.empty(1, *size, device="meta"))
        except Exception:  # the network does not take this size, or needs other inputs
            continue
    return {}


def _likely_inputs(network: nn.Module) -> Iterator[tuple[int, ...]]:
    """Guess shapes of one sample that a network may take."""
    for layer in layers(network).values():
        if isinstance(layer, nn.Linear):
            yield (layer.in_features,)
        else:
            for size in (64, 32, 28, 224, 16, 8):
                yield (layer.in_channels, *[size] * len(layer.kernel_size))
