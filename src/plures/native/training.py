"""The native library's functions for training, as torch differentiates them.

Activations are blocked, [blocks of images, channels, rows, columns, lanes]: as many images as there are lanes lie side
by side and fill the CPU's vectors.
"""

import ctypes
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plures.errors import PluresError
from plures.native.library import load
from plures.native.structures import MOST, Maps, MaskedConvolution, Norm, filled, floats, remember, was_checked


def blocked(x: Tensor) -> Tensor:
    """Lay images, [images, channels, rows, columns], side by side; their number is a multiple of the lanes.

    x = blocked(images)
    """
    return torch.unflatten(x, 0, (-1, load().lanes)).permute(0, 2, 3, 4, 1).contiguous()


def unblocked(x: Tensor) -> Tensor:
    """Lay images one after the other again.

    images = unblocked(x)
    """
    return x.permute(0, 4, 1, 2, 3).contiguous().flatten(0, 1)


class KernelLists(NamedTuple):
    """Which kernels a convolution has: for each output the inputs, and for each input the outputs.

    lists = lists_of(mask)  # [outputs, inputs], boolean
    """

    starts: Tensor
    places: Tensor
    starts_of_inputs: Tensor
    places_of_inputs: Tensor


def lists_of(mask: Tensor) -> KernelLists:
    """List the kernels that a mask, [outputs, inputs], keeps.

    >>> lists_of(torch.tensor([[True, False], [True, True]])).places.tolist()
    [0, 0, 1]
    """
    return KernelLists(*_lists(mask.cpu()), *_lists(mask.cpu().t()))


def _lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    ends = mask.sum(1).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32), mask.nonzero()[:, 1].to(torch.int32).contiguous()


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, lists: KernelLists, stride: int, padding: tuple[int, int]
) -> Tensor:
    """Convolve blocked images with the kernels that there are; the weight must be zero elsewhere.

        y = convolution(x, weight, None, lists_of(mask), stride=1, padding=(1, 1))

    Only these kernels get a gradient; all others get zero.
    """
    lanes = load().lanes
    x, weight = floats("images", x, *[None] * 4, lanes), floats("weight", weight, None, x.shape[1], None, None)
    outputs, inputs, *kernel = weight.shape
    bias = None if bias is None else floats("bias", bias, outputs)
    check_lists(lists, outputs, inputs)
    sides = [side + 2 * around - size + 1 for side, around, size in zip(x.shape[2:4], padding, kernel, strict=True)]
    numbers = (stride, *kernel, *(around + 1 for around in padding))
    if min(*x.shape, *sides) < 1 or not all(0 < number <= 256 for number in numbers):
        raise PluresError(f"a weight {tuple(weight.shape)} cannot run over images {tuple(x.shape[1:4])}")
    if inputs * (3 * stride + kernel[0]) * (3 * stride + kernel[1]) * 4 * lanes >= MOST:
        raise PluresError(f"a weight {tuple(weight.shape)} with stride {stride} needs too much memory")
    result: Tensor = _Convolution.apply(x, weight, bias, lists, stride, padding)  # type: ignore[no-untyped-call]
    return result


