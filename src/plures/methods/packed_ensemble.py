"""Packed-Ensembles: narrow members, run in one pass by grouped layers (Laurent et al., 2023)."""

import copy
import math
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from plures.checks import check_members, number, one_of
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods import building
from plures.methods.building import ManyInOne, Reduction, Rows, Tiled
from plures.seeding import check_seed
from plures.tensors import Layer, draw, moments

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed
WHOLE = 1e-6  # how far from a whole number a width may be: alpha is a float


class PackedEnsemble(ManyInOne):
    """Run narrow members in one pass; each has the depth of the network and a fraction of its width.

        ensemble = plures.PackedEnsemble(network, members=4)
        ensemble = plures.PackedEnsemble(network, members=4, alpha=3.0)

    Every member sees the whole input and has its own classifier.

    - `alpha`: the width of all members together, relative to the network; each member has alpha / members of its
      channels. alpha = sqrt(members) gives as many weights as the network has, and the default is the nearest value
      that makes every width an integer. A value that does not is refused, never rounded.
    - `first`, `last`: the layers that take the input and return the logits; by default, the first layer and the last
      Linear.
    - `reduction`: "sum" trains each member on its own loss, as if it were alone; "mean" averages the losses, as in the
      authors' code, so each member learns at a fraction of the rate.

    Weights always start from new random values, at the scale of the given network. The network may consist of Linear,
    Conv1d to Conv3d, their transposes, batch, instance, group and layer norm, and modules without parameters; others
    are refused. Its code must not contain the widths of its layers, as in `x.view(-1, 512)`.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 4,
        alpha: float | None = None,
        *,
        first: str | None = None,
        last: str | None = None,
        reduction: Reduction = "sum",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        one_of("reduction", reduction, get_args(Reduction))
        packing = Packing(network, members, alpha, first, last, seed)
        super().__init__(network, loss, Tiled(packing.pack(network), members, packing.rows, interleave=True))
        self.members, self.alpha, self.seed = members, packing.alpha, seed
        self.first, self.last, self.reduction = packing.first, packing.last, reduction


class Fold:
    """Bring the members of a sample side by side on the channel axis for one layer, and back after it: mere views."""

    def __init__(self, members: int, rows: Rows) -> None:
        self.members, self.rows = members, rows

    def before(self, _layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Turn [batch x members, width, ...] into [batch, members x width, ...]."""
        x, *others = args
        return (self.split(x).transpose(1, 2).flatten(2, 3).flatten(0, 1), *others)

    def after(self, _layer: nn.Module, _args: object, y: Tensor) -> Tensor:
        """Turn [batch, members x width, ...] into [batch x members, width, ...]."""
        y = torch.unflatten(y, 1, (self.members, -1))
        y = torch.unflatten(y, 0, (self.rows.count // self.members, -1))
        return y.transpose(1, 2).flatten(0, 2)

    def split(self, x: Tensor) -> Tensor:
        """Turn [rows, ...] into [batch, members, rows of one member, ...]."""
        each = self.rows.per_row(x)
        return torch.unflatten(x, 0, (self.rows.count // self.members, self.members, each))


class PackedLinear(nn.Module):
    """Apply a Linear of its own to each member's rows."""

    def __init__(self, layer: nn.Linear, fold: Fold) -> None:
        super().__init__()
        self.weight = layer.weight  # [members, outputs, inputs]
        self.bias, self.fold = layer.bias, fold  # [members, outputs]

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, ..., inputs] to [rows, ..., outputs]."""
        x = self.fold.split(x).movedim(1, -2).flatten(-2)
        y = torch.einsum("...gi,goi->...go", torch.unflatten(x, -1, (len(self.weight), -1)), self.weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.movedim(-2, 1).flatten(0, 2)


class PackedLayerNorm(nn.Module):
    """Normalise each row over its width, with scale and shift of its member's own."""

    def __init__(self, layer: nn.LayerNorm, fold: Fold) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias  # [members, width] each, or None
        self.eps, self.fold = layer.eps, fold

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [rows, ..., width]."""
        y = self.fold.split(F.layer_norm(x, x.shape[-1:], eps=self.eps)).movedim(1, -2)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.movedim(-2, 1).flatten(0, 2)


class Packing:
    """Compute how wide each layer of a member is, and pack a network's layers accordingly."""

    def __init__(
        self, network: nn.Module, members: int, alpha: float | None, first: str | None, last: str | None, seed: int
    ) -> None:
        check_members(members)
        if alpha is not None:
            number("alpha", alpha, "a number above 0, below 1e5, or None for about sqrt(members)", above=0, below=1e5)
        check_seed(seed)
        self.first, self.last = building.ends(network, first, last)
        refuse_unknown(network)
        self.members, self.seed = members, seed
        self.rows = Rows()
        self.fold = Fold(members, self.rows)
        self.step = self._alpha_step(network)
        self.alpha = self.step * max(1, round(math.sqrt(members) / self.step)) if alpha is None else float(alpha)
        self._moments = moments(network)
        self._packed: dict[Tensor, nn.Parameter] = {}  # by what they were made from: tied parameters stay tied

    def pack(self, network: nn.Module) -> nn.Module:
        """Copy a network with all its layers packed."""
        packed = copy.deepcopy(network)
        others: dict[nn.Module, nn.Module] = {}
        for name, module in packed.named_modules():
            if isinstance(module, nn.Linear | Convolution):
                self._resize_layer(name, module)
            elif isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm):
                self._resize_norm(name, module)
            if isinstance(module, nn.Linear):
                others[module] = PackedLinear(module, self.fold)
            elif isinstance(module, nn.LayerNorm):
                others[module] = PackedLayerNorm(module, self.fold)
            elif isinstance(module, Convolution | _NormBase | nn.GroupNorm):
                module.register_forward_pre_hook(self.fold.before)
                module.register_forward_hook(self.fold.after)
        return building.replace(packed, others)

    def _alpha_step(self, network: nn.Module) -> float:
        """Find the number of which alpha must be a multiple, so that widths are whole and groups are full."""
        hidden: list[int] = []
        parts = [1]
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear | Convolution):
                inputs, outputs = building.widths(module)
                hidden += [inputs] * (name != self.first) + [outputs] * (name != self.last)
            if isinstance(module, Convolution) and not is_depthwise(module):
                parts.append(module.groups)
            elif isinstance(module, nn.GroupNorm):
                parts.append(module.num_groups)
        return math.lcm(*parts) * self.members / (math.gcd(*hidden) or 1)

    def _width(self, name: str, given: int, parts: int) -> int:
        """Return the width that a member has for a width `given` of the network; it must divide into equal parts."""
        width = self.alpha * given / self.members
        whole = round(width)
        if whole >= 1 and abs(width - whole) < WHOLE * whole and whole % parts == 0:
            return whole
        below = math.floor(self.alpha / self.step) * self.step
        advice = f"{below:.10g} or {below + self.step:.10g}" if below else f"{self.step:.10g}"
        raise PluresError(
            f"with alpha={self.alpha:g} each of {self.members} members has {width:g} of the {given} channels of "
            f"{name!r}{f', in {parts} groups' if parts > 1 else ''}; use alpha={advice}, or leave it out"
        )

    def _cut(self, name: str, module: Layer) -> tuple[int, int, int]:
        """Return the inputs, the outputs and the groups that a member has at a layer."""
        inputs, outputs = building.widths(module)
        depthwise = isinstance(module, Convolution) and is_depthwise(module)
        groups = module.groups if isinstance(module, Convolution) and not depthwise else 1
        inputs = inputs if name == self.first else self._width(name, inputs, groups)
        outputs = outputs if name == self.last else self._width(name, outputs, groups)
        return inputs, outputs, inputs if depthwise else groups

    def _parameter(self, name: str, like: Tensor, shape: tuple[int, ...], gain: float = 1.0) -> nn.Parameter:
        """Draw a parameter afresh, or fill it with the values that the network starts from."""
        name = name.lstrip(".")  # of a network that is itself a layer
        if like not in self._packed:
            if name in self._moments:
                mean, deviation = self._moments[name]
                values = draw(name, like.new_empty(shape), {name: (mean, deviation * gain)}, self.seed, "packed")
            else:
                values = _around_again(like.detach().flatten(), math.prod(shape)).reshape(shape)
            self._packed[like] = nn.Parameter(values)
        found = self._packed[like]
        if found.shape != shape:
            raise PluresError(f"{name!r} is tied to a parameter of a layer whose width PackedEnsemble changes")
        return found

    def _resize_layer(self, name: str, module: nn.Linear | Convolution) -> None:
        inputs, outputs, groups = self._cut(name, module)
        shape: tuple[int, ...]
        biases: tuple[int, ...]
        if isinstance(module, nn.Linear):
            each, shape, biases = module.in_features, (self.members, outputs, inputs), (self.members, outputs)
        else:
            each, biases = module.in_channels // module.groups, (self.members * outputs,)
            ends = (inputs, outputs // groups) if isinstance(module, Transposed) else (outputs, inputs // groups)
            shape = (self.members * ends[0], ends[1], *module.kernel_size)
            module.in_channels, module.out_channels = inputs * self.members, outputs * self.members
            module.groups = groups * self.members
        gain = math.sqrt(each / (inputs // groups))  # as large a sum from fewer inputs
        module.weight = self._parameter(f"{name}.weight", module.weight, shape, gain)
        if module.bias is not None:
            module.bias = self._parameter(f"{name}.bias", module.bias, biases, gain)

    def _resize_norm(self, name: str, module: _NormBase | nn.GroupNorm | nn.LayerNorm) -> None:
        shape: tuple[int, ...]
        if isinstance(module, nn.LayerNorm):
            shape = (self.members, self._width(name, module.normalized_shape[0], 1))
        elif isinstance(module, nn.GroupNorm):
            shape = (self.members * self._width(name, module.num_channels, module.num_groups),)
            module.num_channels, module.num_groups = shape[0], self.members * module.num_groups
        else:
            shape = (self.members * self._width(name, module.num_features, 1),)
            module.num_features = shape[0]
        for kind, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, kind, self._parameter(f"{name}.{kind}", parameter, shape))
        for kind, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dim():  # the statistics, not the count of batches
                setattr(module, kind, _around_again(buffer, shape[0]))


def _around_again(values: Tensor, count: int) -> Tensor:
    """Repeat values up to a count: those of norm layers are all alike before training."""
    return values.repeat(-(-count // len(values)))[:count]


def is_depthwise(module: Convolution) -> bool:
    """Return whether each channel has a convolution of its own."""
    return 1 < module.groups == module.in_channels


def refuse_unknown(network: nn.Module) -> None:
    """Refuse a network with parameters that a narrower member would have no rule for."""
    for name, module in network.named_modules():
        own = list(module.parameters(recurse=False))
        if not own and not parametrize.is_parametrized(module):
            continue
        where = f"{type(module).__name__} {name!r}" if name else f"the network itself, {type(module).__name__},"
        known = type(module) in (nn.Linear, nn.LayerNorm) or isinstance(module, Convolution | _NormBase | nn.GroupNorm)
        if not known or parametrize.is_parametrized(module):
            raise PluresError(
                f"{where} has parameters that PackedEnsemble cannot narrow; it supports Linear, Conv1d to Conv3d, "
                "their transposes, and batch, instance, group and layer norm"
            )
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            raise PluresError(f"{where} normalises over several axes; PackedEnsemble can only narrow one")
        if not all(parameter.requires_grad for parameter in own):
            raise PluresError(f"{where} is frozen, but PackedEnsemble draws every weight anew: unfreeze it")
