"""The native library's functions for training all members at once, as torch differentiates them.

Activations are blocked as in prediction, [members, blocks of images, channels, rows, columns, lanes]: as many images as
there are lanes lie side by side and fill the CPU's vectors.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plures.errors import PluresError
from plures.native.library import load
from plures.native.structures import (
    Convolution,
    KernelGradient,
    Norm,
    check_lists,
    filled,
    floats,
    in_order,
    remember,
    was_checked,
)

MOST_PLACES = 2**15  # places of a group, in 16 bits with a sign
GROUP = 64  # inputs whose activations are processed at a time, so that they stay in the cache


def blocked(x: Tensor, members: int = 1) -> Tensor:
    """Lay images, [members * images, channels, rows, columns], side by side; the lanes divide their number."""
    lanes = load().lanes
    return torch.unflatten(x, 0, (members, -1, lanes)).permute(0, 1, 3, 4, 5, 2).contiguous()


def unblocked(x: Tensor) -> Tensor:
    """Lay images one after the other again, the members one after the other."""
    return x.permute(0, 1, 5, 2, 3, 4).contiguous().flatten(0, 2)


def blocked_rows(x: Tensor, members: int = 1) -> Tensor:
    """Lay rows, [members * rows, ..., features], side by side as the pixels of one image; lanes divide their number."""
    lanes, rows = load().lanes, x.numel() // (members * x.shape[-1])
    height = next(n for n in (4, 2, 1) if rows // lanes % n == 0)
    return x.reshape(members, 1, height, -1, lanes, x.shape[-1]).permute(0, 1, 5, 2, 3, 4).contiguous()


def unblocked_rows(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Lay rows one after the other again, [members * lead[0], *lead[1:], features]."""
    return x.permute(0, 1, 3, 4, 5, 2).reshape(len(x) * lead[0], *lead[1:], x.shape[2])


class Memory:
    """Memory of activations that one step after the other uses: the system clears fresh memory, page by page."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}  # by length; what was used last comes first, from the cache

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor of float32 in memory that no other tensor uses any more; its values are arbitrary."""
        free = self._free.setdefault(math.prod(shape), [])
        try:
            whole = free.pop()
        except IndexError:
            whole = torch.empty(math.prod(shape)).numpy()
        used = whole.reshape(shape)  # a new view, which lives as long as the tensor's storage
        weakref.finalize(used, free.append, whole).atexit = False
        return torch.from_numpy(used)


class Order(NamedTuple):
    """Kernels in the order in which a pass reads them: `rows` says where each lies in the weight."""

    starts: Tensor
    places: Tensor
    rows: Tensor
    group: int


class MemberKernels(NamedTuple):
    """Which kernels of a convolution each member has, in the order in which each of the three passes reads them."""

    forward: Order
    backward: Order
    by_input: Order
    outputs: int
    inputs: int


def kernels_of(mine: Tensor, private: bool = False) -> MemberKernels:
    """List the kernels that each member has, [members, outputs, inputs] of booleans.

    The weight is [outputs, inputs, height, width], or [members, outputs, inputs, height, width] if it is `private`.
    """
    mine = mine.cpu()
    _, outputs, inputs = mine.shape
    each = outputs * inputs if private else 0  # kernels of a member's own weight

    def ordered(turned: bool, group: int, kind: torch.dtype = torch.int16) -> Order:
        here = mine.transpose(1, 2) if turned else mine
        group = min(group, here.shape[2])
        starts, places, member, output, channel = in_order(here[..., None], group)
        rows = (channel * inputs + output if turned else output * inputs + channel) + member * each
        return Order(starts, places.to(kind), rows.int(), group)

    by_input = ordered(True, outputs, torch.int32)
    return MemberKernels(ordered(False, GROUP), ordered(True, GROUP), by_input, outputs, inputs)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernels: MemberKernels,
    stride: Sequence[int],
    padding: Sequence[int],
    memory: Memory | None = None,
) -> Tensor:
    """Convolve blocked images, of all members or the same for all, with the kernels that each member has.

    `bias` is [members, outputs]. The gradient of a kernel comes from the member that has it; other kernels get zero.
    Results are written to `memory`.
    """
    members, outputs, inputs = len(kernels.forward.starts), kernels.outputs, kernels.inputs
    x = floats("images", x, *[None] * 5, load().lanes)
    size = tuple(weight.shape[-2:])
    weight = floats("weight", weight, *([members] if weight.dim() == 5 else []), outputs, inputs, *size)
    bias = None if bias is None else floats("bias", bias, members, outputs)
    sides = [x.shape[3 + i] + 2 * padding[i] - size[i] + 1 for i in (0, 1)]
    numbers = (*stride, *size, *(around + 1 for around in padding))
    if (
        min(*x.shape, *sides) < 1
        or not all(0 < n <= 256 for n in numbers)
        or len(x) not in (1, members)
        or x.shape[2] != inputs
    ):
        raise PluresError(f"a weight {tuple(weight.shape)} cannot run over images {tuple(x.shape)}")
    check_kernels(kernels, weight.numel() // (size[0] * size[1]))
    shape = Shape(size, tuple(stride), tuple(padding))
    result: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, kernels, shape, memory or Memory()
    )
    return result