def check_lists(lists: KernelLists, outputs: int, inputs: int) -> None:
    """Check that lists name kernels of a weight, [outputs, inputs, ...]; remember it until they change.

    check_lists(lists_of(mask), *mask.shape)
    """
    if was_checked(lists, outputs, inputs):
        return
    for starts, places, rows, columns in ((*lists[:2], outputs, inputs), (*lists[2:], inputs, outputs)):
        plain = all(
            t.dtype == torch.int32 and t.is_cpu and t.is_contiguous() and t.dim() == 1 for t in (starts, places)
        )
        if not plain or len(starts) != rows + 1:
            raise PluresError(f"the lists do not fit a weight of {outputs} outputs and {inputs} inputs")
        grows = starts[0] >= 0 and starts[-1] <= len(places) and bool((starts.diff() >= 0).all())
        if not grows or (len(places) and not 0 <= int(places.min()) <= int(places.max()) < columns):
            raise PluresError(f"the lists name kernels that a weight [{outputs}, {inputs}] does not have")
    remember(lists, outputs, inputs)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lists: KernelLists,
        stride: int,
        padding: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = lists, stride, padding
        outputs, _, *kernel = weight.shape
        sides = [(x.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride + 1 for i in (0, 1)]
        y = x.new_empty(len(x), outputs, *sides, x.shape[4])
        ctx.output_shape = y.shape
        _run("plures_masked_sums", _layer(x, y, weight, lists[:2], stride, padding, bias=bias))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = floats("gradient", gradients[0], *ctx.output_shape)
        x, weight = ctx.saved_tensors
        lists, stride, padding = ctx.settings
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_x = _gradient_of_inputs(gradient, x, weight, lists, stride, padding) if needs_x else None
        to_weight = None
        if needs_weight:
            to_weight = torch.zeros_like(weight)
            _run("plures_masked_gradient", _layer(x, gradient, to_weight, lists[:2], stride, padding))
        return to_x, to_weight, gradient.sum((0, 2, 3, 4)) if needs_bias else None, None, None, None


def _gradient_of_inputs(
    gradient: Tensor, x: Tensor, weight: Tensor, lists: KernelLists, stride: int, padding: tuple[int, int]
) -> Tensor:
    """Convolve the gradient with the flipped kernels, from the outputs to the inputs."""
    kernel = weight.shape[2:]
    if stride > 1 and tuple(kernel) == (1, 1) and padding == (0, 0):  # only every so many pixels were read
        to_x = torch.zeros_like(x)
        read = to_x[:, :, ::stride, ::stride]
        read.copy_(_gradient_of_inputs(gradient, read, weight, lists, 1, padding))
        return to_x
    if stride > 1:  # zeros between the pixels
        sides = [(side - 1) * stride + 1 for side in gradient.shape[2:4]]
        apart = gradient.new_zeros(*gradient.shape[:2], *sides, gradient.shape[4])
        apart[:, :, ::stride, ::stride] = gradient
        gradient = apart
    to_x = x.new_empty(x.shape)
    around = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
    _run("plures_masked_sums", _layer(gradient, to_x, weight.transpose(0, 1), lists[2:], 1, around, flipped=True))
    return to_x


def _layer(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    lists: tuple[Tensor, Tensor],
    stride: int,
    padding: tuple[int, int],
    *,
    bias: Tensor | None = None,
    flipped: bool = False,
) -> Any:
    starts, places = lists
    return filled(
        MaskedConvolution,
        filled(Maps, x.data_ptr(), *x.shape[1:4]),
        filled(Maps, y.data_ptr(), *y.shape[1:4]),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        starts.data_ptr(),
        places.data_ptr(),
        *weight.stride()[:2],
        len(x),
        *weight.shape[2:],
        stride,
        *padding,
        flipped,
    )


def norm(x: Tensor, layer: nn.BatchNorm2d, residual: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Normalise blocked images by the statistics of the batch, as a layer in training does, and update its own.

        y = norm(x, layer, shortcut, relu=True)  # relu(layer(x) + shortcut)

    The layer has weights, and running statistics with a momentum.
    """
    channels = layer.num_features
    x = floats("images", x, None, channels, None, None, load().lanes)
    residual = None if residual is None else floats("shortcut", residual, *x.shape)
    tables = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    weight, bias, *_ = (floats("norm layer", cast(Tensor, table), channels) for table in tables)
    if min(x.shape) < 1:
        raise PluresError(f"a norm layer of {channels} channels cannot run over images {tuple(x.shape[1:4])}")
    result, mean, variance = _NormFunction.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, layer.eps, relu
    )
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        layer.running_mean.lerp_(mean, layer.momentum)  # type: ignore[union-attr,arg-type]
        layer.running_var.lerp_(variance * (count / (count - 1)), layer.momentum)  # type: ignore[union-attr,arg-type]
    return result  # type: ignore[no-any-return]


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = torch.empty_like(x), torch.empty_like(bias), torch.empty_like(bias)
        given = [x, residual, weight, bias, None, y, mean, variance, None, None, None, None]
        _run("plures_norm", _norm(given, x, epsilon, relu, backward=False))
        ctx.save_for_backward(x, weight, mean, variance, *([y] if relu else []))
        ctx.settings = epsilon, relu, residual is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight, mean, variance, *rest = ctx.saved_tensors
        gradient = floats("gradient", gradients[0], *x.shape)
        epsilon, relu, added = ctx.settings
        y = rest[0] if relu else None
        passed = torch.empty_like(x) if relu else gradient
        to_x, to_weight, to_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        given = [x, None, weight, None, gradient, y, mean, variance, passed, to_x, to_weight, to_bias]
        _run("plures_norm", _norm(given, x, epsilon, relu, backward=True))
        return to_x, passed if added else None, to_weight, to_bias, None, None


def _norm(given: list[Tensor | None], x: Tensor, epsilon: float, relu: bool, backward: bool) -> Any:
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in given]
    return filled(Norm, *pointers, len(x), x.shape[1], x[0, 0].numel(), epsilon, relu, backward)


def _run(function: str, layer: ctypes.Structure) -> None:
    library = load()
    if getattr(library.functions, function)(library.kernels, ctypes.byref(layer), torch.get_num_threads()):
        raise MemoryError("no memory is left for the native library")
