"""The unfolded engine: each member is a network of its own, with batch norms folded into the convolutions before."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.calling import call, copied, logits_of
from plures.graph import Graph
from plures.methods.orthogonal_dropout.engines.engine import Engine, MemberComparison
from plures.methods.orthogonal_dropout.partition import SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
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
            for name, norm in pairs.items():
                convolution = cast(nn.Conv2d, network.get_submodule(name))
                if convolution.bias is None:
                    zeros = convolution.weight.detach().new_zeros(convolution.out_channels)
                    convolution.bias = nn.Parameter(zeros, requires_grad=False)
                network.set_submodule(norm, nn.Identity())
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
        networks = [self.networks[index] for index in indices]
        return torch.stack([torch.cat([logits_of(call(one, copied(batch))) for batch in batches]) for one in networks])

    def _run_members_apart(self, split: SplitNetwork) -> None:
        self.networks = nn.ModuleList(split.checkout(member).requires_grad_(False) for member in self.members)


def foldable(split: SplitNetwork, graph: Graph | None) -> dict[str, str]:
    """Return the convolutions that take in the batch norm after them: name of the one -> name of the other.

    A network without a graph has none. Shared weights stay shared, and low precision would round twice.
    """
    exact = [name for name, t in own_tensors(split.network).items() if t.dtype in (torch.float32, torch.float64)]
    weights = {name for name in exact if split.roles[name] is not Role.SHARED}
    pairs = {} if graph is None else graph.folds()
    return {convolution: norm for convolution, norm in pairs.items() if f"{convolution}.weight" in weights}


def fold_norms(
    split: SplitNetwork, member: int, pairs: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the factors of each convolution that takes its norm layer in, and the private tensors that remain."""
    values = {name: t.detach() for name, t in (own_tensors(split.network) | split.private.rows(member)).items()}
    private = {name: values[name] for name in split.private.rows(member)}
    scales = {}
    for convolution, norm in pairs.items():
        layer = cast(_BatchNorm, split.network.get_submodule(norm))
        mean, variance = values[f"{norm}.running_mean"], values[f"{norm}.running_var"]
        scale = torch.rsqrt(variance + layer.eps) * values.get(f"{norm}.weight", torch.ones_like(mean))
        bias = values.get(f"{convolution}.bias", torch.zeros_like(mean))
        shift = values.get(f"{norm}.bias", torch.zeros_like(mean))
        private = {name: tensor for name, tensor in private.items() if name.rpartition(".")[0] != norm}
        private[f"{convolution}.bias"] = (bias - mean) * scale + shift
        scales[f"{convolution}.weight"] = scale.reshape(-1, *[1] * (values[f"{convolution}.weight"].dim() - 1))
        if f"{convolution}.weight" in private:
            private[f"{convolution}.weight"] = private[f"{convolution}.weight"] * scales[f"{convolution}.weight"]
    return scales, private
