"""Batch norms folded into the convolutions before them."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.graph import Graph
from plures.methods.orthogonal_dropout.partition import SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.tensors import own_tensors


def foldable(split: SplitNetwork, graph: Graph | None) -> dict[str, str]:
    """Return the convolutions that take in the batch norm after them: name of the one -> name of the other.

        foldable(split, graph_of(split.network))["conv1"]  # "bn1"

    A network without a graph has none. Shared weights stay shared, and low precision would round twice.
    """
    weights = own_tensors(split.network)

    def folds(convolution: str) -> bool:
        name = f"{convolution}.weight"
        exact = weights[name].dtype in (torch.float32, torch.float64)
        return exact and split.roles[name] is not Role.SHARED

    pairs = {} if graph is None else graph.folds()
    return {convolution: norm for convolution, norm in pairs.items() if folds(convolution)}


def fold_norms(
    split: SplitNetwork, member: int, pairs: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the factors of each convolution that takes its norm layer in, and the private tensors that remain.

    scales, private = fold_norms(split, 2, pairs)
    """
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


def remove_norms(network: nn.Module, pairs: Mapping[str, str]) -> None:
    """Replace the norm layers that convolutions have taken in, in place.

    remove_norms(network, pairs)
    """
    for name, norm in pairs.items():
        convolution = cast(nn.Conv2d, network.get_submodule(name))
        if convolution.bias is None:
            convolution.bias = nn.Parameter(convolution.weight.detach().new_zeros(convolution.out_channels), False)
        network.set_submodule(norm, nn.Identity())
