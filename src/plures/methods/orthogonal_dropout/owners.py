"""Who owns which weight, and the split network as engines and files see it.

One small integer per weight, or per kernel, names its owner: overlap cannot be written down.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from plures.checks import check_members, number, one_of
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import owned_part, spread
from plures.methods.orthogonal_dropout.roles import Role
from plures.native.structures import BLOCK
from plures.seeding import generator
from plures.tensors import inner_names, overwrite, own_tensors

FREE = 255  # the owner of a weight that no member owns yet
Granularity = Literal["weight", "kernel", "block"]
log = logging.getLogger("plures")


class Partition(nn.Module):
    """Store the owner of every split weight; every write is checked.

        partition = Partition({"conv.weight": (64, 3, 3, 3)}, members=5)
        partition.randomise(seed=0)
        partition.owners()["conv.weight"]  # uint8, 0 to 4

    Owners have the shape of the weight with granularity "weight", (outputs, inputs, 1, 1) with "kernel", and with
    "block" an eighth of the outputs in linear layers and 1x1 convolutions: see `owner_shape`. Within a tensor the
    members' sizes differ by at most one. With a share (`set_share`), each member owns so much of every tensor, rounded
    down, and the rest has no owner.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], members: int, granularity: Granularity = "weight") -> None:
        super().__init__()
        check_members(members, least=2)
        one_of("granularity", granularity, get_args(Granularity))
        self.members, self.granularity = members, granularity
        self.share: float | None = None
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
        """Map each split tensor's name to its owners: uint8, 255 if free."""
        return {name: self.get_buffer(buffer) for name, buffer in self._buffer_names.items()}

    def set_share(self, share: float | None) -> None:
        """Set the share of every tensor that a member owns; None divides all of it."""
        self.share = share
        if share is None:
            return
        number("share", share, f"a number above 0 and at most 1/members, {1 / self.members:.3g}", above=0)
        if share * self.members > 1 + 1e-9:
            raise PluresError(f"share={share} of {self.members} members is more than there is: take at most 1/members")
        for name, owners in self.owners().items():
            if not self.budget(name, 0):
                least = 1 / owners.numel()
                raise PluresError(
                    f"share={share} leaves a member none of the {owners.numel()} {self.granularity}s of {name!r}: take "
                    f"at least {least:.2g}, or give it the role 'private'"
                )

    def budget(self, name: str, member: int) -> int:
        """Return how many weights (or kernels) of one tensor a complete member owns."""
        count = self.get_buffer(self._buffer_names[name]).numel()
        return sizes(count, self.members)[member] if self.share is None else int(self.share * count + 1e-9)

    def owned(self, name: str, member: int) -> Tensor:
        """Return the weights of a tensor that a member owns, as a boolean mask."""
        return self.get_buffer(self._buffer_names[name]) == member

    def free(self, name: str) -> Tensor:
        """Return the weights of a tensor that no member owns, as a boolean mask."""
        return self.owned(name, FREE)

    def claimed(self) -> set[int]:
        """List the members that own their share."""
        smallest = min(self.owners().values(), key=Tensor.numel, default=torch.empty(0))
        return {member for member in range(self.members) if bool((smallest == member).any())}

    def claim(self, member: int, chosen: Mapping[str, Tensor]) -> None:
        """Assign weights to a member, one boolean mask per tensor; anything but exactly its share is refused."""
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
        for name, owners in self.owners().items():
            owners.masked_fill_(chosen[name].to(owners.device), member)

    def check(self, owners: Mapping[str, Tensor]) -> None:
        """Refuse owners that are not a partition: every member must have its full share or nothing."""
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
        """Set all owners at once, for example from a file; anything but a partition is refused."""
        self.check(owners)
        for name, given in owners.items():
            self.get_buffer(self._buffer_names[name]).copy_(given)

    def randomise(self, seed: int) -> None:
        """Split every tensor at random into equal shares."""
        each = torch.tensor([*range(self.members), FREE], dtype=torch.uint8)
        for name, current in self.owners().items():
            shares = [self.budget(name, member) for member in range(self.members)]
            in_order = each.repeat_interleave(torch.tensor([*shares, current.numel() - sum(shares)]))
            shuffle = torch.randperm(current.numel(), generator=generator(seed, "partition", name))
            current.copy_(in_order[shuffle].reshape(current.shape))
        self.check(self.owners())


def _check_after_load(partition: Partition, _incompatible: object) -> None:
    partition.check(partition.owners())


