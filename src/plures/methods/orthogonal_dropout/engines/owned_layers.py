"""Layers that run all members at once over the weights that each owns, and layers that separate members in a batch.

Between layers the members lie one after the other along the batch axis, or `blocked` as the native kernels like it.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import owned_part, spread
from plures.methods.orthogonal_dropout.partition import Split
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import operators
from plures.native.library import load
from plures.native.lists import Lists, block_lists, kernel_lists
from plures.tensors import canonical, own_tensors


class Running:
    """Know which members run; one object, shared by all layers of an engine.

    running = Running(5)
    running.chosen = [0, 3]
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.chosen: list[int] | None = None  # None: all of them, without a copy of what they have

    @property
    def count(self) -> int:
        """The number of members that run."""
        return self.members if self.chosen is None else len(self.chosen)

    def of(self, table: Tensor) -> Tensor:
        """Take the rows of a table [members, ...] that belong to members that run."""
        return table if self.chosen is None else table[self.chosen]


class Parts:
    """Give the tensors of each member by name, as an engine needs them to build its layers.

    parts = Parts(split, [fold_norms(split, member, pairs) for member in split.trained])
    parts.stack("bn1.weight")  # [members, 64]
    """

    def __init__(self, split: Split, folded: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        self.members = split.trained
        self.running = Running(len(self.members))
        self.owners = split.owners()
        self.roles = split.roles
        self._first = canonical(split.network)
        self._own = {name: tensor.detach() for name, tensor in own_tensors(split.network).items()}
        self._private = [private for _, private in folded]
        self._scales = [scales for scales, _ in folded]

    def first(self, name: str) -> str:
        """Give the first name of a tensor that may be tied."""
        return self._first.get(name, name)

    def role(self, name: str) -> Role | None:
        """Tell a tensor's role, or None where the network has no such tensor."""
        return self.roles.get(self.first(name))

    def stack(self, name: str) -> Tensor | None:
        """Give what each member has of a tensor that is not split, [members, ...], or None where there is none."""
        first = self.first(name)
        if first in self._private[0]:
            return torch.stack([private[first] for private in self._private])
        return self._own[first].expand(len(self.members), *self._own[first].shape) if first in self._own else None

    def names(self) -> list[str]:
        """Name all tensors of the network, tied ones under each of their names."""
        return list(self._first)

    def tensor(self, name: str, index: int) -> Tensor:
        """Give one member's whole tensor, as `checkout` does."""
        first = self.first(name)
        if first in self._private[index]:
            return self._private[index][first]
        if first not in self.owners:
            return self._own[first]
        part = owned_part(self._own[first], self.owners[first], self.members[index])
        return part * self._scales[index][name] if name in self._scales[index] else part

    def lists(self, weight: str) -> Lists:
        """List what each member owns of a split weight, with the factors of a norm layer that was folded into it."""
        first = self.first(weight)
        values, owners = self._own[first], self.owners[first]
        scales = [scales[weight].flatten() for scales in self._scales if weight in scales]
        factors = torch.stack(scales) if scales else None
        in_blocks = values.dim() == 2 and len(owners) != len(values)
        owners = owners if in_blocks else spread(owners, values)
        return (block_lists if in_blocks else kernel_lists)(values, owners, self.members, factors)

    def bias(self, name: str, outputs: int) -> Tensor:
        """Give the bias of each member, [members, outputs]; zeros where the layer has none."""
        stack = self.stack(name)
        return torch.zeros(len(self.members), outputs) if stack is None else stack.float().contiguous()


class _OwnedLayer(nn.Module):
    """Keep the lists and biases of all members, and hand out those of the members that run."""

    starts: Tensor
    places: Tensor
    values: Tensor
    bias: Tensor

    def __init__(self, parts: Parts, weight: str, bias: str, outputs: int) -> None:
        super().__init__()
        lists = parts.lists(weight)
        self.running = parts.running
        for name, tensor in (("starts", lists.starts), ("places", lists.places), ("values", lists.values)):
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("bias", parts.bias(bias, outputs), persistent=False)
        self.inputs, self.group, self.whole = lists.inputs, lists.group, lists.whole
        self.relu = False

    @property
    def weight(self) -> Tensor:
        """An empty tensor: networks ask a layer's weight for its dtype and device."""
        return self.values.new_empty(0)

    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give starts, places, values and biases of the members that run."""
        return self.running.of(self.starts), self.places, self.values, self.running.of(self.bias)


class OwnedConvolution(_OwnedLayer):
    """A convolution of all members over blocked activations; adds a shortcut and cuts below zero where told to.

    OwnedConvolution(conv, parts, "layer1.0.conv1")(blocked, shortcut)
    """

    def __init__(self, layer: nn.Conv2d, parts: Parts, name: str) -> None:
        super().__init__(parts, f"{name}.weight", f"{name}.bias", layer.out_channels)
        self.kernel, self.stride = layer.kernel_size, layer.stride
        self.padding = cast(tuple[int, int], layer.padding)

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Tell whether the kernels can run a layer."""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
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
    """A linear layer of all members; the members lie along the first axis, or all see the same rows.

    OwnedLinear(parts, "fc1.weight", "fc1.bias", outputs=128)(rows)
    """

    def __init__(self, parts: Parts, weight: str, bias: str, outputs: int) -> None:
        super().__init__(parts, weight, bias, outputs)
        self.in_blocks = self.values.shape[1] > 1

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """Return [members * batch, ..., outputs]."""
        members = self.running.count
        operator = operators.block_linear if self.in_blocks else operators.linear
        rows = x.reshape(1 if shared else members, -1, self.inputs)
        result: Tensor = operator(rows, *self.lists(), self.inputs, self.group, self.relu)
        return result.reshape(len(x) * (members if shared else 1), *x.shape[1:-1], result.shape[-1])


class OwnedAttention(nn.Module):
    """Self-attention of all members: `nn.MultiheadAttention` with projections over what each member owns.

    OwnedAttention(attention, parts, "encoder.layers.0.self_attn")(x, x, x, need_weights=False)
    """

    in_proj_bias = None  # torch's encoder layer then takes the way that calls this module

    def __init__(self, layer: nn.MultiheadAttention, parts: Parts, name: str) -> None:
        super().__init__()
        self.heads, self.batch_first = layer.num_heads, layer.batch_first
        self.project = OwnedLinear(parts, f"{name}.in_proj_weight", f"{name}.in_proj_bias", 3 * layer.embed_dim)
        self.out = OwnedLinear(parts, f"{name}.out_proj.weight", f"{name}.out_proj.bias", layer.embed_dim)

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Tell whether a layer is plain self-attention with split projections."""
        return (
            type(layer) is nn.MultiheadAttention
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


class MembersNorm(nn.Module):
    """A norm layer with factors and shifts of its own for each member, for plain and for blocked batches.

    MembersNorm(batch_norm, parts, "bn1")(images)
    """

    factor: Tensor
    shift: Tensor

    def __init__(self, layer: nn.Module, parts: Parts, name: str) -> None:
        super().__init__()
        self.running = parts.running
        self.layer = layer
        factor, shift = parts.stack(f"{name}.weight"), parts.stack(f"{name}.bias")
        if isinstance(layer, _BatchNorm):
            mean, variance = parts.stack(f"{name}.running_mean"), parts.stack(f"{name}.running_var")
            assert mean is not None
            assert variance is not None
            scale = torch.rsqrt(variance + layer.eps)
            factor = scale if factor is None else factor * scale
            shift = -mean * factor if shift is None else shift - mean * factor
        assert factor is not None
        self.register_buffer("factor", factor.contiguous(), persistent=False)
        shift = torch.zeros_like(factor) if shift is None else shift
        self.register_buffer("shift", shift.contiguous(), persistent=False)
        self.relu = False

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Tell whether a layer is a norm layer that only differs in factors and shifts from member to member."""
        if isinstance(layer, _BatchNorm):
            return layer.running_mean is not None
        if isinstance(layer, nn.GroupNorm):
            return layer.affine
        return isinstance(layer, nn.LayerNorm) and layer.elementwise_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch that holds the members one after the other."""
        layer = self.layer
        factor, shift = self.running.of(self.factor), self.running.of(self.shift)
        if isinstance(layer, nn.LayerNorm):
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            shape = [len(factor), *[1] * (x.dim() - len(layer.normalized_shape)), *layer.normalized_shape]
        else:
            if isinstance(layer, nn.GroupNorm):
                x = F.group_norm(x, layer.num_groups, eps=layer.eps)
            shape = [len(factor), 1, -1, *[1] * (x.dim() - 2)]
        members = torch.unflatten(x, 0, (len(factor), -1))
        result = torch.addcmul(shift.view(shape), members, factor.view(shape)).flatten(0, 1)
        return result.relu() if self.relu else result

    def blocked(self, x: Tensor) -> Tensor:
        """Normalise blocked activations by batch norm."""
        result: Tensor = operators.affine(x, self.running.of(self.factor), self.running.of(self.shift), self.relu)
        return result


class EachMember(nn.Module):
    """Run a layer once for each member, as the unfolded engine does: for layers that the kernels do not know.

    EachMember([layer, other], running)(batch)
    """

    def __init__(self, layers: list[nn.Module], running: Running) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.running = running

    def __getattr__(self, name: str) -> Any:
        """Give what the network asks the layer for, such as its dtype, from the first member's."""
        layers = self.__dict__.get("_modules", {}).get("layers")
        if name in ("layers", "running") or name.startswith("__") or layers is None:
            return super().__getattr__(name)
        return getattr(layers[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the batch into members, run each, and join what comes out."""
        indices = range(len(self.layers)) if self.running.chosen is None else self.running.chosen
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        count = len(given[0]) if given else 0
        results = []
        for turn, index in enumerate(indices):

            def cut(value: Any, turn: int = turn) -> Any:
                batched = isinstance(value, Tensor) and value.dim() and len(value) == count
                return value.chunk(self.running.count)[turn] if batched else value

            results.append(self.layers[index](*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
        return joined(results)


def joined(results: list[Any]) -> Any:
    """Join what members returned along the batch axis; tuples part by part."""
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    if type(results[0]) in (tuple, list):
        return type(results[0])(joined(list(parts)) for parts in zip(*results, strict=True))
    if not all(result is results[0] or result == results[0] for result in results):
        raise PluresError(f"outputs of type {type(results[0]).__name__} cannot be joined over the members")
    return results[0]


class Apart(list[Any]):
    """What each of the running members has, one after the other.

    Apart([token_of_first, token_of_second])
    """


class Into(nn.Module):
    """Bring a batch into another layout: tiled, blocked, plain (from blocked), apart, or joined (from apart).

    Into("blocked", running)(images)
    """

    def __init__(self, layout: str, running: Running, shared: bool = False) -> None:
        super().__init__()
        self.layout, self.running, self.shared = layout, running, shared
        self.lanes = load().lanes

    def forward(self, x: Any, batch: Any = None) -> Any:
        """Convert a value; `batch` is what the network was given, and tells how many samples there are."""
        members = self.running.count
        if self.layout == "tiled":
            whole = isinstance(x, Tensor) and x.dim() and len(x) == len(batch)
            return x.repeat(members, *[1] * (x.dim() - 1)) if whole else x
        if self.layout == "blocked":
            held = 1 if self.shared else members
            # Vectors that are half full of images are still faster than vectors of pixels.
            return operators.block(x, held, self.lanes if 2 * (len(x) // held) > self.lanes else 1)
        if self.layout == "plain":
            return operators.unblock(x, len(batch))
        return Apart(x.chunk(members)) if self.layout == "apart" else torch.cat(list(x))


class MembersTensor(nn.Module):
    """Give a tensor that each member has for itself.

    MembersTensor(stack, running)()
    """

    stack: Tensor

    def __init__(self, stack: Tensor, running: Running) -> None:
        super().__init__()
        self.register_buffer("stack", stack, persistent=False)
        self.running = running

    def forward(self) -> Apart:
        """Give the tensors of the members that run."""
        return Apart(self.running.of(self.stack))


class EachCall(nn.Module):
    """Call a function, or a method by name, once for each member.

    EachCall(torch.add)(tokens, positions)
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Apart:
        """Give what comes out for each member."""
        found: list[Apart] = []
        map_structure(found.append, (args, kwargs))
        results = Apart()
        for index in range(len(found[0])):
            own = map_structure(lambda values, index=index: values[index], (args, kwargs))
            if isinstance(self.function, str):
                results.append(getattr(own[0][0], self.function)(*own[0][1:], **own[1]))
            else:
                results.append(self.function(*own[0], **own[1]))
        return results


def map_structure(change: Any, value: Any) -> Any:
    """Change every `Apart` in nested arguments.

    >>> map_structure(sum, ([Apart([1, 2]), 5], {}))
    ([3, 5], {})
    """
    if isinstance(value, Apart):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(map_structure(change, part) for part in value)
    if isinstance(value, dict):
        return {name: map_structure(change, part) for name, part in value.items()}
    return value


def private_copy(layer: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a layer with a member's tensors in it.

    private_copy(layer, {"weight": weight})
    """
    made = copy.deepcopy(layer)
    with torch.no_grad():
        for name, tensor in made.state_dict(keep_vars=True).items():
            if name in values:
                tensor.copy_(values[name])
    return made.requires_grad_(False).eval()