def check_kernels(kernels: MemberKernels, rows: int) -> None:
    """Check that lists name kernels of a weight of so many, for as long as they do not change."""
    held = [one for order in kernels[:3] for one in order[:3]]
    inputs, outputs, members = kernels.inputs, kernels.outputs, len(kernels.forward.starts)
    if was_checked(held, inputs, outputs, rows):
        return
    axes = ((outputs, inputs), (inputs, outputs), (inputs, outputs))
    for order, (lists, axis), kind in zip(kernels[:3], axes, (torch.int16, torch.int16, torch.int32), strict=True):
        starts, places, at, group = order
        kinds = ((starts, torch.int32), (places, kind), (at, torch.int32))
        plain = all(
            t.dtype == dtype and t.is_cpu and t.layout == torch.strided and t.is_contiguous() for t, dtype in kinds
        )
        if not plain or not 1 <= group <= axis or group > MOST_PLACES:
            raise PluresError(
                "the lists of kernels must be contiguous whole numbers on the CPU: make them by kernels_of"
            )
        groups = -(-axis // group)
        if len(places) and int(places.min()) < 0:  # before 32 bits become 16
            raise PluresError("the lists of kernels name places below zero: make them by kernels_of")
        fits = starts.shape == (members, groups * lists + 1) and places.shape == at.shape and places.dim() == 1
        if not fits or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < rows):
            raise PluresError(f"the lists do not fit a weight of {outputs} outputs and {inputs} inputs")
        check_lists(starts, places.to(torch.int16), groups, group, axis - (groups - 1) * group)
        if kind is torch.int32 and len(places) and int(places.max()) >= outputs:
            raise PluresError(f"the lists name outputs that a layer of {outputs} does not have")
    remember(held, inputs, outputs, rows)


class Shape(NamedTuple):
    """The size of a kernel, its stride and the zeros around the images: rows, columns."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: MemberKernels, shape: Shape, memory: Memory
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = kernels, shape, memory
        size, stride, padding = shape
        sides = [(x.shape[3 + i] + 2 * padding[i] - size[i]) // stride[i] + 1 for i in (0, 1)]
        y = memory.empty(len(kernels.forward.starts), x.shape[1], kernels.outputs, *sides, x.shape[5])
        values = weight.reshape(-1, size[0] * size[1]).index_select(0, kernels.forward.rows)
        _sums(x, values, bias, kernels.forward, y, shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = floats("gradient", gradients[0], *gradients[0].shape)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kernels, shape, memory = ctx.settings
        to_x = _to_input(gradient, x, weight, kernels, shape, memory) if needs_x else None
        to_weight = _to_weight(gradient, x, weight, kernels, shape) if needs_weight else None
        return to_x, to_weight, gradient.sum((1, 3, 4, 5)) if needs_bias else None, None, None, None


def _sums(x: Tensor, values: Tensor, bias: Tensor | None, order: Order, y: Tensor, shape: Shape) -> None:
    """Write the sums over each member's kernels into `y`, whose rows and columns may lie apart."""
    bias = x.new_zeros(len(order.starts), y.shape[2]) if bias is None else bias
    layer = filled(
        Convolution,
        *(x, None, values, bias, order.starts, order.places, y),
        *(0 if len(x) == 1 else x.stride(0), 0, 0, y.stride(2), y.stride(3), y.stride(4)),
        *(len(bias), *x.shape[1:5], *y.shape[2:5], *shape.size, *shape.stride, *shape.padding),
        *(x.shape[5], order.group, True, False),
    )
    load().run("plures_convolution", load().kernels, layer)


