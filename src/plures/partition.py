"""Who owns which weight: one small integer per weight, or per kernel. Overlap cannot be written down."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from plures.errors import PluresError

FREE = 255  # the owner of a weight that no member owns yet
Granularity = Literal["weight", "kernel"]


class Partition(nn.Module):
    """Keep the owner of every split weight; every write is checked.

        partition = Partition({"conv.weight": (64, 3, 3, 3)}, members=5)
        partition.randomise(seed=0)
        partition.owners()["conv.weight"]  # uint8, 0 to 4

    Owners have the shape of the weight with granularity "weight", and (outputs, inputs, 1, 1) with "kernel": they
    broadcast against the weight either way, so a coarser structure is one more rule in `owner_shape`. Within a
    tensor the members' sizes differ by at most one.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], members: int, granularity: Granularity = "weight") -> None:
        super().__init__()
        if not isinstance(members, int) or not 2 <= members <= 255:
            raise PluresError(f"members={members!r}: a network splits into 2 to 255 members")
        if granularity not in get_args(Granularity):
            raise PluresError(f"granularity={granularity!r}; use one of {', '.join(get_args(Granularity))}")
        self.members = members
        self.granularity = granularity
        self._buffer_names = inner_names(shapes)
        for name, shape in shapes.items():
            owners = torch.full(owner_shape(shape, granularity), FREE, dtype=torch.uint8)
            if owners.numel() < members:
                raise PluresError(
                    f"{name!r} has {owners.numel()} {granularity}s and cannot be split among {members} members; "
                    "give it the role 'private'"
                )
            self.register_buffer(self._buffer_names[name], owners)
        self.register_load_state_dict_post_hook(_check_after_load)  # type: ignore[no-untyped-call]

    def owners(self) -> dict[str, Tensor]:
        """Map each split tensor's name to its owners: uint8, 255 where free."""
        return {name: self.get_buffer(buffer) for name, buffer in self._buffer_names.items()}

    def budget(self, name: str, member: int) -> int:
        """Count the weights (or kernels) of one tensor that a member owns when it is complete."""
        return sizes(self.get_buffer(self._buffer_names[name]).numel(), self.members)[member]

    def owned(self, name: str, member: int) -> Tensor:
        """Tell where a member owns a tensor, as a boolean mask."""
        return self.get_buffer(self._buffer_names[name]) == member

    def free(self, name: str) -> Tensor:
        """Tell where nobody owns a tensor, as a boolean mask."""
        return self.owned(name, FREE)

    def claim(self, member: int, chosen: Mapping[str, Tensor]) -> None:
        """Give a member its weights, one boolean mask per tensor; refuse anything but exactly its share."""
        if set(chosen) != set(self._buffer_names):
            raise PluresError(f"member {member} must choose from every split tensor, and from no other")
        for name, mask in chosen.items():
            owners = self.get_buffer(self._buffer_names[name])
            if mask.shape != owners.shape or mask.dtype != torch.bool:
                raise PluresError(f"the choice for {name!r} must be a boolean mask of shape {tuple(owners.shape)}")
            if bool((mask.to(owners.device) & (owners != FREE)).any()):
                raise PluresError(f"member {member} chose weights of {name!r} that another member owns")
            if int(mask.sum()) != self.budget(name, member):
                raise PluresError(
                    f"member {member} chose {int(mask.sum())} of {name!r}; its share is {self.budget(name, member)}"
                )
        for name, mask in chosen.items():
            owners = self.get_buffer(self._buffer_names[name])
            owners.masked_fill_(mask.to(owners.device), member)

    def release(self, member: int) -> None:
        """Free all weights of a member."""
        for owners in self.owners().values():
            owners.masked_fill_(owners == member, FREE)

    def check(self, owners: Mapping[str, Tensor]) -> None:
        """Refuse owners that are no partition: every member has all of its share or nothing."""
        if set(owners) != set(self._buffer_names):
            raise PluresError("owners must be given for every split tensor, and for no other")
        for name, given in owners.items():
            buffer = self.get_buffer(self._buffer_names[name])
            if given.shape != buffer.shape or given.dtype != torch.uint8:
                raise PluresError(f"owners of {name!r} must be uint8 of shape {tuple(buffer.shape)}")
            values = given.cpu().numpy()
            count = {member: np.count_nonzero(values == member) for member in (*range(self.members), FREE)}
            if sum(count.values()) != values.size:
                raise PluresError(f"owners of {name!r} name a member beyond {self.members - 1}")
            for member in range(self.members):
                if count[member] not in (0, self.budget(name, member)):
                    raise PluresError(
                        f"member {member} owns {count[member]} of {name!r}; its share is {self.budget(name, member)}"
                    )

    def assign(self, owners: Mapping[str, Tensor]) -> None:
        """Write all owners at once, from a file for example; refuse what is no partition."""
        self.check(owners)
        for name, given in owners.items():
            self.get_buffer(self._buffer_names[name]).copy_(given)

    def randomise(self, seed: int) -> None:
        """Split every tensor at random into equal shares."""
        owners = {}
        for name, current in self.owners().items():
            shares = torch.tensor(sizes(current.numel(), self.members))
            in_order = torch.arange(self.members, dtype=torch.uint8).repeat_interleave(shares)
            shuffle = torch.randperm(current.numel(), generator=generator(seed, "partition", name))
            owners[name] = in_order[shuffle].reshape(current.shape)
        self.assign(owners)


def _check_after_load(partition: Partition, _incompatible: object) -> None:
    partition.check(partition.owners())


def inner_names(names: Iterable[str]) -> dict[str, str]:
    """Give tensors names under which a module can register them: without dots, and never an attribute's.

    >>> inner_names(["bn.weight"])
    {'bn.weight': '0:bn/weight'}
    """
    return {name: f"{index}:{name.replace('.', '/')}" for index, name in enumerate(names)}


def owner_shape(shape: Sequence[int], granularity: Granularity) -> tuple[int, ...]:
    """Give the shape of a weight's owners, which broadcasts against the weight.

    >>> owner_shape((64, 3, 3, 3), "kernel")
    (64, 3, 1, 1)
    """
    if granularity == "weight":
        return tuple(shape)
    return tuple(shape[:2]) + (1,) * len(shape[2:])


def sizes(count: int, members: int) -> list[int]:
    """Share out a count so that sizes differ by at most one.

    >>> sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    return [count // members + (member < count % members) for member in range(members)]


def generator(seed: int, *key: object) -> torch.Generator:
    """Make the random generator of one purpose: the same seed and key always give the same numbers.

    torch.randn(3, generator=generator(0, "member", 2))
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *key))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


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
