"""How a split ensemble becomes named tensors: owners packed, each member's weights together.

The file of a complete ensemble holds every weight once, grouped by owner; `owners/NAME` says where they belong. While
members are untrained it also holds what training needs.

Of changes to a given network, it holds what the trained members have changed, and checksums of that network. Owners of
a share, most of which are free, are compressed.
"""

import ctypes
import logging
import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plures.checks import check_members, number
from plures.ensemble import Stored, as_stored
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import spread
from plures.methods.orthogonal_dropout.owners import FREE, SplitNetwork, refilled
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import library
from plures.native.structures import BLOCK, Digits, Placing, filled
from plures.tensors import Moments, checksums, overwrite, own_tensors

LARGE_FILE, LARGE_BYTES = 1.5, 2**20  # times the plain network, and bytes more than it: worth a warning
HUGE_FILE = 5  # times the plain network: worth a warning however small it is
GONE = ("literal_gradient", "distill")  # options of earlier versions: they changed training, and not what was trained
log = logging.getLogger("plures")


def to_tensors(split: SplitNetwork, draft: nn.Module | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors that a file holds, split weights in the dtype asked for; `draft` is the member in training."""
    weights, given = own_tensors(split.network), split.given()
    result: dict[str, Tensor] = {}
    for name, owners in split.owners().items():
        stored = as_stored(weights[name], dtype)
        if name in given and stored.dtype != weights[name].dtype:
            # Rounded, a weight would lose a change that is smaller than its last bit: the difference does not.
            stored = (weights[name].detach() - given[name]).to(stored.dtype)
        # Free weights need a digit of their own only while there are any.
        some_free = bool((owners == FREE).any())
        if split.partition.share is None:
            digits = torch.where(owners == FREE, split.members, owners.int())
            result[f"owners/{name}"] = pack(digits, split.members + some_free)
        else:
            compressed = zlib.compress(owners.cpu().numpy().tobytes())
            result[f"owners/{name}"] = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
        for member in split.trained if name in given else range(split.members):
            result[_place(member, name)] = _values(stored, owners, member)
        if some_free and name not in given:
            result[f"free/{name}"] = _values(stored, owners, FREE)
    for member in range(split.members):
        for name, row in split.private.rows(member).items():
            result[_place(member, name)] = as_stored(row, dtype, like=weights[name])
    complete = len(split.trained) == split.members
    left_out = {Role.SPLIT} | ({Role.PRIVATE} if complete else set()) | ({Role.SHARED} if split.background else set())
    result |= {f"given/{name}": as_stored(t, dtype) for name, t in weights.items() if split.roles[name] not in left_out}
    if draft is not None:
        result |= {f"draft/{name}": tensor.detach() for name, tensor in own_tensors(draft).items()}
    return result


def base_tensors(split: SplitNetwork, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of the given network that members see unchanged, as a file holds them."""
    own = {name: one for name, one in own_tensors(split.network).items() if split.roles[name] is not Role.PRIVATE}
    given = split.given()
    return {f"given/{name}": as_stored(given.get(name, one), dtype, like=one) for name, one in own.items()}


def base_of(split: SplitNetwork) -> dict[str, list[str]]:
    """Return the dtype and the checksum of each tensor of the given network that members see unchanged."""
    own = {name.removeprefix("given/"): one.cpu().contiguous() for name, one in base_tensors(split).items()}
    digests = checksums(own)
    return {name: [str(one.dtype).removeprefix("torch."), digests[name]] for name, one in own.items()}


@torch.no_grad()
def base_from(split: SplitNetwork, stored: Stored) -> None:
    """Fill in the given network, if the file holds it; otherwise refuse another one than the changes belong to."""
    own = {name: one for name, one in own_tensors(split.network).items() if split.roles[name] is not Role.PRIVATE}
    within = any(f"given/{name}" in stored.shapes for name in own)
    for name, tensor in own.items() if within else ():
        overwrite(tensor, stored.read(f"given/{name}", tensor.shape), name)
    for name, (dtype, digest) in {} if within else base_of(split).items():
        expected, other = stored.state["base"][name]
        if dtype != expected:
            raise PluresError(
                f"the changes in the file belong to a network in {expected}, and {name!r} is in {dtype}: convert the "
                f"network, network.to(torch.{expected})"
            )
        if digest != other:
            raise PluresError(
                f"the changes in the file belong to another network: {name!r} differs; load the weights that the "
                "ensemble was made from, or save it with base=True"
            )
    for name, value in {} if within else split.given().items():  # nothing is left of changes that it may have had
        own[name].copy_(value)


def check_stored(network: nn.Module, roles: Mapping[str, Role], members: int, stored: Stored) -> None:
    """Refuse a number of members that a file does not hold, or roles that it was not written with.

    Owners and weights of split tensors are compared when they are read: they take no more room than the network.
    """
    check_members(members, least=2)
    for name, tensor in own_tensors(network).items():
        if roles[name] is Role.PRIVATE:
            for member in range(members):
                stored.check(_place(member, name), tensor.shape)


def options_to_build(stored: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options to build an ensemble with, and those to set afterwards, because the file settles them.

    The classifier's role is among the roles. Random owners would be drawn in vain, which takes as long as loading all
    the rest; moments of the network would be computed in vain, too, but members that start from it need none. And a
    trained ensemble needs no warning about the network that it was made from.
    """
    init = "given" if Role.SPLIT in stored["roles"].values() else "fresh"
    later = {"classifier": None, "schedule": "sequential", "optimize_masks": True, "init": init}
    later |= {"background": "zero", "share": None}
    now = {name: value for name, value in stored.items() if name not in GONE}
    settled = later | now | {"optimize_masks": bool(stored["optimize_masks"])}  # 0.1 knew no other schedule
    return now | later, {name: settled[name] for name in later}


def owners_from(split: SplitNetwork, stored: Stored) -> None:
    """Set all owners from a file."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # checksums and numpy let other threads run
        read = pool.map(lambda item: _owners(split, stored, *item), split.owners().items())
        split.partition.assign(dict(zip(split.owners(), read, strict=True)))


@torch.no_grad()
def from_tensors(split: SplitNetwork, stored: Stored) -> None:
    """Fill a split network from a file's tensors, several at a time."""
    weights, owners, changes = own_tensors(split.network), split.owners(), split.background is not None

    def fill(name: str) -> None:
        places = {member: _place(member, name) for member in (split.trained if changes else range(split.members))}
        places |= {FREE: f"free/{name}"} if f"free/{name}" in stored.shapes else {}
        if not changes and _filled_at_once(weights[name], owners[name], stored, places):
            return
        for owner, place in places.items():  # says what does not fit
            _fill(weights[name], owners[name], owner, stored, place, changes)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, owners))
    for name, tensor in weights.items():
        if f"given/{name}" in stored.shapes and split.roles[name] is not Role.SPLIT:
            overwrite(tensor, stored.read(f"given/{name}", tensor.shape), name)
    for member in range(split.members):
        rows = split.private.rows(member)
        split.private.write(member, {name: stored.read(_place(member, name), row.shape) for name, row in rows.items()})


