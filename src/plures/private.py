"""The tensors that each member has for itself: norm layers, biases, whatever is too small to split."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plures.partition import inner_names


class Private(nn.Module):
    """Keep one copy per member of some tensors, as rows of one stack each.

    private = Private({"bn.weight": network.bn.weight}, members=5)
    private.rows(2)["bn.weight"]
    """

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
        """Give one member's tensors by name, as views."""
        return {name: getattr(self, s)[member].view(self._shapes[name]) for name, s in self._stack_names.items()}

    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite all tensors of one member."""
        with torch.no_grad():
            for name, row in self.rows(member).items():
                row.copy_(values[name])
