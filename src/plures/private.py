"""The tensors that each member has for itself: norm layers, biases, whatever is too small to split."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Private(nn.Module):
    """Keep one copy per member of some tensors, as rows of one stack each.

    private = Private({"bn.weight": network.bn.weight}, members=5)
    private.rows(2)["bn.weight"]
    """

    def __init__(self, like: Mapping[str, Tensor], members: int) -> None:
        super().__init__()
        self._stack_names = {name: name.replace(".", "/") for name in like}  # a parameter's name has no dots
        for name, tensor in like.items():
            stack = tensor.detach().unsqueeze(0).repeat(members, *[1] * tensor.dim())
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._stack_names[name], nn.Parameter(stack, tensor.requires_grad))
            else:
                self.register_buffer(self._stack_names[name], stack)

    def rows(self, member: int) -> dict[str, Tensor]:
        """Give one member's tensors by name, as views."""
        return {name: getattr(self, stack)[member] for name, stack in self._stack_names.items()}

    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite all tensors of one member."""
        with torch.no_grad():
            for name, row in self.rows(member).items():
                row.copy_(values[name])