def owner_shape(shape: Sequence[int], granularity: Granularity) -> tuple[int, ...]:
    """Return the shape of a weight's owners, which broadcasts against the weight once `spread`.

        >>> owner_shape((64, 3, 3, 3), "kernel")
        (64, 3, 1, 1)
        >>> owner_shape((64, 30), "block")
        (8, 30)

    With "block" eight outputs of one input have one owner in linear layers and 1x1 convolutions; larger kernels have
    one owner each.
    """
    if granularity == "weight":
        return tuple(shape)
    blocks = granularity == "block" and len(shape) > 1 and math.prod(shape[2:]) == 1
    outputs = -(-shape[0] // BLOCK) if blocks else shape[0]
    return (outputs, *shape[1:2], *[1] * len(shape[2:]))


def taken(weights: Mapping[str, Tensor], owners: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what members own of each weight, as vectors; on a meta device, which has no numbers, nothing."""
    found = {}
    for name, each in owners.items():
        weight = weights[name].detach()
        if weight.is_meta:
            found[name] = weight.new_empty(0)
            continue
        kept = weight[(spread(each, weight) != FREE).expand_as(weight)]
        # As long with every seed: the last block of a column may have fewer outputs than the others.
        room = int((each != FREE).sum()) * (weight[0].numel() // each[0].numel())
        found[name] = nn.functional.pad(kept, (0, room * (BLOCK if len(each) != len(weight) else 1) - len(kept)))
    return found


def sizes(count: int, members: int) -> list[int]:
    """Share out a count so that sizes differ by at most one.

    >>> sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    return [count // members + (member < count % members) for member in range(members)]


class Private(nn.Module):
    """Keep one copy per member of some tensors, as rows of one stack each."""

    def __init__(self, like: Mapping[str, Tensor], members: int) -> None:
        super().__init__()
        self._shapes = {name: tensor.shape for name, tensor in like.items()}
        self._stack_names = inner_names(like)
        for name, tensor in like.items():
            # Flat rows: a stack of images' weights would be taken for a video's when the memory format changes.
            stack = tensor.detach().reshape(1, -1).repeat(members, 1)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._stack_names[name], nn.Parameter(stack, tensor.requires_grad))
            else:
                self.register_buffer(self._stack_names[name], stack)

    def rows(self, member: int) -> dict[str, Tensor]:
        """Return one member's tensors by name, as views."""
        return {name: getattr(self, s)[member].view(self._shapes[name]) for name, s in self._stack_names.items()}

    def stack(self, name: str) -> Tensor | None:
        """Return a tensor of all members, [members, ...], as a view, or None if it is not private."""
        if name not in self._stack_names:
            return None
        stack: Tensor = getattr(self, self._stack_names[name])
        return stack.view(len(stack), *self._shapes[name])

    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite all tensors of one member."""
        with torch.no_grad():
            for name, row in self.rows(member).items():
                overwrite(row, values[name], name)


@dataclass(frozen=True)
class SplitNetwork:
    """The parts of a split network, and the members that can predict.

    `network` holds the weights of all members in its split tensors, and in its private ones the values that each member
    starts from. If members see the given network where they own nothing, `background` holds what it had in the places
    that a member owns, one row for each split tensor; otherwise they see zeros.
    """

    network: nn.Module
    roles: Mapping[str, Role]
    partition: Partition
    private: Private
    trained: list[int]
    background: Private | None = None

    def given(self) -> dict[str, Tensor]:
        """Map each split tensor's name to a copy of what was given, if members see it."""
        own = own_tensors(self.network)
        return {} if self.background is None else {name: self.before(name, own[name]) for name in self.owners()}

    def before(self, name: str, weight: Tensor) -> Tensor:
        """Return a copy of a split weight as it was given."""
        kept = cast(Private, self.background).rows(0)[name]
        return weight.detach().clone().masked_scatter_(spread(self.owners()[name] != FREE, weight), kept)

    @property
    def members(self) -> int:
        """How many members there are when all are trained."""
        return self.partition.members

    def owners(self) -> dict[str, Tensor]:
        """Map each split tensor's name to its owners: uint8, 255 if free."""
        return self.partition.owners()

    def member(self, member: int, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors of one member by first names: its weights before the background, its private ones.

        `given` is what `given()` has returned, if it is known.
        """
        values = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        given = self.given() if given is None else given
        for name, owners in self.owners().items():
            values[name] = owned_part(values[name], owners, member, given.get(name))
        return values | self.private.rows(member)

    def checkout(self, member: int) -> nn.Module:
        """Make a plain network of one member, in eval mode, with tensors of its own."""
        return refilled(self.network, self.member(member)).eval()

    def checkouts(self) -> list[nn.Module]:
        """Make a plain network of each trained member, for prediction; what is shared is one tensor in all of them."""
        shared = {id(one): one for name, one in own_tensors(self.network).items() if self.roles[name] is Role.SHARED}
        given = self.given()
        made = [refilled(self.network, self.member(member, given), shared) for member in self.trained]
        return [network.eval().requires_grad_(False) for network in made]

    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Write what a member owns, and nothing else: the others stay bit-identical by construction.

        A value is a whole weight, or a vector of what the member owns of it.
        """
        with torch.no_grad():
            for name, weight in own_tensors(self.network).items():
                if name in self.owners():
                    value = values[name].to(weight.device, weight.dtype)
                    mine = spread(self.partition.owned(name, member), weight).expand_as(weight)
                    weight.masked_scatter_(mine, value[mine] if value.shape == weight.shape else value)
        self.private.write(member, values)


def refilled(network: nn.Module, values: Mapping[str, Tensor], kept: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Copy a network with other values in its tensors, by their first names; `kept` are its own, by their id."""
    result = copy.deepcopy(network, dict(kept or {}))
    with torch.no_grad():
        for name, tensor in own_tensors(result).items():
            if kept is None or id(tensor) not in kept:
                overwrite(tensor, values[name], name)
    return result
