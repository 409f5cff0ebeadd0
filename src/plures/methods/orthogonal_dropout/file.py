"""How a split ensemble becomes named tensors: owners packed, each member's weights together.

The file of a complete ensemble holds every weight once, grouped by owner, so that some members can be read without the
others; `owners/NAME` says where they belong. While members are untrained it also holds what training goes on from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plures.ensemble import as_stored
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.partition import FREE
from plures.methods.orthogonal_dropout.roles import Role
from plures.tensors import own_tensors

if TYPE_CHECKING:
    from plures.methods.orthogonal_dropout.method import OrthogonalDropout


def to_tensors(ensemble: OrthogonalDropout, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Give the tensors that a file holds, with split weights in the dtype asked for.

    safetensors.torch.save_file(to_tensors(ensemble, torch.bfloat16), path)
    """
    weights = own_tensors(ensemble.network)
    result = {}
    for name, owners in ensemble.owners.items():
        stored = as_stored(weights[name], dtype)
        # Free weights need a digit of their own only while there are any.
        some_free = bool((owners == FREE).any())
        digits = torch.where(owners == FREE, ensemble.members, owners.int())
        result[f"owners/{name}"] = pack(digits, ensemble.members + some_free)
        for member in range(ensemble.members):
            result[_place(member, name)] = _values(stored, owners, member)
        if some_free:
            result[f"free/{name}"] = _values(stored, owners, FREE)
    for member in range(ensemble.members):
        for name, row in ensemble.private.rows(member).items():
            result[_place(member, name)] = as_stored(row, dtype, like=weights[name])
    complete = len(ensemble.trained) == ensemble.members
    kept = {Role.SHARED} if complete else {Role.SHARED, Role.PRIVATE}
    result |= {f"given/{name}": as_stored(t, dtype) for name, t in weights.items() if ensemble.roles[name] in kept}
    if ensemble.draft is not None:
        result |= {f"draft/{name}": tensor.detach() for name, tensor in own_tensors(ensemble.draft).items()}
    return result


def from_tensors(ensemble: OrthogonalDropout, read: Callable[[str], Tensor], names: Sequence[str]) -> None:
    """Fill an ensemble from a file's tensors, reading only what its loaded members need.

    from_tensors(ensemble, file.get_tensor, list(file.keys()))
    """
    available = set(names)
    members = range(ensemble.members) if ensemble.loaded is None else ensemble.loaded
    owners = {}
    for name, like in ensemble.owners.items():
        some_free = f"free/{name}" in available
        digits = unpack(read(f"owners/{name}"), ensemble.members + some_free, like.numel()).reshape(like.shape)
        owners[name] = digits.masked_fill_(digits == ensemble.members, FREE) if some_free else digits
    ensemble.partition.assign(owners)
    weights = own_tensors(ensemble.network)
    with torch.no_grad():
        for name, owner in ensemble.owners.items():
            for member in members:
                _fill(weights[name], owner, member, read(_place(member, name)))
            if ensemble.loaded is None and f"free/{name}" in available:
                _fill(weights[name], owner, FREE, read(f"free/{name}"))
        for name, tensor in weights.items():
            if f"given/{name}" in available:
                tensor.copy_(read(f"given/{name}"))
    for member in members:
        ensemble.private.write(member, {name: read(_place(member, name)) for name in ensemble.private.rows(member)})
    ensemble.restore_draft(lambda name: read(f"draft/{name}"))


def _place(member: int, name: str) -> str:
    return f"member {member}/{name}"


# Below by numpy and bits, whatever the dtype: choosing and filling places takes torch several times as long.


def _values(weight: Tensor, owners: Tensor, member: int) -> Tensor:
    """Gather what a member owns of a weight, in order."""
    weight = weight.cpu().contiguous()
    places = _places(weight, owners, member)
    return torch.from_numpy(_bits(weight)[places]).view(weight.dtype) if places.size else weight.new_empty(0)


def _fill(weight: Tensor, owners: Tensor, member: int, values: Tensor) -> None:
    """Put a member's values back to their places."""
    places = _places(weight, owners, member)
    if places.size != values.numel():
        raise PluresError(f"{values.numel()} values are stored where {places.size} belong")
    filled = weight.detach().cpu().contiguous()
    _bits(filled)[places] = _bits(values.to(weight.dtype))
    if filled.data_ptr() != weight.data_ptr():  # on another device, or not contiguous
        weight.copy_(filled)


def _places(weight: Tensor, owners: Tensor, member: int) -> NDArray[np.int64]:
    owned: NDArray[np.bool_] = owners.cpu().numpy() == member
    return np.flatnonzero(np.broadcast_to(owned, weight.shape))


def _bits(tensor: Tensor) -> NDArray[Any]:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()]).numpy()


def digits_per_word(base: int) -> int:
    """Count the base-`base` digits that always fit into 64 bits.

    >>> digits_per_word(5)
    27
    """
    digits = int(64 / math.log2(base))
    while base ** (digits + 1) <= 2**64:
        digits += 1
    while base**digits > 2**64:
        digits -= 1
    return digits


def pack(values: Tensor, base: int) -> Tensor:
    """Pack small integers as base-`base` digits into 64-bit words, near log2(base) bits each.

        words = pack(owners, base=5)  # 27 owners in each int64
        assert unpack(words, base=5, count=owners.numel()).equal(owners.flatten())

    The words are unsigned numbers stored in int64.
    """
    if not 2 <= base <= 256:
        raise PluresError(f"base={base}: digits are packed in base 2 to 256")
    flat = values.detach().cpu().numpy().astype(np.uint8, copy=False).reshape(-1)
    if flat.size and int(flat.max()) >= base:
        raise PluresError(f"{int(flat.max())} is no digit of base {base}")
    per_word = digits_per_word(base)
    padded = np.zeros((-(-flat.size // per_word), per_word), np.uint8)
    padded.reshape(-1)[: flat.size] = flat
    words = np.zeros(len(padded), np.uint64)
    for digit in range(per_word - 1, -1, -1):
        words = words * np.uint64(base) + padded[:, digit]
    return torch.from_numpy(words.view(np.int64))


def unpack(words: Tensor, base: int, count: int) -> Tensor:
    """Read `count` digits back from the words that `pack` made.

    owners = unpack(words, base=5, count=1000).reshape(weight.shape)
    """
    per_word = digits_per_word(base)
    if words.dtype != torch.int64 or words.dim() != 1 or words.numel() != -(-count // per_word):
        raise PluresError(f"{count} digits of base {base} need {-(-count // per_word)} words, not {words.numel()}")
    rest = words.cpu().numpy().view(np.uint64)
    digits = np.empty((rest.size, per_word), np.uint8)
    for digit in range(per_word):
        quotient = rest // np.uint64(base)
        digits[:, digit] = rest - quotient * np.uint64(base)
        rest = quotient
    return torch.from_numpy(digits.reshape(-1)[:count])
