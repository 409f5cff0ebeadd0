"""Layers that run all members at once over the weights that each owns.

Between layers the members lie one after the other along the batch axis, or `blocked` as the native kernels like it.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from plures.errors import PluresError
from plures.graph import has_statistics, is_of_torch, is_plain_convolution
from plures.methods.orthogonal_dropout.engines.parts import OfMembers, Parts
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import operators


class _OwnedLayer(OfMembers):
    """Keep the lists and biases of the members that run."""

    starts: Tensor
    places: Tensor
    values: Tensor
    bias: Tensor

    def __init__(self, parts: Parts, weight: str, bias: str, outputs: int, relu: bool = False) -> None:
        lists = parts.lists(weight)
        super().__init__(len(parts.members), starts=lists.starts, bias=parts.bias(bias, outputs))
        for name, tensor in (("places", lists.places), ("values", lists.values)):
            self.register_buffer(name, tensor, persistent=False)
        self.inputs, self.group, self.whole = lists.inputs, lists.group, lists.whole
        self.relu = relu

    @property
    def weight(self) -> Tensor:
        """An empty tensor: networks ask a layer's weight for its dtype and device."""
        return self.values.new_empty(0)

    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return starts, places, values and biases of the members that run."""
        return self.starts, self.places, self.values, self.bias


class OwnedConvolution(_OwnedLayer):
    """A convolution of all members over blocked activations; adds a shortcut, and a ReLU if told to."""

    def __init__(self, layer: nn.Conv2d, parts: Parts, name: str, relu: bool) -> None:
        super().__init__(parts, f"{name}.weight", f"{name}.bias", layer.out_channels, relu)
        self.kernel, self.stride = layer.kernel_size, layer.stride
        self.padding = cast(tuple[int, int], layer.padding)

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Return whether the kernels can run a layer."""
        return (
            type(layer) is nn.Conv2d
            and is_of_torch(layer)
            and is_plain_convolution(layer)
            and max(*layer.kernel_size, *layer.stride) <= operators.MOST_STEPS
            and layer.in_channels < 2**16
            and parts.role(f"{name}.weight") is Role.SPLIT
        )

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Convolve blocked activations, [members or 1, blocks, channels, rows, columns, lanes]."""
        sizes = [(x.shape[3 + i] + 2 * self.padding[i] - self.kernel[i]) // self.stride[i] + 1 for i in (0, 1)]
        fused = shortcut is None or list(shortcut.shape[2:5]) == [self.bias.shape[1], *sizes]
        result: Tensor = operators.convolution(
            x,
            shortcut if fused else None,
            *self.lists(),
            *(self.kernel, self.stride, self.padding, self.inputs, self.group, self.whole, self.relu and fused),
        )
        if shortcut is None or fused:
            return result
        result = result + shortcut  # one that is spread over the map
        return result.relu() if self.relu else result


class OwnedLinear(_OwnedLayer):
    """A linear layer of all members; the members lie along the first axis, or all see the same rows."""

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """Return [members * batch, ..., outputs]."""
        members = self.count
        rows = x.reshape(1 if shared else members, -1, self.inputs)
        result: Tensor = operators.linear(rows, *self.lists(), self.inputs, self.group, self.relu)
        return result.reshape(len(x) * (members if shared else 1), *x.shape[1:-1], result.shape[-1])


class OwnedAttention(nn.Module):
    """Self-attention of all members: `nn.MultiheadAttention` with projections over what each member owns."""

    in_proj_bias = None  # torch's encoder layer then takes the way that calls this module

    def __init__(self, layer: nn.MultiheadAttention, parts: Parts, name: str) -> None:
        super().__init__()
        self.heads, self.batch_first = layer.num_heads, layer.batch_first
        self.project = OwnedLinear(parts, f"{name}.in_proj_weight", f"{name}.in_proj_bias", 3 * layer.embed_dim)
        self.out = OwnedLinear(parts, f"{name}.out_proj.weight", f"{name}.out_proj.bias", layer.embed_dim)

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Return whether a layer is plain self-attention with split projections."""
        return (
            type(layer) is nn.MultiheadAttention
            and is_of_torch(layer)
            and layer.batch_first
            and layer._qkv_same_embed_dim
            and layer.bias_k is None
            and not layer.add_zero_attn
            and all(parts.role(f"{name}.{part}") is Role.SPLIT for part in ("in_proj_weight", "out_proj.weight"))
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend, as torch does when nobody needs the weights."""
        if query is not key or key is not value or key_padding_mask is not None or need_weights or query.dim() != 3:
            raise PluresError(
                "the owned engine supports only self-attention without padding masks and returned weights: "
                'use ensemble.engine("unfolded")'
            )
        batch, length, width = query.shape
        parts = self.project(query).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), None


class MembersNorm(OfMembers):
    """A norm layer with factors and shifts of its own for each member, for plain or for blocked batches."""

    factor: Tensor
    shift: Tensor

    def __init__(self, layer: nn.Module, parts: Parts, name: str, blocked: bool = False, relu: bool = False) -> None:
        factor, shift = parts.stack(f"{name}.weight"), parts.stack(f"{name}.bias")
        if isinstance(layer, _BatchNorm):
            mean, variance = parts.stack(f"{name}.running_mean"), parts.stack(f"{name}.running_var")
            assert mean is not None
            assert variance is not None
            scale = torch.rsqrt(variance + layer.eps)
            factor = scale if factor is None else factor * scale
            shift = -mean * factor if shift is None else shift - mean * factor
        assert factor is not None
        shift = torch.zeros_like(factor) if shift is None else shift
        super().__init__(len(parts.members), factor=factor.contiguous(), shift=shift.contiguous())
        self.layer, self.blocked, self.relu = layer, blocked, relu

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Return whether a layer is a norm layer whose members differ in factors and shifts only."""
        affine = isinstance(layer, nn.GroupNorm) and layer.affine
        affine = affine or (isinstance(layer, nn.LayerNorm) and layer.elementwise_affine)
        return has_statistics(layer) or (affine and is_of_torch(layer))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise blocked activations by batch norm, or a batch that holds the members one after the other."""
        layer, factor, shift = self.layer, self.factor, self.shift
        if self.blocked:
            return cast(Tensor, operators.affine(x, factor, shift, self.relu))
        if isinstance(layer, nn.LayerNorm):
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            shape = [len(factor), *[1] * (x.dim() - len(layer.normalized_shape)), *layer.normalized_shape]
        else:
            if isinstance(layer, nn.GroupNorm):
                x = F.group_norm(x, layer.num_groups, eps=layer.eps)
            shape = [len(factor), 1, -1, *[1] * (x.dim() - 2)]
        members = torch.unflatten(x, 0, (len(factor), -1))
        return torch.addcmul(shift.view(shape), members, factor.view(shape)).flatten(0, 1)
