"""Which engine predicts: a rule that counts multiplications, not a measurement."""

import copy
import logging
import os
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from plures.errors import PluresError
from plures.graph import Graph, graph_of
from plures.methods.orthogonal_dropout.engines.engine import Engine
from plures.methods.orthogonal_dropout.engines.layers import OwnedConvolution, Parts
from plures.methods.orthogonal_dropout.engines.owned import Owned, why_impossible
from plures.methods.orthogonal_dropout.engines.rewriting import Replacer
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.methods.orthogonal_dropout.roles import EMBEDDINGS, Role
from plures.native.library import why_unavailable
from plures.tensors import own_tensors

log = logging.getLogger("plures")

# What all members of a layer cost in dense layers of one network, if the kernels do worst: docs/engines.md says what
# was measured. A layer that runs member by member costs as many as there are members, and the way there and back.
COST_OF_KERNELS, COST_OF_WEIGHTS, COST_OF_APART = 1.75, 2.5, 1.25
COST_OF_LINEAR = {"block": 1.5, "weight": 2.0}
PIXELS = 64  # that a kernel is used at


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
    owned += 0 if split.background is None else unfolded  # a batch that is the same for all takes the changes alone
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
    if reason is not None and os.environ.get("PLURES_NATIVE") != "0":
        log.warning("the %s engine predicts, because the faster one is unavailable: %s", kind, reason)
    log.info("engine: %s", kind)
    return kind


def is_owned_faster(split: SplitNetwork, graph: Graph | None) -> bool:
    """Return whether the owned engine can run here and should be faster than each member as a separate network.

    If members see a given network, all but what runs member by member should be faster; it may be up to a half.
    """
    if why_impossible(split, graph) is not None:
        return False
    parts = Parts(split, {})
    called = None if graph is None or split.background is not None else {node.target for node in graph.layers}
    replacer, whole, apart, saved = Replacer(parts), 0, 0, 0.0
    for name, tensor in own_tensors(split.network).items():
        path = name.split(".")[:-1]
        inside = (".".join(path[:length]) for length in range(len(path) + 1))
        modules = {place: split.network.get_submodule(place) for place in inside}
        holder = modules[".".join(path)]
        if tensor.dim() < 2 or isinstance(holder, EMBEDDINGS):
            continue
        size = tensor.numel() * (PIXELS if isinstance(holder, _ConvNd) else 1)
        whole += size
        if parts.differs(name):
            layer: nn.Module | None
            if called is None:
                layer = next(one for place, one in modules.items() if replacer.is_leaf(place, one))
            else:
                layer = None if called.isdisjoint(modules) else holder
            each = _cost(layer, parts, name, called is not None)
            apart += size if each is None else 0
            saved += size * (len(parts.members) - (COST_OF_APART * len(parts.members) if each is None else each))
    return saved > 0 if split.background is None else 2 * apart < whole


def _cost(layer: nn.Module | None, parts: Parts, name: str, traced: bool) -> float | None:
    """Return how many dense layers the kernels of all members cost; None if they cannot run it."""
    owners, weight = parts.owners.get(name), cast(Tensor, parts.own(name))
    single = owners is not None and owners.numel() == weight.numel()
    if isinstance(layer, nn.Linear | nn.MultiheadAttention):
        return len(parts.members) if owners is None else COST_OF_LINEAR["weight" if single else "block"]
    if layer is None or not traced or not OwnedConvolution.fits(layer, parts, name.rpartition(".")[0]):
        return None
    several = single and weight[0, 0].numel() > 1  # single weights of larger kernels
    return len(parts.members) if owners is None else COST_OF_WEIGHTS if several else COST_OF_KERNELS
