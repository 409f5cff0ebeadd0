"""Replace layers in a network's tree of modules, so that it runs on a batch that holds the members one after the other.

Where torch.fx has traced a network, this is for layers that its graph calls; where it cannot, for the whole network.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plures.calling import Arguments, batch_of, logits_of
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.engines.owned.apart import EachMember, private_copy
from plures.methods.orthogonal_dropout.engines.owned.layers import (
    Into,
    MembersNorm,
    OwnedAttention,
    OwnedConvolution,
    OwnedLinear,
)
from plures.methods.orthogonal_dropout.engines.owned.parts import Parts
from plures.methods.orthogonal_dropout.roles import Role

ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.ModuleList)


class Substitutes:
    """Make what runs in the place of each layer, and remember which layers run member by member.

        substitutes = Substitutes(parts)
        layer = substitutes.of("encoder.layers.0.norm1", layer)
        substitutes.one_by_one

    Among the layers of `containers` it looks further; other layers that it does not know run once for each member.
    """

    def __init__(self, parts: Parts, containers: tuple[type[nn.Module], ...] = ENCODERS) -> None:
        self.parts, self.containers = parts, containers
        self.one_by_one: list[str] = []

    def of(self, name: str, layer: nn.Module) -> nn.Module:
        """Give what runs in a layer's place on a batch that holds the members one after the other."""
        parts, prefix = self.parts, f"{name}." if name else ""
        inside = [tensor for tensor in parts.names() if tensor.startswith(prefix)]
        if all(parts.role(tensor) is Role.SHARED for tensor in inside):
            return layer
        made = self._known(name, layer)
        if made is None and isinstance(layer, self.containers) and any("." in t.removeprefix(prefix) for t in inside):
            mine = [tensor for tensor in inside if "." not in tensor.removeprefix(prefix)]
            if all(parts.role(tensor) is Role.SHARED for tensor in mine):
                for child, inner in layer._modules.items():
                    if inner is not None:
                        layer._modules[child] = self.of(f"{prefix}{child}", inner)
                return layer
        if made is None:
            self.one_by_one.append(name)
            copies = [
                private_copy(layer, {tensor.removeprefix(prefix): parts.tensor(tensor, index) for tensor in inside})
                for index in range(len(parts.members))
            ]
            made = EachMember(copies, parts.running)
        made.register_forward_hook(_mark_output)
        return made

    def _known(self, name: str, layer: nn.Module) -> nn.Module | None:
        parts = self.parts
        if not type(layer).__module__.startswith("torch.nn."):
            return None  # a class derived from a layer of torch may do anything
        if OwnedConvolution.fits(layer, parts, name):
            return TiledConvolution(OwnedConvolution(cast(nn.Conv2d, layer), parts, name))
        if OwnedAttention.fits(layer, parts, name):
            return OwnedAttention(cast(nn.MultiheadAttention, layer), parts, name)
        if MembersNorm.fits(layer, parts, name):
            return MembersNorm(layer, parts, name)
        if isinstance(layer, nn.Linear) and parts.role(f"{name}.weight") is Role.SPLIT:
            return OwnedLinear(parts, f"{name}.weight", f"{name}.bias", layer.out_features)
        return None


class TiledConvolution(nn.Module):
    """A convolution of all members over a plain batch that holds them one after the other."""

    def __init__(self, convolution: OwnedConvolution) -> None:
        super().__init__()
        self.convolution = convolution
        self.blocked, self.plain = (Into(layout, convolution.running) for layout in ("blocked", "plain"))

    @property
    def weight(self) -> Tensor:
        """An empty tensor: networks ask a layer's weight for its dtype and device."""
        return self.convolution.weight

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [members * batch, channels, rows, columns]."""
        one = x[: len(x) // self.convolution.running.count]
        result: Tensor = self.plain(self.convolution(self.blocked(x)), one)
        return result


class Tree(nn.Module):
    """A network that torch.fx cannot trace: known layers are replaced, all else runs as it is on the members' batch.

    tree = Tree(network, parts)
    tree(images)  # logits of the first member, then of the second
    tree.one_by_one
    """

    def __init__(self, network: nn.Module, parts: Parts) -> None:
        super().__init__()
        substitutes = Substitutes(parts, (nn.Module,))
        self.running = parts.running
        self.network = substitutes.of("", network)
        self.one_by_one = substitutes.one_by_one

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, one after the other along the batch axis."""
        batch = batch_of(Arguments(args, kwargs))
        tile = Into("tiled", self.running)
        with Watch():
            return logits_of(
                self.network(
                    *(tile(value, batch) for value in args),
                    **{name: tile(value, batch) for name, value in kwargs.items()},
                )
            )


# A tensor's values become Python's, or say which rows go on.
DECISIONS: set[Any] = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.is_nonzero, Tensor.equal, Tensor.allclose, Tensor.nonzero),
    *(Tensor.masked_select, Tensor.unique, Tensor.unique_consecutive, Tensor.argwhere),
    *(torch.is_nonzero, torch.equal, torch.allclose, torch.nonzero, torch.masked_select, torch.unique),
    *(torch.unique_consecutive, torch.argwhere),
}


class Watch(TorchFunctionMode):
    """Refuse that a network decides by values that tell members apart: it would decide once for all of them.

    Such values are what substitutes return, and what is computed from it. What the network decides by its inputs
    alone is the same for every member.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and mark what comes out where something marked went in."""
        kwargs = kwargs or {}
        if not any(hasattr(tensor, "of_members") for tensor in _tensors((args, kwargs))):
            return function(*args, **kwargs)
        selects = function is Tensor.__getitem__ and any(hasattr(t, "of_members") for t in _tensors(args[1]))
        if selects or function in DECISIONS or (function in (torch.where, Tensor.where) and len(args) == 1):
            raise PluresError(
                f"the control flow of the network depends on activations ({getattr(function, '__name__', function)}), "
                'which differ from member to member: use ensemble.engine("unfolded")'
            )
        result = function(*args, **kwargs)
        _mark(args[0] if function is Tensor.__setitem__ else result)
        return result


def _mark(value: Any) -> None:
    for tensor in _tensors(value):
        tensor.of_members = True  # type: ignore[attr-defined]


def _mark_output(_layer: nn.Module, _given: Any, output: Any) -> None:
    _mark(output)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
