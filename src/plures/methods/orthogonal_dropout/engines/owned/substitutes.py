"""Replace layers of a traced network, so that they run on a batch that holds the members one after the other."""

from typing import cast

from torch import nn

from plures.methods.orthogonal_dropout.engines.owned.apart import EachMember, private_copy
from plures.methods.orthogonal_dropout.engines.owned.layers import MembersNorm, OwnedAttention, OwnedLinear
from plures.methods.orthogonal_dropout.engines.owned.parts import Parts
from plures.methods.orthogonal_dropout.roles import Role

ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.ModuleList)


class Substitutes:
    """Make what runs in the place of each layer, and remember which layers run member by member.

        substitutes = Substitutes(parts)
        layer = substitutes.of("encoder.layers.0.norm1", layer)
        substitutes.one_by_one

    In torch's encoders it replaces layer by layer; other layers that it does not know run once for each member.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.one_by_one: list[str] = []

    def of(self, name: str, layer: nn.Module) -> nn.Module:
        """Return what runs in a layer's place on a batch that holds the members one after the other."""
        parts, prefix = self.parts, f"{name}." if name else ""
        inside = [tensor for tensor in parts.names() if tensor.startswith(prefix)]
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
            copies = [
                private_copy(layer, {tensor.removeprefix(prefix): parts.tensor(tensor, index) for tensor in inside})
                for index in range(len(parts.members))
            ]
            made = EachMember(copies, parts.running)
        return made

    def _known(self, name: str, layer: nn.Module) -> nn.Module | None:
        parts = self.parts
        if not type(layer).__module__.startswith("torch.nn.") or "forward" in vars(layer):
            return None  # a class derived from a layer of torch may do anything
        if OwnedAttention.fits(layer, parts, name):
            return OwnedAttention(cast(nn.MultiheadAttention, layer), parts, name)
        if MembersNorm.fits(layer, parts, name):
            return MembersNorm(layer, parts, name)
        if isinstance(layer, nn.Linear) and parts.role(f"{name}.weight") is Role.SPLIT:
            return OwnedLinear(parts, f"{name}.weight", f"{name}.bias", layer.out_features)
        return None
