"""A split network as engines and files see it: the weights of all members in one, their owners, what is private."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plures.methods.orthogonal_dropout.masks import owned_part
from plures.methods.orthogonal_dropout.partition import Partition, Private
from plures.methods.orthogonal_dropout.roles import Role
from plures.tensors import overwrite, own_tensors


@dataclass(frozen=True)
class Split:
    """The parts of a split network, and the members that can predict.

        split = ensemble.split
        network = split.checkout(split.trained[0])

    `network` holds the weights of all members in its split tensors, and in its private ones the values that each member
    starts from.
    """

    network: nn.Module
    roles: Mapping[str, Role]
    partition: Partition
    private: Private
    trained: list[int]

    @property
    def members(self) -> int:
        """How many members there are when all are trained."""
        return self.partition.members

    def owners(self) -> dict[str, Tensor]:
        """Map each split tensor's name to its owners: uint8, 255 where free."""
        return self.partition.owners()

    def member(self, member: int) -> dict[str, Tensor]:
        """Give the tensors of one member by their first names: its weights, zero elsewhere, and its private ones."""
        values = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        for name, owners in self.owners().items():
            values[name] = owned_part(values[name], owners, member)
        return values | self.private.rows(member)

    def checkout(self, member: int) -> nn.Module:
        """Make a plain network of one member, in eval mode, with tensors of its own."""
        return refilled(self.network, self.member(member)).eval()

    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Write what a member owns, and nothing else: the others stay bit-identical by construction."""
        with torch.no_grad():
            for name, weight in own_tensors(self.network).items():
                if name in self.owners():
                    value = values[name].to(weight.device, weight.dtype)
                    weight.copy_(torch.where(self.partition.owned(name, member), value, weight))
        self.private.write(member, values)


def refilled(network: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a network with other values in its tensors, by their first names.

    member = refilled(network, split.member(2))
    """
    result = copy.deepcopy(network)
    with torch.no_grad():
        for name, tensor in own_tensors(result).items():
            overwrite(tensor, values[name], name)
    return result
