"""What the members have of a network's tensors, and layers that run all of them over the weights that each owns.

Between layers the members lie one after the other along the batch axis, or `blocked` as the native kernels like it.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from plures.errors import PluresError
from plures.graph import has_statistics, is_of_torch, is_plain_convolution
from plures.methods.orthogonal_dropout.masks import owned_part, spread
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import operators
from plures.native.structures import LinearWeights, Lists, kernel_lists, linear_lists
from plures.tensors import canonical, own_tensors


class OfMembers(nn.Module):
    """A layer with tables that have a row for each of the `count` members that run."""

    def __init__(self, count: int, **tables: Tensor) -> None:
        super().__init__()
        self.count = count
        self.tables = tuple(tables)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def choose(self, indices: list[int]) -> None:
        """Keep the rows of some members: only these run from now on."""
        self.count = len(indices)
        for name in self.tables:
            self.register_buffer(name, getattr(self, name)[indices], persistent=False)


class Parts:
    """The tensors of each member by name, as an engine needs them; convolutions take in the norm layers of `pairs`."""

    def __init__(self, split: SplitNetwork, pairs: Mapping[str, str]) -> None:
        self.members = split.trained
        self.owners, self.given = split.owners(), split.given()
        self.roles, self.changes = split.roles, split.background is not None
        self._first = canonical(split.network)
        self._own = {name: tensor.detach() for name, tensor in own_tensors(split.network).items()}
        rows = [split.private.rows(member) for member in self.members]
        self._private = [{name: tensor.detach() for name, tensor in private.items()} for private in rows]
        self._scales: list[dict[str, Tensor]] = [{} for _ in self.members]
        for convolution, norm in pairs.items():
            eps = cast(_BatchNorm, split.network.get_submodule(norm)).eps
            for index, private in enumerate(self._private):
                values = self._own | private
                mean, weight = values[f"{norm}.running_mean"], f"{convolution}.weight"
                scale = torch.rsqrt(values[f"{norm}.running_var"] + eps)
                scale = scale * values.get(f"{norm}.weight", torch.ones_like(mean))
                bias, shift = (values.get(f"{name}.bias", torch.zeros_like(mean)) for name in (convolution, norm))
                factor = scale.reshape(-1, *[1] * (values[weight].dim() - 1))
                if weight in private:
                    private[weight] = private[weight] * factor
                private[f"{convolution}.bias"] = (bias - mean) * scale + shift
                self._scales[index][weight] = factor

    def first(self, name: str) -> str:
        """Return the first name of a tensor that may be tied."""
        return self._first.get(name, name)

    def role(self, name: str) -> Role | None:
        """Return a tensor's role, or None if the network has no tensor of this name."""
        return self.roles.get(self.first(name))

    def differs(self, name: str) -> bool:
        """Return whether members have a tensor of this name, and each another one."""
        return self.role(name) in (Role.SPLIT, Role.PRIVATE)

    def own(self, name: str) -> Tensor | None:
        """Return a tensor of the split network, or None if it has none of this name."""
        return self._own.get(self.first(name))

    def stack(self, name: str, missing: Tensor) -> Tensor:
        """Return what each member has of a tensor that is not split, [members, ...]; `missing` if there is none."""
        first = self.first(name)
        if first in self._private[0]:
            return torch.stack([private[first] for private in self._private])
        tensor = self._own.get(first, missing)
        return tensor.expand(len(self.members), *tensor.shape)

    def inside(self, prefix: str) -> list[str]:
        """Return the names of all tensors in a layer, tied ones under each of their names."""
        return [name for name in self._first if name.startswith(prefix)]

    def tensor(self, name: str, index: int) -> Tensor:
        """Return one member's whole tensor, as `checkout` does."""
        first = self.first(name)
        if first in self._private[index]:
            return self._private[index][first]
        if first not in self.owners:
            return self._own[first]
        part = owned_part(self._own[first], self.owners[first], self.members[index], self.given.get(first))
        return part * self._scales[index][name] if name in self._scales[index] else part

    def lists(self, weight: str, groups: int) -> Lists:
        """Return what each member has of a convolution, with the factors of a norm layer that was folded into it."""
        first = self.first(weight)
        if first in self._private[0]:  # with these factors
            return kernel_lists(self.stack(weight, torch.empty(0)), None, self.members, groups=groups)
        scales = [scales[weight].flatten() for scales in self._scales if weight in scales]
        owners = spread(self.owners[first], self._own[first])
        return kernel_lists(self._own[first], owners, self.members, torch.stack(scales) if scales else None, groups)

    def linear_lists(self, weight: str, whole: bool = False) -> LinearWeights:
        """Return what each member has of a linear layer: all of it, or what it owns of a split one."""
        first = self.first(weight)
        if whole or first in self._private[0]:
            each = torch.stack([self.tensor(weight, index) for index in range(len(self.members))])
            return linear_lists(each, None, self.members)
        own, given = self._own[first], self.given.get(first)
        return linear_lists(own if given is None else own - given, self.owners[first], self.members)


