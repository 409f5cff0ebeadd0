"""What runs on a batch that holds the members one after the other, and what runs member by member."""

import copy
from collections.abc import Iterable
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from plures.calling import Arguments, call, rows_of
from plures.errors import PluresError
from plures.graph import is_of_torch
from plures.methods.orthogonal_dropout.engines.engine import size_of
from plures.methods.orthogonal_dropout.engines.layers import MembersNorm, OwnedAttention, OwnedLinear
from plures.methods.orthogonal_dropout.engines.parts import OfMembers, Parts
from plures.methods.orthogonal_dropout.roles import Role

ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.ModuleList)


class EachMember(OfMembers):
    """Run a layer once for each member, as the unfolded engine does: for layers that the kernels do not know."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(len(layers))
        self.layers = nn.ModuleList(layers)

    def choose(self, indices: list[int]) -> None:
        """Keep the layers of some members."""
        super().choose(indices)
        self.layers = nn.ModuleList(self.layers[index] for index in indices)

    def __getattr__(self, name: str) -> Any:
        """Return what torch's encoders ask a layer for, such as its dtype, from the first member's."""
        layers = self.__dict__.get("_modules", {}).get("layers")
        if name == "layers" or name.startswith("__") or layers is None:
            return super().__getattr__(name)
        return getattr(layers[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the batch into members, run each, and join what comes out."""
        given = Arguments(args, kwargs)
        size = size_of(given) // self.count
        parts = [rows_of(given, slice(turn * size, (turn + 1) * size)) for turn in range(self.count)]
        return joined(list(map(call, self.layers, parts)))


def joined(results: list[Any]) -> Any:
    """Join what members returned along the batch axis; tuples part by part."""
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    if type(results[0]) in (tuple, list):
        return type(results[0])(joined(list(parts)) for parts in zip(*results, strict=True))
    if not all(result is results[0] or result == results[0] for result in results):
        raise PluresError(f"outputs of type {type(results[0]).__name__} cannot be joined over the members")
    return results[0]


class Apart:
    """What each of the running members has, one after the other."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)


class MembersTensor(OfMembers):
    """Return a tensor that each member has for itself."""

    stack: Tensor

    def forward(self) -> Apart:
        """Return the tensors of the members that run."""
        return Apart(self.stack)


class EachCall(OfMembers):
    """Call a function, or a method by name, once for each member."""

    def __init__(self, count: int, function: Any) -> None:
        super().__init__(count)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Apart:
        """Return what comes out for each member."""
        return Apart(map(self._of, range(self.count), repeat((args, kwargs))))

    def _of(self, index: int, given: Any) -> Any:
        args, kwargs = map_aggregate(given, lambda value: value.values[index] if isinstance(value, Apart) else value)
        if isinstance(self.function, str):
            return getattr(args[0], self.function)(*args[1:], **kwargs)
        return self.function(*args, **kwargs)


class Substitutes:
    """Make what runs in the place of each layer, and remember which layers run member by member.

    In torch's encoders it replaces layer by layer; other layers that it does not know run once for each member.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.one_by_one: list[str] = []

    def of(self, name: str, layer: nn.Module) -> nn.Module:
        """Return what runs in a layer's place on a batch that holds the members one after the other."""
        parts, prefix = self.parts, f"{name}." if name else ""
        inside = parts.inside(prefix)
        if all(parts.role(tensor) is Role.SHARED for tensor in inside):
            return layer
        made = self._known(name, layer)
        if made is None and type(layer) in ENCODERS and any("." in t.removeprefix(prefix) for t in inside):
            mine = [tensor for tensor in inside if "." not in tensor.removeprefix(prefix)]
            if all(parts.role(tensor) is Role.SHARED for tensor in mine):
                for child, inner in layer._modules.items():
                    if inner is not None:
                        layer._modules[child] = self.of(f"{prefix}{child}", inner)
                return layer
        if made is None:
            self.one_by_one.append(name)
            made = EachMember([self._copy(layer, prefix, index) for index in range(len(parts.members))])
        return made

    def _copy(self, layer: nn.Module, prefix: str, index: int) -> nn.Module:
        """Copy a layer with a member's tensors in it."""
        made = copy.deepcopy(layer)
        for name, tensor in made.state_dict().items():
            if self.parts.own(f"{prefix}{name}") is not None:
                tensor.copy_(self.parts.tensor(f"{prefix}{name}", index))
        return made.requires_grad_(False).eval()

    def _known(self, name: str, layer: nn.Module) -> nn.Module | None:
        parts = self.parts
        if not is_of_torch(layer):
            return None
        if OwnedAttention.fits(layer, parts, name):
            return OwnedAttention(cast(nn.MultiheadAttention, layer), parts, name)
        if MembersNorm.fits(layer):
            return MembersNorm(layer, parts, name)
        if isinstance(layer, nn.Linear) and parts.role(f"{name}.weight") is Role.SPLIT:
            return OwnedLinear(parts, f"{name}.weight", f"{name}.bias", layer.out_features)
        return None
