"""The native library's functions for training all members at once, as torch differentiates them.

Activations are blocked as in prediction, [members, blocks of images, channels, rows, columns, lanes]: as many images as
there are lanes lie side by side and fill the CPU's vectors.
"""

import ctypes
import math
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plures.errors import PluresError
from plures.native.library import load
from plures.native.structures import Convolution, KernelGradient, Norm, filled, floats, in_order

GROUP = 64  # inputs whose activations are processed at a time, so that they stay in the cache


def blocked(x: Tensor, members: int = 1) -> Tensor:
    """Lay images, [members * images, channels, rows, columns], side by side; the lanes divide their number."""
    lanes = load().lanes
    return torch.unflatten(x, 0, (members, -1, lanes)).permute(0, 1, 3, 4, 5, 2).contiguous()


def unblocked(x: Tensor) -> Tensor:
    """Lay images one after the other again, the members one after the other."""
    return x.permute(0, 1, 5, 2, 3, 4).contiguous().flatten(0, 2)


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
    own: tuple[int, ...]  # [members] if each has a weight of its own


def kernels_of(mine: Tensor, private: bool = False) -> MemberKernels:
    """List the kernels that each member has, [members, outputs, inputs] of booleans.

    The weight is [outputs, inputs, height, width], or [members, outputs, inputs, height, width] if it is `private`.
    """
    mine = mine.cpu()
    members, outputs, inputs = mine.shape
    each = outputs * inputs if private else 0  # kernels of a member's own weight

    def ordered(turned: bool, group: int, kind: torch.dtype = torch.int16) -> Order:
        here = mine.transpose(1, 2) if turned else mine
        group = min(group, here.shape[2])
        starts, places, member, output, channel = in_order(here[..., None], group)
        rows = (channel * inputs + output if turned else output * inputs + channel) + member * each
        return Order(starts, places.to(kind), rows.int(), group)

    by_input = ordered(True, outputs, torch.int32)
    own = (members,) if private else ()
    return MemberKernels(ordered(False, GROUP), ordered(True, GROUP), by_input, outputs, inputs, own)


class Shape(NamedTuple):
    """The size of a kernel, its stride and the zeros around the images: rows, columns."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def sides(self, x: Tensor) -> list[int]:
        """Return the rows and columns of the outputs for blocked images."""
        each = zip(x.shape[3:5], *self, strict=True)
        return [(length + 2 * around - size) // step + 1 for length, size, step, around in each]


class Convolved(NamedTuple):
    """A convolution of all members. The weight has all kernels, the bias is [members, outputs]."""

    weight: Tensor
    bias: Tensor | None
    kernels: MemberKernels
    stride: Sequence[int]
    padding: Sequence[int]

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the outputs."""
        sides = Shape(self.weight.shape[-2:], tuple(self.stride), tuple(self.padding)).sides(x)
        return len(self.kernels.forward.starts), x.shape[1], self.kernels.outputs, *sides, x.shape[5]

    def checked(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Shape]:
        """Return images, weight and bias as the native library reads them; refuse what does not fit."""
        kernels, members = self.kernels, len(self.kernels.forward.starts)
        shape = Shape(tuple(self.weight.shape[-2:]), tuple(self.stride), tuple(self.padding))
        x = floats("images", x, *[None] * 5, load().lanes)
        weight = floats("weight", self.weight, *kernels.own, kernels.outputs, kernels.inputs, *shape.size)
        bias = None if self.bias is None else floats("bias", self.bias, members, kernels.outputs)
        numbers = (*shape.size, *shape.stride, *(around + 1 for around in shape.padding))
        fits = min(x.shape) > 0 and all(0 < n <= 256 for n in numbers) and min(shape.sides(x)) > 0
        if not fits or len(x) not in (1, members) or x.shape[2] != kernels.inputs:
            raise PluresError(f"a weight {tuple(weight.shape)} cannot run over images {tuple(x.shape)}")
        return x, weight, bias, shape