class OwnedConvolution(OfMembers):
    """A convolution of all members over blocked activations; adds a shortcut, and a ReLU (`relu` 1) or ReLU6 (6)."""

    starts: Tensor
    places: Tensor
    values: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Conv2d, parts: Parts, name: str, relu: int) -> None:
        lists = parts.lists(f"{name}.weight", layer.groups)
        biases = parts.stack(f"{name}.bias", torch.zeros(layer.out_channels)).float().contiguous()
        super().__init__(len(parts.members), starts=lists.starts, bias=biases)
        for kind, tensor in (("places", lists.places), ("values", lists.values)):
            self.register_buffer(kind, tensor, persistent=False)
        self.inputs, self.group, self.whole = lists.inputs, lists.group, lists.whole
        self.kernel, self.stride, self.relu = layer.kernel_size, layer.stride, relu
        self.padding = cast(tuple[int, int], layer.padding)

    @staticmethod
    def fits(layer: nn.Module, parts: Parts, name: str) -> bool:
        """Return whether the kernels can run a layer."""
        return (
            type(layer) is nn.Conv2d
            and is_of_torch(layer)
            and is_plain_convolution(layer, grouped=True)
            and max(*layer.kernel_size, *layer.stride) <= operators.MOST_STEPS
            and layer.in_channels < 2**16
            and parts.differs(f"{name}.weight")
        )

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Convolve blocked activations, [members or 1, blocks, channels, rows, columns, lanes]."""
        sizes = [(x.shape[3 + i] + 2 * self.padding[i] - self.kernel[i]) // self.stride[i] + 1 for i in (0, 1)]
        fused = shortcut is None or list(shortcut.shape[2:5]) == [self.bias.shape[1], *sizes]
        result: Tensor = operators.convolution(
            x,
            shortcut if fused else None,
            *(self.starts, self.places, self.values, self.bias),
            *(self.kernel, self.stride, self.padding, self.inputs, self.group, self.whole, self.relu * fused),
        )
        if shortcut is None or fused:
            return result
        result = result + shortcut  # one that is spread over the map
        return F.relu6(result) if self.relu == 6 else result.relu() if self.relu else result


class LinearNames(NamedTuple):
    """The names of the tensors of a linear layer, how many outputs it has, and whether a ReLU follows."""

    weight: str
    bias: str
    outputs: int
    relu: bool = False


class OwnedLinear(OfMembers):
    """A chain of linear layers of all members; the members lie along the first axis, or all see the same rows."""

    def __init__(self, parts: Parts, *layers: LinearNames, whole: bool = False) -> None:
        found = [parts.linear_lists(layer.weight, whole) for layer in layers]
        biases = [parts.stack(layer.bias, torch.zeros(layer.outputs)).float() for layer in layers]
        members = len(parts.members)
        starts, ids = torch.cat([one.starts for one in found], 1), torch.arange(members, dtype=torch.int32)
        super().__init__(members, starts=starts, bias=torch.cat(biases, 1), ids=ids)
        for name in ("places", "weights", "owners"):
            self.register_buffer(name, torch.cat([getattr(one, name) for one in found]), persistent=False)
        self.sizes: list[int] = []
        for one, layer in zip(found, layers, strict=True):
            self.sizes += (one.inputs, one.outputs, one.each, len(one.places), layer.relu)

    @property
    def weight(self) -> Tensor:
        """An empty tensor: networks ask a layer's weight for its dtype and device."""
        return self.get_buffer("weights").new_empty(0)

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """Return [members * batch, ..., outputs]."""
        members, held = self.count, self._buffers
        rows = x.reshape(1 if shared else members, -1, self.sizes[0])
        names = ("starts", "places", "weights", "owners", "bias", "ids")
        result: Tensor = operators.linear_of(x)(rows, *map(held.__getitem__, names), self.sizes)
        return result.view(x.shape[0] * (members if shared else 1), *x.shape[1:-1], result.shape[-1])


