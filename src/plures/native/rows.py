"""A linear layer of all members over the single weights that each of them owns, as torch differentiates it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plures.errors import PluresError
from plures.native.library import load
from plures.native.structures import MOST, Rows, floats
from plures.native.training import MemberKernels, Order, check_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: MemberKernels) -> Tensor:
    """Multiply rows, [members or 1, rows, inputs], by the weights that each member has: [members, rows, outputs].

        y = linear(x, weight, bias, kernels_of(owners == members))

    `bias` is [members, outputs]. The gradient of a weight comes from the member that has it; other weights get zero.
    """
    members, outputs, inputs = len(kernels.forward.starts), kernels.outputs, kernels.inputs
    x, weight = floats("rows", x, None, None, inputs), floats("weight", weight, outputs, inputs)
    bias = None if bias is None else floats("bias", bias, members, outputs)
    if x.shape[0] not in (1, members) or not 0 < x.shape[1] < MOST:
        raise PluresError(f"a weight {tuple(weight.shape)} of {members} members cannot run over rows {tuple(x.shape)}")
    check_kernels(kernels, weight.numel())
    result: Tensor = _Linear.apply(x, weight, bias, kernels)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: MemberKernels) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        y = x.new_empty(kernels.forward.starts.shape[0], x.shape[1], kernels.outputs)
        _run(x, weight, bias, y, None, kernels.forward)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, (x, weight), kernels = gradients[0].contiguous(), ctx.saved_tensors, ctx.kernels
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = gradient.new_empty(len(gradient), *x.shape[1:])
            _run(gradient, weight, None, to_x, None, kernels.backward)
            to_x = to_x if len(x) == len(to_x) else to_x.sum(0, keepdim=True)
        if ctx.needs_input_grad[1]:
            to_weight = torch.zeros_like(weight)
            _run(x, weight, None, gradient, to_weight, kernels.forward)
        return to_x, to_weight, gradient.sum(1) if ctx.needs_input_grad[2] else None, None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, to_weight: Tensor | None, order: Order) -> None:
    shared, (members, rows, outputs) = x.shape[0] == 1, y.shape
    held = (x, weight, bias, y, to_weight, order.starts, order.places, order.rows)
    pointers = [None if one is None else one.data_ptr() for one in held]
    layer = Rows(*pointers, 0 if shared else x.stride(0), members, rows, x.shape[2], outputs, order.group)
    library = load()
    library.run("plures_rows", library.kernels, layer)
