"""Chains of linear layers of all members over the weights that each of them has, as torch differentiates them."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plures.errors import PluresError
from plures.native.library import load
from plures.native.structures import MOST, Linear, Rows, floats
from plures.native.training import MemberKernels, Memory

TILE = 64  # rows that the library pads to, at most


class LinearLayer(NamedTuple):
    """A linear layer of all members, with the weights that each has, and the ReLU that may follow.

    The weight is [outputs, inputs], or [members, outputs, inputs] if each member has one of its own; the bias is
    [members, outputs].
    """

    weight: Tensor
    bias: Tensor | None
    kernels: MemberKernels
    relu: bool = False


def linear(x: Tensor, *layers: LinearLayer, memory: Memory | None = None) -> Tensor:
    """Run a chain of linear layers on rows, [members or 1, rows, inputs]: [members, rows, outputs].

        y = linear(x, LinearLayer(weight, bias, kernels_of(owners == members)))

    The gradient of a weight comes from the member that has it; other weights get zero. What the way back needs is
    written to `memory`.
    """
    members, inputs = len(layers[0].kernels.forward.starts), layers[0].kernels.inputs
    x = floats("rows", x, None, None, inputs)
    if x.shape[0] not in (1, members) or not 0 < x.shape[1] < MOST:
        raise PluresError(f"linear layers of {members} members cannot run over rows {tuple(x.shape)}")
    weights, biases = [], []
    for weight, bias, kernels, _ in layers:
        if len(kernels.forward.starts) != members or kernels.inputs != inputs:
            raise PluresError(f"a layer of {kernels.inputs} inputs cannot follow one of {inputs} outputs")
        weights.append(floats("weight", weight, *kernels.own, kernels.outputs, inputs))
        biases.append(None if bias is None else floats("bias", bias, members, kernels.outputs))
        inputs = kernels.outputs
    given = [(kernels, relu) for _, _, kernels, relu in layers]
    result: Tensor = _Chain.apply(x, given, memory or Memory(), *weights, *biases)  # type: ignore[no-untyped-call]
    return result


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, given: list[tuple[MemberKernels, bool]], memory: Memory, *tensors: Tensor | None
    ) -> Tensor:
        members, rows = len(given[0][0].forward.starts), x.shape[1]
        width = given[0][0].inputs + sum(kernels.outputs for kernels, _ in given)
        kept = memory.empty(members * -(-rows // TILE) * TILE * width)
        y = x.new_empty(members, rows, given[-1][0].outputs)
        stride = 0 if len(x) == 1 else x.stride(0)
        _run(_filled(given, tensors), x.data_ptr(), y, kept, None, stride)
        ctx.save_for_backward(kept, *tensors)
        ctx.given, ctx.shape = given, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, (kept, *tensors), needed = gradients[0].contiguous(), ctx.saved_tensors, ctx.needs_input_grad
        layers, found = _filled(ctx.given, tensors), list[Tensor | None]()
        for place, (one, wanted) in enumerate(zip(tensors, needed[3:], strict=True)):
            layer = layers[place % len(layers)]
            is_weight = place < len(layers)
            to = None if one is None or not wanted else torch.zeros_like(one) if is_weight else torch.empty_like(one)
            found.append(to)
            setattr(layer, "to_weight" if is_weight else "to_bias", None if to is None else to.data_ptr())
        to_x = gradient.new_empty(len(gradient), *ctx.shape[1:]) if needed[0] else None
        _run(layers, None, gradient, kept, to_x, 0)
        shared = to_x is not None and ctx.shape[0] < len(to_x)
        return to_x.sum(0, keepdim=True) if to_x is not None and shared else to_x, None, None, *found


def _filled(given: list[tuple[MemberKernels, bool]], tensors: Sequence[Tensor | None]) -> Any:
    layers = (Linear * len(given))()
    weights, biases = tensors[: len(given)], tensors[len(given) :]
    for layer, (kernels, relu), weight, bias in zip(layers, given, weights, biases, strict=True):
        inputs, outputs, at = kernels.inputs, kernels.outputs, weight.data_ptr()  # type: ignore[union-attr]
        own = inputs * outputs if kernels.own else 0
        for order, name, steps in (
            (kernels.forward, "forward", (inputs, 1)),
            (kernels.backward, "backward", (1, inputs)),
        ):
            starts, places, _, group = order
            sizes = (inputs, outputs) if name == "forward" else (outputs, inputs)
            lists = (at, None, starts.data_ptr(), places.data_ptr(), starts.shape[1], own, *steps, *sizes, group, 1)
            setattr(layer, name, lists)
        layer.bias, layer.bias_stride, layer.relu = None if bias is None else bias.data_ptr(), outputs, relu
    return layers


def _run(layers: Any, x: int | None, y: Tensor, kept: Tensor, to_x: Tensor | None, stride: int) -> None:
    members, rows, _ = y.shape
    pointers = (x, y.data_ptr(), kept.data_ptr(), None if to_x is None else to_x.data_ptr())
    library, backward = load(), x is None
    layer = Rows(*pointers, ctypes.addressof(layers), None, stride, members, rows, len(layers), backward)
    library.run("plures_rows", library.kernels, layer)
