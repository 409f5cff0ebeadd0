"""All members in one stage: one weight tensor, one gradient and one optimizer state for all of them.

No two members share a weight, so each weight gets the gradient that it would get if its owner were trained alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from plures.calling import Arguments, Lender, call_with, copied, logits_of
from plures.methods.building import TogetherStage
from plures.methods.orthogonal_dropout.masks import spread
from plures.methods.orthogonal_dropout.owners import Private, SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.methods.orthogonal_dropout.sequential import settled
from plures.stage import Stage, other_start, refuse_other_shared
from plures.tensors import own_tensors, places, shell, tensors
from plures.trunk import Run, Trunk


class Members(nn.Module):
    """Run all members of a split network on the same batch, with gradients.

    `network` has every split weight once, `private` a row for each member of every private tensor. What comes before
    the first tensor that differs between members runs once for all of them.
    """

    def __init__(self, split: SplitNetwork, network: nn.Module, private: Private) -> None:
        super().__init__()
        self.network, self.private = network, private
        self._names = {name: f"owners_{index}" for index, name in enumerate(split.owners())}
        for name, owners in split.owners().items():
            self.register_buffer(self._names[name], owners.clone())
        self._given = {name: f"given_{index}" for index, name in enumerate(split.given())}
        for name, value in split.given().items():
            self.register_buffer(self._given[name], value, persistent=False)
        self.members = split.members
        self._places = places(network)
        self._shared = [place for place, first in self._places.items() if split.roles[first] is Role.SHARED]
        self._lender: Lender[Trunk] = Lender()
        for module in network.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # a row of all members' weights has a dense gradient
        for name, tensor in tensors(network).items():
            if split.roles[name] is not Role.SPLIT:
                tensor.requires_grad_(False)  # shared, or in the place of private rows

    def owners(self) -> dict[str, Tensor]:
        """Map each split tensor's name to its owners."""
        return {name: self.get_buffer(buffer) for name, buffer in self._names.items()}

    def given(self) -> dict[str, Tensor]:
        """Map each split tensor's name to the values that were given, if members see them."""
        return {name: self.get_buffer(buffer) for name, buffer in self._given.items()}

    def member(self, member: int) -> dict[str, Tensor]:
        """Return the tensors of one member by name: its weights before the background, and its private ones."""
        return {name: self._part(name, member) for name in self._names} | self.private.rows(member)

    def _part(self, name: str, member: int) -> Tensor:
        weight = self.split(name)
        mine = spread(self.get_buffer(self._names[name]), weight) == member
        if name in self._given:
            return torch.where(mine, weight, self.get_buffer(self._given[name]))
        return weight * mine.to(weight.dtype)

    # What the training engine asks for.

    def split(self, name: str) -> Tensor:
        """Return the weight of all members."""
        return self.network.get_parameter(self._places[name])

    def rows(self, name: str) -> Tensor:
        """Return a tensor that is not split, [members, ...]."""
        stack = self.private.stack(self._places[name])
        if stack is not None:
            return stack
        shared: Tensor = attrgetter(name)(self.network)
        return shared.expand(self.members, *shared.shape)

    def kernels(self, name: str) -> Tensor | None:
        """Return the kernels of a split weight that each member has, [members, outputs, inputs]; None if only parts."""
        first = self._places[name]
        if first not in self._names:
            return None
        owners = spread(self.get_buffer(self._names[first]), self.split(first))
        if owners.dim() < 2 or owners[0, 0].numel() > 1:
            return None
        each = torch.arange(self.members, dtype=owners.dtype, device=owners.device)
        return owners.flatten(1) == each[:, None, None]

    def within(self, path: str, member: int) -> dict[str, Tensor]:
        """Return the tensors of a layer, or the one of this name, that a member has for itself."""
        own = {}
        for place, first in self._places.items():
            if place == path or place.startswith(f"{path}."):
                inner = place.removeprefix(path).lstrip(".")
                if first in self._names:
                    own[inner] = self._part(first, member)
                elif (stack := self.private.stack(first)) is not None:
                    own[inner] = stack[member]
        return own

    def marks(self) -> list[Tensor]:
        """Return the tensors that say what is whose."""
        return list(self.owners().values())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        inputs = Arguments(args, kwargs)
        if not self._shared or torch.compiler.is_compiling():
            return torch.stack([self._ready(self.network, member)(copied(inputs)) for member in range(self.members)])

        differing = self._places.keys() - set(self._shared)
        return self._lender.lend(
            self,
            lambda: Trunk([shell(self.network)], differing, training=True),
            lambda trunk: trunk.trained(
                inputs, [partial(self._ready, trunk.networks[0], member) for member in range(self.members)]
            ),
            [attrgetter(place)(self.network) for place in self._shared],
        )

    def _ready(self, network: nn.Module, member: int) -> Run:
        values = self.member(member)
        return lambda batch: logits_of(call_with(network, values, self._places, batch))


class MembersStage(TogetherStage):
    """Train all members on every batch. The loss is the sum of theirs: their mean would slow each of them down."""

    reduction = "sum"


def starts(split: SplitNetwork, networks: Sequence[nn.Module]) -> Members:
    """Make the network of a stage from one network for each member, which it starts from."""
    own = [own_tensors(one) for one in networks]
    with torch.no_grad():
        for name, owners in split.owners().items():
            weight = own[0][name]
            for member, values in enumerate(own):
                weight.copy_(torch.where(spread(owners, weight) == member, values[name], weight))
        mine = {name: one for name, one in own[0].items() if split.roles[name] is Role.PRIVATE}
        private = Private(mine, split.members)
        for member, values in enumerate(own):
            private.write(member, values)
    return Members(split, networks[0], private)


def write(stage: Stage, split: SplitNetwork, before: Sequence[Mapping[str, Tensor]]) -> None:
    """Write what a stage has trained into the split network; refuse another start than the ensemble's.

    `before` are the statistics of each member's batch norms when the stage was opened.
    """
    trained = cast(Members, stage.network)
    values, own = own_tensors(trained.network), own_tensors(split.network)
    shared = {name: own[name] for name in own if split.roles[name] is Role.SHARED} | split.given()
    refuse_other_shared(stage, shared, values | trained.given())
    for name, owners in trained.owners().items():
        if not owners.equal(split.owners()[name].to(owners.device)):
            raise other_start(stage, f"the owners of {name!r}")
    for member in range(split.members):
        rows = trained.private.rows(member)
        split.write(member, values | rows | settled(trained.network, rows, before[member]))
