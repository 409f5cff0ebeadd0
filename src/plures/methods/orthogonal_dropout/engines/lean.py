"""The lean engine: all members in little more than the memory of one network."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plures.calling import call_with, logits_of
from plures.methods.orthogonal_dropout.engines.engine import Engine, fold_norms, foldable, remove_norms
from plures.methods.orthogonal_dropout.masks import cut, plain, put_on, spread
from plures.methods.orthogonal_dropout.partition import Private, Split
from plures.tensors import inner_names, own_tensors, places, shell


class Lean(Engine):
    """Predict in little more than the memory of one network: each layer is masked when it runs.

        engine = ensemble.engine("lean")
        del ensemble  # the engine keeps the weights, and packs their owners closer

    The same bits come out as of `Unfolded`.
    """

    kind = "lean"

    def __init__(self, split: Split, fold: bool = True) -> None:
        super().__init__()
        self.members = split.trained
        pairs = foldable(split) if fold else {}
        folded = [fold_norms(split, member, pairs) for member in self.members]
        self.network = shell(split.network)  # another structure around the same tensors
        _detach(self.network)
        remove_norms(self.network, pairs)
        self.private = Private(folded[0][1], len(folded))
        for index, (_, private) in enumerate(folded):
            self.private.write(index, private)
        self._places = places(self.network)
        self._inner = inner_names(split.owners())
        self.owned = nn.ModuleDict()
        weights = own_tensors(split.network)
        for name, owners in split.owners().items():
            scales = [scales[name] for scales, _ in folded if name in scales]
            self.owned[self._inner[name]] = Owned(
                PackedOwners(spread(owners, weights[name]), split.members), self.members, scales
            )
        self.eval()
        self._lender.lend(self, self._structure, lambda structure: None)  # makes one for the compiler, which cannot

    def _structure(self) -> tuple[nn.Module, nn.ModuleDict]:
        """Make what a call runs: the network under masks, which are set to the member to cut out."""
        network, owned = shell((self.network, self.owned))
        put_on(network, {name: owned[inner] for name, inner in self._inner.items()}, self._places)
        return network, owned

    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""

        def masked(structure: tuple[nn.Module, nn.ModuleDict]) -> Tensor:
            network, owned = structure
            for mask in owned.values():
                mask.index = index  # type: ignore[assignment]
            rows = self.private.rows(index)
            return torch.cat([logits_of(call_with(network, rows, self._places, batch)) for batch in batches])

        if torch.compiler.is_compiling():
            return masked(self._lender._idle[0][1] if self._lender._idle else self._structure())
        return self._lender.lend(self, self._structure, masked)


def _detach(network: nn.Module) -> None:
    """Give a structure parameters of its own around the same memory: the ensemble's may still be trained."""
    same: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = same.setdefault(id(parameter), nn.Parameter(parameter.detach(), False))


class Owned(nn.Module):
    """A mask that cuts out whichever member runs, and scales it as the folded norm layer would.

    mask = Owned(PackedOwners(owners, members=5), members=[0, 1, 2, 3, 4], scales=[])
    """

    scales: Tensor | None

    def __init__(self, owners: "PackedOwners", members: list[int], scales: list[Tensor]) -> None:
        super().__init__()
        self.owners = owners
        self.members = members
        self.register_buffer("scales", torch.stack([scale.flatten() for scale in scales]) if scales else None)
        self.index = 0

    def forward(self, weight: Tensor) -> Tensor:
        """Cut the member out of the weight."""
        scale = None if self.scales is None else self.scales[self.index].view(-1, *[1] * (weight.dim() - 1))
        return self.owners.owned_part(weight, self.members[self.index], scale)


class PackedOwners(nn.Module):
    """Hold the owners of a weight in half a byte each, where there are at most 15 members.

        part = PackedOwners(owners, members=5).owned_part(weight, member=2)

    A byte holds the owner of a weight in the first half of the rows and of one in the second half, so that a
    run of rows unpacks by one operation.
    """

    packed: Tensor

    def __init__(self, owners: Tensor, members: int) -> None:
        super().__init__()
        self.rows = owners.shape[0]
        self.halves = members <= 15  # a free weight's 255 becomes 15, which is not a member either
        if self.halves:
            first, second = owners[: (self.rows + 1) // 2] & 15, owners[(self.rows + 1) // 2 :] & 15
            owners = first.clone()
            owners[: len(second)] |= second << 4
        self.register_buffer("packed", owners)

    def owned_part(self, weight: Tensor, member: int, scale: Tensor | None = None) -> Tensor:
        """Cut one member out of a weight, positive zeros elsewhere, and multiply it by a scale that broadcasts."""
        if plain(weight):
            return cut(weight, lambda rows: self._mine(rows, member), scale)
        owners = torch.cat([self.packed & 15, self.packed >> 4])[: self.rows] if self.halves else self.packed
        part = weight.clone().masked_fill_(owners != member, 0.0)  # a clone keeps the layout
        return part if scale is None else part.mul_(scale)

    def _mine(self, rows: slice, member: int) -> NDArray[np.bool_]:
        owners: NDArray[Any] = self.packed.numpy()
        if self.halves:
            half = len(owners)
            low = owners[rows.start : min(rows.stop, half)] & 15
            high = owners[max(rows.start - half, 0) : max(rows.stop - half, 0)] >> 4
            owners = np.concatenate([low, high]) if len(low) and len(high) else low if len(low) else high
        else:
            owners = owners[rows]
        mine: NDArray[np.bool_] = np.equal(owners, member)
        return mine
