"""The unfolded engine: each member is a network of its own, at full speed."""

from typing import Any

import torch
from torch import Tensor, nn

from plures.calling import call, copied, logits_of
from plures.graph import Graph
from plures.methods.orthogonal_dropout.engines.comparing import MemberComparison
from plures.methods.orthogonal_dropout.engines.engine import Engine
from plures.methods.orthogonal_dropout.engines.folding import fold_norms, foldable, remove_norms
from plures.methods.orthogonal_dropout.partition import SplitNetwork
from plures.tensors import overwrite, own_tensors


class Unfolded(Engine):
    """Predict with each member as a network of its own: k times the memory, nothing to mask.

        engine = ensemble.engine("unfolded")

    It is compared with the members if batch norms were folded; otherwise it consists of them.
    """

    kind = "unfolded"

    def __init__(self, split: SplitNetwork, graph: Graph | None = None) -> None:
        super().__init__()
        self.members = split.trained
        pairs = foldable(split, graph)
        networks = [split.checkout(member).requires_grad_(False) for member in self.members]
        for member, network in zip(self.members, networks, strict=True):
            scales, private = fold_norms(split, member, pairs)
            remove_norms(network, pairs)
            for name, tensor in own_tensors(network).items():
                if name in private:
                    overwrite(tensor, private[name], name)
                elif name in scales:
                    tensor.copy_(tensor * scales[name])
        self.networks = nn.ModuleList(networks)
        self._comparison = MemberComparison(split) if pairs else None
        self.eval()

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined: members outside, batches inside."""
        return torch.stack([self._run(self.networks[index], batches) for index in indices])

    def _run(self, network: nn.Module, batches: list[Any]) -> Tensor:
        return torch.cat([logits_of(call(network, copied(batch))) for batch in batches])

    def _run_members_apart(self, split: SplitNetwork) -> None:
        self.networks = nn.ModuleList(split.checkout(member).requires_grad_(False) for member in self.members)
