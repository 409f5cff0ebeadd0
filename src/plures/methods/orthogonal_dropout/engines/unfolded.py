"""The unfolded engine: each member is a network of its own, at full speed."""

from typing import Any

import torch
from torch import Tensor, nn

from plures.calling import call, logits_of
from plures.methods.orthogonal_dropout.engines.engine import Engine, fold_norms, foldable, remove_norms
from plures.methods.orthogonal_dropout.partition import Split
from plures.tensors import overwrite, own_tensors


class Unfolded(Engine):
    """Predict with each member as a network of its own: k times the memory, nothing to mask.

    engine = ensemble.engine("unfolded")
    """

    kind = "unfolded"

    def __init__(self, split: Split, fold: bool = True) -> None:
        super().__init__()
        self.members = split.trained
        pairs = foldable(split) if fold else {}
        self.networks = nn.ModuleList()
        for member in self.members:
            network = split.checkout(member).requires_grad_(False)
            scales, private = fold_norms(split, member, pairs)
            remove_norms(network, pairs)
            for name, tensor in own_tensors(network).items():
                if name in private:
                    overwrite(tensor, private[name], name)
                elif name in scales:
                    tensor.copy_(tensor * scales[name])
            self.networks.append(network)
        self.eval()

    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""
        return torch.cat([logits_of(call(self.networks[index], batch)) for batch in batches])