# The members, and the rows of the batch that holds the samples once for each, while a network of replaced layers runs.
running: ContextVar[tuple[int, int]] = ContextVar("running", default=(1, 1))


def for_each_sample(x: Tensor) -> Tensor:
    """Spread what has one row for all samples of an untraced network, such as positions."""
    return x.expand(running.get()[1], *x.shape[1:]) if x.dim() > 1 and len(x) == 1 else x


def spread_out(x: Any) -> Any:
    """Repeat what has a row for each sample for each of the running members."""
    count, rows = running.get()
    if not isinstance(x, Tensor) or x.dim() == 0 or len(x) * count != rows:
        return x
    result = torch.cat([x] * count)
    if not torch.compiler.is_compiling():
        result.same_for_all = count, result._version  # type: ignore[attr-defined]
    return result


def of_one(x: Any) -> Any:
    """Return what one of the running members has of what is the same for all; None if they differ."""
    count, rows = running.get()
    if count < 2 or not isinstance(x, Tensor) or x.dim() == 0 or len(x) != rows:
        return x
    if torch.compiler.is_compiling() or x.is_inference():  # there, tensors do not tell whether they were changed
        return None
    first, *others = x.tensor_split(count)
    if getattr(x, "same_for_all", None) != (count, x._version):
        if not all(torch.equal(first[:1], one[:1]) and torch.equal(first, one) for one in others):
            return None
        x.same_for_all = count, x._version  # type: ignore[attr-defined]
    return first


