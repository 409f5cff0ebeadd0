"""The tensors and layers of any network: their names, which tensors are tied, and fresh random starts."""

import copy
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from plures.errors import PluresError
from plures.files import digest
from plures.native import library
from plures.native.structures import Message
from plures.seeding import generator

Layer = nn.Linear | _ConvNd
Moments = dict[str, tuple[float, float]]
Structure = TypeVar("Structure")
# Layers whose parameters start from random numbers.
DRAWN = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)

ALL_FROZEN = (
    "all parameters of the network are frozen (requires_grad=False), so there is nothing to train: unfreeze those that "
    "the members should learn"
)


def moments(network: nn.Module) -> Moments:
    """Measure mean and standard deviation of every tensor that a fresh start draws anew.

    These are the parameters of linear, convolution, attention, recurrent and embedding layers that are not constant.
    All others (norm layers, tokens, buffers, frozen tables) start from the values that the network was given with.
    """
    drawn = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, DRAWN)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    result: Moments = {}
    for name, tensor in tensors(network).items():
        if id(tensor) in drawn and tensor.numel() > 1:
            values = tensor.detach().float()
            mean, deviation = (0.0, 1.0) if values.is_meta else (values.mean().item(), values.std().item())
            if deviation > 0:
                result[name] = (mean, deviation)
    return result


def draw(name: str, like: Tensor, known: Moments, seed: int, *key: object) -> Tensor:
    """Draw one tensor afresh: normal, with the moments that the network's own initialiser had.

    The scale is what an initialiser is about, so any network starts as its author meant it to, without our knowing its
    class. Drawn on the CPU, so that every device and every process gets the same numbers.
    """
    mean, deviation = known[name]
    if like.is_meta:
        return like
    values = torch.randn(like.shape, generator=generator(seed, *key, name)) * deviation + mean
    return values.to(device=like.device, dtype=like.dtype)


def restart(network: nn.Module, known: Moments, names: Iterable[str], seed: int, *key: object) -> None:
    """Draw the named tensors of a network afresh, in place."""
    current = tensors(network)
    drawn = {current[name]: name for name in names if name in known}
    with torch.no_grad():
        for tensor, name in drawn.items():
            tensor.copy_(draw(name, tensor, known, seed, *key))
        for module in network.modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.weight not in drawn:
                continue
            if module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # never trained, so it must not be drawn


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """List the tensors that make up a network's state, tied ones under each of their names.

    Buffers that are not saved (`persistent=False`) are part of the architecture and not listed.
    """
    kept = network.state_dict(keep_vars=True)
    parameters = dict(network.named_parameters(remove_duplicate=False))
    buffers = dict(network.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in (parameters | buffers).items() if name in kept}


def own_tensors(network: nn.Module) -> dict[str, Tensor]:
    """List the tensors of a network's state once each: tied ones under their first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors(network).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def canonical(network: nn.Module) -> dict[str, str]:
    """Map each name of a tensor to the first name that the same tensor has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors(network).items()}


def aliases(network: nn.Module) -> dict[str, str]:
    """Return the tied tensors: each further name, mapped to the first one of the same tensor."""
    return {name: first for name, first in canonical(network).items() if name != first}


def places(network: nn.Module) -> dict[str, str]:
    """Return every place of a module that holds a tensor, mapped to the first name of that tensor.

    Tied tensors have several places. A module registered under two names has two names for one place.
    """
    first = canonical(network)
    names = [
        f"{path}.{attribute}".lstrip(".")
        for path, module in network.named_modules()
        for attribute in (*module._parameters, *module._buffers)
    ]
    return {name: first[name] for name in names if name in first}


def shell(network: Structure) -> Structure:
    """Copy the structure of a network around its very tensors: no number is copied.

    `network` may also be a tuple of modules and what belongs to them, which stay together in the copy.
    """
    modules = [part for part in (network if isinstance(network, tuple) else (network,)) if isinstance(part, nn.Module)]
    held = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in held})


def copied_around(network: nn.Module, names: Container[str]) -> nn.Module:
    """Copy a network; the named tensors take no memory of their own until one of the two is written to."""
    memo: dict[int, Any] = {}
    for name, tensor in tensors(network).items():
        if name in names and id(tensor) not in memo:
            shared = tensor.is_shared()  # type: ignore[no-untyped-call]  # with other processes: torch cannot share it lazily
            lazy = tensor.detach().clone() if shared else torch._lazy_clone(tensor.detach()).detach()
            memo[id(tensor)] = nn.Parameter(lazy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else lazy
    return copy.deepcopy(network, memo)


def overwrite(tensor: Tensor, value: Tensor, name: str) -> None:
    """Copy a value into a tensor of the same shape and, but for the precision of fractions, of the same type."""
    if tensor.shape != value.shape:
        raise PluresError(f"tensor {name!r} has shape {list(value.shape)}; expected {list(tensor.shape)}")
    if tensor.dtype != value.dtype and not (tensor.is_floating_point() and value.is_floating_point()):
        raise PluresError(f"tensor {name!r} has dtype {value.dtype}; expected {tensor.dtype}")
    tensor.copy_(value)


def check_network(network: object) -> None:
    """Refuse what is not a network, and one with lazy layers that have not seen a batch yet."""
    if not isinstance(network, nn.Module):
        raise PluresError(f"network must be an nn.Module, not {type(network).__name__}")
    for name, tensor in tensors(network).items():
        if is_lazy(tensor):
            raise PluresError(f"{name!r} has no shape yet: run {type(network).__name__} on a batch before splitting it")


def layers(network: nn.Module) -> dict[str, Layer]:
    """Return the linear and convolution layers that a network calls, by name, in the order of their creation.

    The projection inside of `nn.MultiheadAttention` is not among them: its weight is used, but it is never called.
    """
    check_network(network)
    attention = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    never_called = {id(child) for module in attention for child in module.modules()}
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | _ConvNd) and id(module) not in never_called
    }


def inner_names(names: Iterable[str]) -> dict[str, str]:
    """Return names under which a module can register tensors: without dots, and never an attribute's."""
    return {name: f"{index}:{name.replace('.', '/')}" for index, name in enumerate(names)}


def checksums(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return checksums of contiguous tensors on the CPU: type and shape count, too, so that no header can lie.

    The native library computes two at a time in each thread.
    """
    labels = [f"{one.dtype}{list(one.shape)}".encode() for one in named.values()]
    given: Any = [(label, one.data_ptr(), one.nbytes) for label, one in zip(labels, named.values(), strict=True)]
    found, threads = (Message * len(given))(*given), torch.get_num_threads()
    if not library.why_unavailable() and not library.load().functions.plures_digests(found, len(found), threads):
        return {name: bytes(one.digest).hex()[:16] for name, one in zip(named, found, strict=True)}
    data = [one.reshape(-1).view(torch.uint8).numpy().data for one in named.values()]
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(named, pool.map(digest, labels, data), strict=True))
