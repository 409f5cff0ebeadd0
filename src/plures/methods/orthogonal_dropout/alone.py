"""One member in a stage of its own, as the training engine sees it: `Members` tells the same of all of them."""

from operator import attrgetter
from typing import cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from plures.methods.orthogonal_dropout.masks import Keep


class Alone:
    """Tell the tensors of a network under masks."""

    members = 1

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def split(self, name: str) -> Tensor:
        """Return a split weight."""
        path, _, attribute = name.rpartition(".")
        return self.network.get_parameter(f"{path}.parametrizations.{attribute}.original".lstrip("."))

    def rows(self, name: str) -> Tensor:
        """Return a tensor that is not split, [members, ...]."""
        return cast(Tensor, attrgetter(name)(self.network))[None]

    def kernels(self, name: str) -> Tensor | None:
        """Return the kernels of a split weight that each member has, [members, outputs, inputs]; None if only parts."""
        path, _, attribute = name.rpartition(".")
        layer = self.network.get_submodule(path)
        if not parametrize.is_parametrized(layer, attribute):
            return None
        mask, *others = cast(nn.ModuleList, cast(nn.ModuleDict, layer.parametrizations)[attribute])
        if not isinstance(mask, Keep) or others or mask.mask[0, 0].numel() > 1:
            return None
        return mask.mask.flatten(1)[None] != 0

    def within(self, path: str, member: int) -> dict[str, Tensor]:
        """Return the tensors of a layer that differ between members."""
        return {}

    def marks(self) -> list[Tensor]:
        """Return the tensors that say what is whose."""
        return [one.mask for one in self.network.modules() if isinstance(one, Keep)]
