"""The unfolded engine: each member is a network of its own, with batch norms folded into the convolutions before."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from plures.graph import Graph
from plures.methods.orthogonal_dropout.engines.engine import Engine, MemberComparison
from plures.methods.orthogonal_dropout.engines.layers import Parts
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.tensors import own_tensors
from plures.trunk import of_networks


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
        networks = split.checkouts()
        parts = Parts(split, pairs)
        for index, network in enumerate(networks):
            for name, norm in pairs.items():
                convolution = cast(nn.Conv2d, network.get_submodule(name))
                convolution.weight.copy_(parts.tensor(f"{name}.weight", index))
                bias = parts.tensor(f"{name}.bias", index).to(convolution.weight.dtype)
                convolution.bias = nn.Parameter(bias, requires_grad=False)
                network.set_submodule(norm, nn.Identity())
        self.networks = nn.ModuleList(networks)
        self._comparison = MemberComparison(split) if pairs else None
        self.eval()

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined: members outside, batches inside."""
        return of_networks(self, self.networks, indices, batches)

    def _run_members_apart(self, split: SplitNetwork) -> None:
        self.networks = nn.ModuleList(split.checkouts())


def foldable(split: SplitNetwork, graph: Graph | None) -> dict[str, str]:
    """Return the convolutions that take in the batch norm after them: name of the one -> name of the other.

    A network without a graph has none. Shared weights stay shared, and low precision would round twice.
    """
    exact = [name for name, t in own_tensors(split.network).items() if t.dtype in (torch.float32, torch.float64)]
    weights = {name for name in exact if split.roles[name] is not Role.SHARED}
    pairs = {} if graph is None else graph.folds()
    return {convolution: norm for convolution, norm in pairs.items() if f"{convolution}.weight" in weights}