class RunsOnce:
    """Stand for the `forward` of a layer with the same tensors in all members: if so are its inputs, it runs once."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.did = layer, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns for the batch of all members."""
        forward, (count, rows) = partial(type(self.layer).forward, self.layer), running.get()
        if count < 2:
            return forward(*args, **kwargs)
        given, spec = tree_flatten((args, kwargs))
        ones = list(map(of_one, given))
        batched = [(one, whole) for one, whole in zip(ones, given, strict=True) if one is not whole]
        if not batched or any(one is None for one, _ in batched):
            return forward(*args, **kwargs)
        versions, before, self.did = [whole._version for _, whole in batched], running.set((1, rows // count)), True
        try:
            args, kwargs = tree_unflatten(ones, spec)
            made = forward(*args, **kwargs)
        finally:
            running.reset(before)
        for (one, whole), version in zip(batched, versions, strict=True):
            if whole._version != version:  # it was changed in place, for the first member
                whole.copy_(torch.cat([one] * count))
        return tree_map(spread_out, made)


class ChangedLinear(OfMembers):
    """A linear layer of members that have changed some weights of a given one.

    A batch that is the same for all is multiplied by the given weights once, and by what each member has changed.
    """

    def __init__(self, parts: Parts, names: LinearNames) -> None:
        super().__init__(len(parts.members))
        self.each = OwnedLinear(parts, names, whole=True)
        given = parts.given.get(parts.first(names.weight))
        self.register_buffer("given", given, persistent=False)
        self.changes = None if given is None else OwnedLinear(parts, names)

    @property
    def weight(self) -> Tensor:
        """An empty tensor: networks ask a layer's weight for its dtype and device."""
        return self.each.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return [members * batch, ..., outputs]."""
        one = None if self.changes is None else of_one(x)
        if self.changes is None or one is None or one is x:
            return cast(Tensor, self.each(x))
        made = torch.unflatten(self.changes(one, shared=True), 0, (self.count, -1))
        return (made + F.linear(one, self.get_buffer("given"))).flatten(0, 1)


class MembersEmbedding(OfMembers):
    """An embedding whose table the members split: all look up the same rows, and each keeps what it owns of them."""

    ids: Tensor
    owners: Tensor

    def __init__(self, layer: nn.Embedding, parts: Parts, name: str) -> None:
        super().__init__(len(parts.members), ids=torch.tensor(parts.members))
        first, self.layer = parts.first(f"{name}.weight"), layer
        self.register_buffer("owners", spread(parts.owners[first], layer.weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Look up rows for a batch that holds the members one after the other."""
        found = torch.unflatten(F.embedding(x := for_each_sample(x), self.layer.weight), 0, (self.count, -1))
        mine = self.owners[x].view_as(found) == self.ids.view(-1, *[1] * (found.dim() - 1))
        return torch.where(mine, found, 0.0).flatten(0, 1)


class OwnedAttention(nn.Module):
    """Self-attention of all members: `nn.MultiheadAttention` with projections over what each member owns."""

    in_proj_bias = None  # torch's encoder layer then takes the way that calls this module

    def __init__(self, layer: nn.MultiheadAttention, parts: Parts, name: str) -> None:
        super().__init__()
        self.heads, self.batch_first = layer.num_heads, layer.batch_first
        width, out = layer.embed_dim, f"{name}.out_proj"
        kind = ChangedLinear if parts.changes else OwnedLinear
        self.project = kind(parts, LinearNames(f"{name}.in_proj_weight", f"{name}.in_proj_bias", 3 * width))
        self.out = kind(parts, LinearNames(f"{out}.weight", f"{out}.bias", width))

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
        self, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, None]:
        """Attend, as torch does when nobody needs the weights."""
        asked = given.get("need_weights", True) or given.get("key_padding_mask") is not None
        if asked or query is not key or key is not value or query.dim() != 3:
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

    def __init__(self, layer: nn.Module, parts: Parts, name: str, blocked: bool = False, relu: int = 0) -> None:
        like = layer.running_mean if isinstance(layer, _BatchNorm) else layer.weight
        nothing = torch.zeros_like(cast(Tensor, like))
        factor, shift = parts.stack(f"{name}.weight", nothing + 1), parts.stack(f"{name}.bias", nothing)
        if isinstance(layer, _BatchNorm):
            mean, variance = (parts.stack(f"{name}.running_{kind}", nothing) for kind in ("mean", "var"))
            factor = factor * torch.rsqrt(variance + layer.eps)
            shift = shift - mean * factor
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
            # With factors, torch is twice as fast.
            x = F.layer_norm(x, layer.normalized_shape, x.new_ones(layer.normalized_shape), eps=layer.eps)
            shape = [len(factor), *[1] * (x.dim() - len(layer.normalized_shape)), *layer.normalized_shape]
        else:
            if isinstance(layer, nn.GroupNorm):
                x = F.group_norm(x, layer.num_groups, eps=layer.eps)
            shape = [len(factor), 1, -1, *[1] * (x.dim() - 2)]
        members = torch.unflatten(x, 0, (len(factor), -1))
        return torch.addcmul(shift.view(shape), members, factor.view(shape)).flatten(0, 1)