def _to_input(
    gradient: Tensor, x: Tensor, weight: Tensor, kernels: MemberKernels, shape: Shape, memory: Memory
) -> Tensor:
    """Convolve the gradient with the flipped kernels, from the outputs to the inputs.

    With a stride, pixels see other taps than their neighbours do: those of each remainder are a convolution.
    """
    size, stride, padding = shape
    to_x = memory.empty(len(gradient), *x.shape[1:])
    if any(step > length for step, length in zip(stride, size, strict=True)):
        to_x.zero_()  # no kernel reaches some of the pixels
    flipped = weight.reshape(-1, *size).index_select(0, kernels.backward.rows).flip(1, 2)
    for row in range(stride[0]):
        for column in range(stride[1]):
            target = to_x[:, :, :, row :: stride[0], column :: stride[1]]
            taps, around = [], []
            for axis, first in enumerate((row, column)):
                # Tap k of the flipped kernel reaches a pixel from the output (pixel + padding - size + 1 + k) / stride.
                offset = first + padding[axis] - size[axis] + 1
                taps.append([k for k in range(size[axis]) if (offset + k) % stride[axis] == 0])
                around.append(-((offset + taps[-1][0]) // stride[axis]) if taps[-1] else 0)
            if not target.numel() or not all(taps):
                continue
            part = flipped[:, taps[0][0] :: stride[0], taps[1][0] :: stride[1]].flatten(1).contiguous()
            sides = Shape((len(taps[0]), len(taps[1])), (1, 1), tuple(around))
            _sums(gradient, part, None, kernels.backward, target, sides)
    return to_x if len(x) == len(to_x) else to_x.sum(0, keepdim=True)


def _to_weight(gradient: Tensor, x: Tensor, weight: Tensor, kernels: MemberKernels, shape: Shape) -> Tensor:
    to = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    order = kernels.by_input
    layer = filled(
        KernelGradient,
        *(x, gradient, to, order.starts, order.places, order.rows),
        0 if len(x) == 1 else x.stride(0),
        *(len(gradient), *x.shape[1:5], *gradient.shape[2:5], *shape.size, *shape.stride, *shape.padding),
    )
    load().run("plures_kernel_gradient", load().kernels, layer)
    return to


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    momentum: float,
    epsilon: float,
    residual: Tensor | None = None,
    *,
    relu: bool = False,
    memory: Memory | None = None,
) -> Tensor:
    """Normalise blocked images of each member by the statistics of its batch, and update the running ones.

        y = norm(x, weight, bias, mean, variance, batches, 0.1, 1e-5, shortcut, relu=True)

    Weights and statistics are [members, channels], the number of batches [members].
    """
    members, _, channels = x.shape[:3]
    x = floats("images", x, members, None, channels, None, None, load().lanes)
    residual = None if residual is None else floats("shortcut", residual, *x.shape)
    tables = [floats("norm layer", table, members, channels) for table in (weight, bias, running_mean, running_var)]
    if min(x.shape) < 1:
        raise PluresError(f"a norm layer of {channels} channels cannot run over images {tuple(x.shape[1:5])}")
    result, mean, variance = _NormFunction.apply(  # type: ignore[no-untyped-call]
        x, residual, *tables[:2], epsilon, relu, memory or Memory()
    )
    count = x.numel() // (members * channels)
    with torch.no_grad():
        batches.add_(1)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (count / (count - 1)), momentum)
    return result  # type: ignore[no-any-return]


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        relu: bool,
        memory: Memory,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = memory.empty(*x.shape), torch.empty_like(bias), torch.empty_like(bias)
        given = [x, residual, weight, bias, None, y, mean, variance, None, None, None, None]
        load().run("plures_norm", load().kernels, _norm(given, x, epsilon, relu, backward=False))
        ctx.save_for_backward(x, weight, bias, mean, variance, *([y] if relu and residual is not None else []))
        ctx.settings = epsilon, relu, residual is not None, memory
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, variance, *rest = ctx.saved_tensors
        gradient = floats("gradient", gradients[0], *x.shape)
        epsilon, relu, added, memory = ctx.settings
        y, passed = (rest[0], memory.empty(*x.shape)) if rest else (None, None)
        to_x, to_weight, to_bias = memory.empty(*x.shape), torch.empty_like(weight), torch.empty_like(weight)
        given = [x, None, weight, bias, gradient, y, mean, variance, passed, to_x, to_weight, to_bias]
        load().run("plures_norm", load().kernels, _norm(given, x, epsilon, relu, backward=True))
        to_residual = None if not added else gradient if passed is None else passed
        return to_x, to_residual, to_weight, to_bias, None, None, None


def _norm(given: list[Tensor | None], x: Tensor, epsilon: float, relu: bool, backward: bool) -> Any:
    return filled(Norm, *given, *x.shape[:3], x[0, 0, 0].numel(), epsilon, relu, backward)