def _owners(split: SplitNetwork, stored: Stored, name: str, like: Tensor) -> Tensor:
    """Read the owners of a tensor."""
    if split.partition.share is not None:
        return _decompressed(f"owners/{name}", stored, like)
    some_free = f"free/{name}" in stored.shapes
    base = split.members + some_free
    words = stored.read(f"owners/{name}", [-(-like.numel() // digits_per_word(base))])
    digits = unpack(words, base, like.numel()).reshape(like.shape)
    return digits.masked_fill_(digits == split.members, FREE) if some_free else digits


def draft_from(split: SplitNetwork, stored: Stored) -> nn.Module:
    """Read the member in training."""
    own = own_tensors(split.network)
    return refilled(split.network, {name: stored.read(f"draft/{name}", tensor.shape) for name, tensor in own.items()})


def expected_bytes(split: SplitNetwork) -> dict[Role, float]:
    """Compute what the file of the complete ensemble holds, by role; the owners count to the split weights."""
    share = split.partition.share
    owned = 1.0 if share is None else split.members * share
    copies = {Role.SPLIT: owned, Role.PRIVATE: split.members, Role.SHARED: 1.0 if split.background is None else 0.0}
    found = dict.fromkeys(Role, 0.0)
    for name, tensor in own_tensors(split.network).items():
        found[split.roles[name]] += tensor.nbytes * copies[split.roles[name]]
    for owners in split.owners().values():
        digits = 8 * -(-owners.numel() // digits_per_word(split.members))
        found[Role.SPLIT] += min(digits, 1.3 * owned * owners.numel())  # about what is left of them compressed
    return found


def role_lines(split: SplitNetwork) -> list[str]:
    """Describe how many numbers have each role."""
    lines = []
    for role in Role:
        named = [tensor for name, tensor in own_tensors(split.network).items() if split.roles[name] is role]
        if named:
            copies = f" x {split.members} members" if role is Role.PRIVATE else ""
            numbers = sum(one.numel() for one in named)
            if role is Role.SPLIT and split.background is not None:
                copies = f", of which each member changes {split.partition.share or 1 / split.members:.3g}"
            lines.append(f"{role:8}{numbers:>14,} numbers in {len(named)} tensor{'s' * (len(named) != 1)}{copies}")
    return lines


def warn_if_large(split: SplitNetwork, network: str, plain_bytes: int) -> None:
    """Warn of a file that will be much larger than the plain network's."""
    total = sum(expected_bytes(split).values())
    large = total > LARGE_FILE * plain_bytes and total > plain_bytes + LARGE_BYTES
    if large or total > HUGE_FILE * plain_bytes:
        log.warning(
            "%s in %d members takes %.2f x the bytes of the plain network, because each member has a copy of its "
            "private tensors: take fewer members, or give large tensors the role 'split' or 'shared' (plures.roles)",
            network,
            split.members,
            total / plain_bytes,
        )


def moments_from(stored: Mapping[str, Any], known: Mapping[str, Role]) -> Moments:
    """Restore the moments that a file holds."""
    result: Moments = {}
    for name, (mean, deviation) in stored.items():
        number(f"the mean of {name!r}", mean, "a number")
        number(f"the deviation of {name!r}", deviation, "a number above 0", above=0)
        if name in known:
            result[name] = (float(mean), float(deviation))
    return result


def _place(member: int, name: str) -> str:
    return f"member {member}/{name}"


# Below by numpy and bits, whatever the dtype: choosing and filling places takes torch several times as long.


def _values(weight: Tensor, owners: Tensor, member: int) -> Tensor:
    """Gather what a member owns of a weight, in order."""
    weight = weight.cpu().contiguous()
    rows, owned = _rows(weight, owners, member)
    return torch.from_numpy(rows[owned].reshape(-1)).view(weight.dtype) if owned.size else weight.new_empty(0)


def _filled_at_once(weight: Tensor, owners: Tensor, stored: Stored, places: Mapping[int, str]) -> bool:
    """Write the values of all owners to their places in one pass, if the native library can; return whether it did."""
    fits = all(math.prod(stored.shapes.get(place, [math.inf])) <= weight.numel() for place in places.values())
    plain = all(one.is_cpu and one.is_contiguous() for one in (weight, owners))
    if not fits or not plain or library.why_unavailable():
        return False
    values = {owner: stored.get(place) for owner, place in places.items()}
    if not all(one.is_floating_point() and one.dim() == 1 for one in values.values()):
        return False
    values, ends = {owner: one.to(weight.dtype) for owner, one in values.items()}, (ctypes.c_void_p * 512)()
    for owner, one in values.items():
        ends[owner], ends[256 + owner] = one.data_ptr(), one.data_ptr() + one.nbytes
    rows, columns = len(weight), owners.numel() // len(owners)
    sizes = weight.nbytes // (rows * columns), 1 if len(owners) == rows else BLOCK
    placing = filled(Placing, owners, weight.detach(), ctypes.addressof(ends), rows, columns, *sizes)
    return bool(library.load().functions.plures_place(ctypes.byref(placing)))


def _fill(weight: Tensor, owners: Tensor, member: int, stored: Stored, name: str, added: bool = False) -> None:
    """Write a member's values back to their places; before a given network, differences are added to it.

    They are stored as differences if the file has another precision than the ensemble had.
    """
    filled = weight.detach().cpu().contiguous()
    rows, owned = _rows(filled, owners, member)
    values = stored.read(name, [owned.size * math.prod(rows.shape[1:])])
    if not values.is_floating_point():
        raise PluresError(f"tensor {name!r} has dtype {values.dtype}; expected {weight.dtype}")
    if added and str(values.dtype) != f"torch.{stored.state['base'][name.partition('/')[2]][0]}":
        values = values.to(weight.dtype) + torch.from_numpy(rows[owned].reshape(-1)).view(weight.dtype)
    rows[owned] = _bits(values.to(weight.dtype)).reshape(owned.size, *rows.shape[1:])
    if filled.data_ptr() != weight.data_ptr():  # on another device, or not contiguous
        weight.detach().copy_(filled)  # other threads than the caller's record gradients


def _rows(weight: Tensor, owners: Tensor, member: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """View a weight as rows that have one owner each, kernels or single numbers, and number those of a member."""
    owned: NDArray[np.bool_] = spread(owners.cpu(), weight).numpy() == member
    shape = (owned.size,) if owned.size == weight.numel() else (owned.size, -1)  # numpy is faster with one axis
    return _bits(weight).reshape(shape), np.flatnonzero(owned)


def _bits(tensor: Tensor) -> NDArray[Any]:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()]).numpy()


def _decompressed(place: str, stored: Stored, like: Tensor) -> Tensor:
    """Read the owners of a tensor, and nothing beyond their number: a few bytes can stand for any length."""
    reader = zlib.decompressobj()
    owners = bytearray(reader.decompress(stored.get(place).numpy().tobytes(), like.numel() + 1))
    if len(owners) != like.numel() or not reader.eof:
        raise PluresError(f"tensor {place!r} does not hold the owners of {like.numel()} entries")
    return torch.frombuffer(owners, dtype=torch.uint8).reshape(like.shape)


def digits_per_word(base: int) -> int:
    """Count the base-`base` digits that always fit into 64 bits.

    >>> digits_per_word(5)
    27
    """
    return next(digits for digits in range(64, 0, -1) if base**digits <= 2**64)


def pack(values: Tensor, base: int) -> Tensor:
    """Pack small integers as base-`base` digits into 64-bit words, near log2(base) bits each.

    The words are unsigned numbers stored in int64.
    """
    if not 2 <= base <= 256:
        raise PluresError(f"base={base}: digits are packed in base 2 to 256")
    flat = values.detach().cpu().numpy().astype(np.uint8, copy=False).reshape(-1)
    if flat.size and int(flat.max()) >= base:
        raise PluresError(f"{int(flat.max())} is not a digit of base {base}")
    per_word = digits_per_word(base)
    padded = np.zeros((-(-flat.size // per_word), per_word), np.uint8)
    padded.reshape(-1)[: flat.size] = flat
    words = np.zeros(len(padded), np.uint64)
    for digit in range(per_word - 1, -1, -1):
        words = words * np.uint64(base) + padded[:, digit]
    return torch.from_numpy(words.view(np.int64))


def unpack(words: Tensor, base: int, count: int) -> Tensor:
    """Read `count` digits back from the words that `pack` made."""
    per_word = digits_per_word(base)
    if words.dtype != torch.int64 or words.dim() != 1 or words.numel() != -(-count // per_word):
        raise PluresError(f"{count} digits of base {base} need {-(-count // per_word)} words, not {words.numel()}")
    if not library.why_unavailable():
        unpacked = torch.empty(count, dtype=torch.uint8)
        library.load().run("plures_unpack", filled(Digits, words.contiguous(), unpacked, count, base, per_word))
        return unpacked
    rest, digits = words.numpy().view(np.uint64), np.empty((words.numel(), per_word), np.uint8)
    for place in range(per_word):
        rest, digits[:, place] = np.divmod(rest, np.uint64(base))
    return torch.from_numpy(digits.reshape(-1)[:count])