class Normed(NamedTuple):
    """A batch norm of every member: tables [members, channels], and the number of batches, [members]."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    batches: Tensor
    momentum: float
    epsilon: float

    def update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics by those of a batch with `count` numbers in a channel."""
        with torch.no_grad():
            self.batches.add_(1)
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance * (count / (count - 1)), self.momentum)


def run_layers(
    x: Tensor,
    convolved: Convolved | None = None,
    normed: Normed | None = None,
    shortcut: Tensor | None = None,
    relu: bool = False,
    memory: Memory | None = None,
) -> Tensor:
    """Convolve blocked images, of all members or the same for all, and normalise those of each member by their batch.

        y = run_layers(x, Convolved(weight, bias, kernels, (1, 1), (1, 1)), Normed(...), shortcut, relu=True)

    One of both may be left out; the shortcut and the ReLU come after the norm layer. The gradient of a kernel comes
    from the member that has it; other kernels get zero. Results are written to `memory`.
    """
    tensors: list[Tensor | None] = [None] * 5
    kernels, shape, epsilon = None, Shape((), (), ()), 0.0
    if convolved is not None:
        x, *tensors[:2], shape = convolved.checked(x)
        kernels = convolved.kernels
    if normed is not None:
        members, channels = floats("norm layer", normed.weight, None, None).shape
        if convolved is None:
            x = floats("images", x, members, None, channels, None, None, load().lanes)
        outputs = x.shape if convolved is None else convolved.shape(x)
        if (outputs[0], outputs[2]) != (members, channels) or min(x.shape) < 1:
            raise PluresError(f"a norm layer of {members} x {channels} channels does not fit outputs {tuple(outputs)}")
        tensors[2] = None if shortcut is None else floats("shortcut", shortcut, *outputs)
        tables = (normed.weight, normed.bias, normed.mean, normed.variance)
        tensors[3:] = [floats("norm layer", table, members, channels) for table in tables][:2]
        epsilon = normed.epsilon
    given = _Given(kernels, shape, epsilon, relu, memory or Memory())
    result, *found = _Layer.apply(x, *tensors, given)  # type: ignore[no-untyped-call]
    if normed is not None:
        normed.update(found[0], found[1], result.numel() // normed.weight.numel())
    return result  # type: ignore[no-any-return]


class _Given(NamedTuple):
    kernels: MemberKernels | None
    shape: Shape
    epsilon: float
    relu: bool
    memory: Memory


_CONVOLUTION, _GRADIENT, _NORM = range(3)  # as in training.h


class _Layer(torch.autograd.Function):
    """A convolution, a norm layer, or both: one member after the other, so that it reads what is still in the cache."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_given: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight, bias, residual, scale, shift, given = tensors_and_given
        kernels, shape, epsilon, relu, memory = given
        steps, sums, members = [], x, len(x)
        if weight is not None:
            members = len(kernels.forward.starts)
            sums = memory.empty(members, x.shape[1], kernels.outputs, *shape.sides(x), x.shape[5])
            values = weight.reshape(-1, math.prod(shape.size)).index_select(0, kernels.forward.rows)
            steps.append((_CONVOLUTION, _sums(x, values, bias, kernels.forward, sums, shape)))
        y, mean, variance = sums, None, None
        if scale is not None:
            y, mean, variance = memory.empty(*sums.shape), torch.empty_like(scale), torch.empty_like(scale)
            tensors = [sums, residual, scale, shift, None, y, mean, variance, None, None, None, None]
            steps.append((_NORM, _norm(tensors, 0, epsilon, relu, backward=False)))
            ctx.mark_non_differentiable(mean, variance)
        _run(steps, members)
        normed = (sums, scale, shift, mean, variance) if mean is not None else [None] * 5
        ctx.save_for_backward(x, weight, *normed, y if relu and residual is not None else None)
        ctx.given = given
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = floats("gradient", gradients[0], *gradients[0].shape)
        x, weight, sums, scale, shift, mean, variance, y = ctx.saved_tensors
        kernels, shape, epsilon, relu, memory = ctx.given
        needs_x, needs_weight, needs_bias, added = ctx.needs_input_grad[:4]
        steps, to_sums, to_scale, to_shift = [], gradient, None, None
        passed = gradient if y is None else memory.empty(*gradient.shape)
        if sums is not None:
            # What a convolution reads at once needs room for one member only.
            kept = len(sums) if weight is None or needs_bias else 1
            to_sums = memory.empty(kept, *sums.shape[1:])
            to_scale, to_shift = torch.empty_like(scale), torch.empty_like(scale)
            to_passed = None if y is None else passed
            tensors = [sums, None, scale, shift, gradient, y, mean, variance, to_passed, to_sums, to_scale, to_shift]
            apart = to_sums.stride(0) if kept > 1 else 0
            steps.append((_NORM, _norm(tensors, apart, epsilon, relu, backward=True)))
        to_weight = to_bias = None
        to_x: Tensor | None = to_sums
        if weight is not None:
            if needs_x:
                to_x = memory.empty(len(gradient), *x.shape[1:])
                _to_input(to_sums, to_x, weight, kernels, shape, steps)
            if needs_weight:
                to_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
                order = kernels.by_input
                layer = filled(
                    KernelGradient,
                    *(x, to_sums, to_weight, order.starts, order.places, order.rows),
                    *(0 if len(one) == 1 else one.stride(0) for one in (x, to_sums)),
                    *(len(order.starts), *x.shape[1:5], *to_sums.shape[2:5], *chain(*shape)),
                )
                steps.append((_GRADIENT, layer))
        _run(steps, len(gradient))
        if weight is not None:
            shared = len(x) < len(gradient)
            to_x = None if not needs_x or to_x is None else to_x.sum(0, keepdim=True) if shared else to_x
            to_bias = to_sums.sum((1, 3, 4, 5)) if needs_bias else None
        return to_x, to_weight, to_bias, passed if added else None, to_scale, to_shift, None


_Steps = list[tuple[int, Any]]


def _run(steps: _Steps, members: int) -> None:
    """Run steps of the native library, one member after the other."""
    kinds = (ctypes.c_int * len(steps))(*(kind for kind, _ in steps))
    layers = (ctypes.c_void_p * len(steps))(*(ctypes.addressof(layer) for _, layer in steps))
    load().run("plures_steps", load().kernels, kinds, layers, len(steps), members)


def _sums(x: Tensor, values: Tensor, bias: Tensor | None, order: Order, y: Tensor, shape: Shape) -> Any:
    """Return the step that writes sums over each member's kernels into `y`, whose rows and columns may lie apart."""
    bias = x.new_zeros(len(order.starts), y.shape[2]) if bias is None else bias
    return filled(
        Convolution,
        *(x, None, values, bias, order.starts, order.places, y),
        *(0 if len(x) == 1 else x.stride(0), y.stride(2), y.stride(3), y.stride(4)),
        *(len(bias), *x.shape[1:5], *y.shape[2:5], *chain(*shape)),
        *(x.shape[5], order.group, True, False),
    )


def _to_input(
    gradient: Tensor, to_x: Tensor, weight: Tensor, kernels: MemberKernels, shape: Shape, steps: _Steps
) -> None:
    """Convolve the gradient with the flipped kernels, from the outputs to the inputs.

    With a stride, pixels see other taps than their neighbours do: those of each remainder are a convolution.
    """
    size, stride, padding = shape
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
            steps.append((_CONVOLUTION, _sums(gradient, part, None, kernels.backward, target, sides)))


def _norm(tensors: list[Tensor | None], apart: int, epsilon: float, relu: bool, backward: bool) -> Any:
    x = cast(Tensor, tensors[0])
    return filled(Norm, *tensors, *x.shape[:3], x[0, 0, 0].numel(), apart, epsilon, relu, backward)
