"""What the members have of a network's tensors."""

import torch
from torch import Tensor, nn

from plures.methods.orthogonal_dropout.masks import owned_part, spread
from plures.methods.orthogonal_dropout.partition import SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.native.structures import Lists, block_lists, kernel_lists
from plures.tensors import canonical, own_tensors


class OfMembers(nn.Module):
    """A layer with tables that have a row for each of the `count` members that run."""

    def __init__(self, count: int, **tables: Tensor) -> None:
        super().__init__()
        self.count = count
        self.tables = tuple(tables)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def choose(self, indices: list[int]) -> None:
        """Keep the rows of some members: only these run from now on."""
        self.count = len(indices)
        for name in self.tables:
            self.register_buffer(name, getattr(self, name)[indices], persistent=False)


class Parts:
    """The tensors of each member by name, as an engine needs them to build its layers."""

    def __init__(self, split: SplitNetwork, folded: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        self.members = split.trained
        self.owners = split.owners()
        self.roles = split.roles
        self._first = canonical(split.network)
        self._own = {name: tensor.detach() for name, tensor in own_tensors(split.network).items()}
        self._private = [private for _, private in folded]
        self._scales = [scales for scales, _ in folded]

    def first(self, name: str) -> str:
        """Return the first name of a tensor that may be tied."""
        return self._first.get(name, name)

    def role(self, name: str) -> Role | None:
        """Return a tensor's role, or None if the network has no tensor of this name."""
        return self.roles.get(self.first(name))

    def own(self, name: str) -> Tensor | None:
        """Return a tensor of the split network, or None if it has none of this name."""
        return self._own.get(self.first(name))

    def stack(self, name: str) -> Tensor | None:
        """Return what each member has of a tensor that is not split, [members, ...]; None if there is no tensor."""
        first = self.first(name)
        if first in self._private[0]:
            return torch.stack([private[first] for private in self._private])
        return self._own[first].expand(len(self.members), *self._own[first].shape) if first in self._own else None

    def inside(self, prefix: str) -> list[str]:
        """Return the names of all tensors in a layer, tied ones under each of their names."""
        return [name for name in self._first if name.startswith(prefix)]

    def tensor(self, name: str, index: int) -> Tensor:
        """Return one member's whole tensor, as `checkout` does."""
        first = self.first(name)
        if first in self._private[index]:
            return self._private[index][first]
        if first not in self.owners:
            return self._own[first]
        part = owned_part(self._own[first], self.owners[first], self.members[index])
        return part * self._scales[index][name] if name in self._scales[index] else part

    def lists(self, weight: str) -> Lists:
        """Return what each member owns of a split weight, with the factors of a norm layer that was folded into it."""
        first = self.first(weight)
        values, owners = self._own[first], self.owners[first]
        scales = [scales[weight].flatten() for scales in self._scales if weight in scales]
        factors = torch.stack(scales) if scales else None
        in_blocks = values.dim() == 2 and len(owners) != len(values)
        owners = owners if in_blocks else spread(owners, values)
        return (block_lists if in_blocks else kernel_lists)(values, owners, self.members, factors)

    def bias(self, name: str, outputs: int) -> Tensor:
        """Return the bias of each member, [members, outputs]; zeros if the layer has none."""
        stack = self.stack(name)
        return torch.zeros(len(self.members), outputs) if stack is None else stack.float().contiguous()
