"""The native library's operators as torch sees them: with schema and shapes, so that export and compile can trace them.

Activations of all members are `blocked`: [members, blocks of images, channels, rows, columns, lanes]. As many images as
there are lanes lie side by side and fill the CPU's vectors; with one lane the pixels of one image do.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plures.errors import PluresError
from plures.native.library import load

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _structure(name: str, pointers: str, longs: str, ints: str) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [(field, _POINTER) for field in pointers.split()]
    fields += [(field, _LONG) for field in longs.split()]
    fields += [(field, _INT) for field in ints.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# As in owned.h, field by field.
_Convolution = _structure(
    "Convolution",
    "input residual values bias starts places output",
    "input_member_stride input_channel_stride input_pixel_stride output_channel_stride output_pixel_stride",
    "members images channels height width outputs output_height output_width kernel_height kernel_width "
    "stride_y stride_x padding_y padding_x lanes group whole relu",
)
_BlockLinear = _structure(
    "BlockLinear",
    "input values bias starts places output",
    "input_member_stride",
    "members rows inputs outputs group relu",
)
_Blocking = _structure(
    "Blocking",
    "plain blocked",
    "image_stride channel_stride row_stride column_stride",
    "images channels height width lanes",
)
_Affine = _structure(
    "Affine", "input factor shift output", "input_member_stride", "members images channels pixels relu"
)

_LISTS = "Tensor starts, Tensor places, Tensor values, Tensor bias"
_operators = torch.library.Library("plures", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    f"convolution(Tensor x, Tensor? residual, {_LISTS}, int[] kernel, int[] stride, int[] padding, int inputs, "
    "int group, bool whole, bool relu) -> Tensor",
    f"linear(Tensor x, {_LISTS}, int inputs, int group, bool relu) -> Tensor",
    f"block_linear(Tensor x, {_LISTS}, int inputs, int group, bool relu) -> Tensor",
    "block(Tensor x, int members, int lanes) -> Tensor",
    "unblock(Tensor x, int images) -> Tensor",
    "affine(Tensor x, Tensor factor, Tensor shift, bool relu) -> Tensor",
)
for _schema in _SCHEMAS:
    _operators.define(_schema)  # type: ignore[no-untyped-call]

convolution = torch.ops.plures.convolution
linear = torch.ops.plures.linear
block_linear = torch.ops.plures.block_linear
block = torch.ops.plures.block
unblock = torch.ops.plures.unblock
affine = torch.ops.plures.affine


def _convolved(x: Tensor, bias: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    sizes = [(x.shape[3 + axis] + 2 * padding[axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1)]
    return x.new_empty(bias.shape[0], x.shape[1], bias.shape[1], *sizes, x.shape[5])


def _rows(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(bias.shape[0], x.shape[1], bias.shape[1])


def _convolution(
    x: Tensor,
    residual: Tensor | None,
    starts: Tensor,
    places: Tensor,
    values: Tensor,
    bias: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    inputs: int,
    group: int,
    whole: bool,
    relu: bool,
) -> Tensor:
    library = load()
    x = _ready(x, 6, bias, inputs)
    members, outputs = bias.shape
    output = _convolved(x, bias, kernel, stride, padding)
    _, images, channels, height, width, lanes = x.shape
    if min(output.shape) < 1 or lanes not in (1, library.lanes):
        raise PluresError(f"a kernel of {tuple(kernel)} cannot run over {tuple(x.shape)}")
    if residual is not None:
        residual = residual.contiguous()
        if residual.shape != output.shape or residual.dtype != torch.float32:
            raise PluresError(f"the residual has the shape {tuple(residual.shape)}, not {tuple(output.shape)}")
    _check_lists(
        starts, places, values, members, -(-channels // group) * outputs, kernel[0] * kernel[1] if whole else 1
    )
    layer = _Convolution(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        values.data_ptr(),
        bias.data_ptr(),
        starts.data_ptr(),
        places.data_ptr(),
        output.data_ptr(),
        0 if x.shape[0] == 1 else x.stride(0),
        height * width,
        1,
        output.shape[3] * output.shape[4],
        1,
        *(members, images, channels, height, width, outputs, output.shape[3], output.shape[4]),
        *(*kernel, *stride, *padding, lanes, group, whole, relu),
    )
    _run(library.functions.plures_convolution, library.kernels, ctypes.byref(layer))
    return output


def _linear(
    x: Tensor, starts: Tensor, places: Tensor, values: Tensor, bias: Tensor, inputs: int, group: int, relu: bool
) -> Tensor:
    """Run a linear layer of single weights as a kernel of one tap over a map of one line: its pixels are the rows."""
    library = load()
    x = _ready(x, 3, bias, inputs)
    members, outputs = bias.shape
    rows = x.shape[1]
    output = _rows(x, bias)
    _check_lists(starts, places, values, members, -(-inputs // group) * outputs, 1)
    layer = _Convolution(
        *(x.data_ptr(), None, values.data_ptr(), bias.data_ptr(), starts.data_ptr(), places.data_ptr()),
        output.data_ptr(),
        0 if x.shape[0] == 1 else x.stride(0),
        *(1, inputs, 1, outputs),
        *(members, 1, inputs, 1, rows, outputs, 1, rows),
        *(1, 1, 1, 1, 0, 0, 1, group, True, relu),
    )
    if rows:
        _run(library.functions.plures_convolution, library.kernels, ctypes.byref(layer))
    return output


def _block_linear(
    x: Tensor, starts: Tensor, places: Tensor, values: Tensor, bias: Tensor, inputs: int, group: int, relu: bool
) -> Tensor:
    library = load()
    x = _ready(x, 3, bias, inputs)
    members, outputs = bias.shape
    output = _rows(x, bias)
    _check_lists(starts, places, values, members, -(-inputs // group) * -(-outputs // 8), 8)
    layer = _BlockLinear(
        *(x.data_ptr(), values.data_ptr(), bias.data_ptr(), starts.data_ptr(), places.data_ptr(), output.data_ptr()),
        0 if x.shape[0] == 1 else x.stride(0),
        *(members, x.shape[1], x.shape[2], outputs, group, relu),
    )
    if x.shape[1]:
        _run(library.functions.plures_block_linear, library.kernels, ctypes.byref(layer))
    return output


def _blocked_shape(x: Tensor, members: int, lanes: int) -> list[int]:
    images = x.shape[0] // members
    return [members, -(-images // lanes), *x.shape[1:], lanes]


def _block(x: Tensor, members: int, lanes: int) -> Tensor:
    functions = load().functions
    if x.dim() != 4 or x.dtype != torch.float32 or not x.is_cpu or x.shape[0] % members:
        raise PluresError(
            f"images must be float32 on the CPU, [members * batch, channels, rows, columns], not {x.shape}"
        )
    output = x.new_empty(_blocked_shape(x, members, lanes))
    for part, blocked in zip(x.chunk(members), output, strict=True):
        layout = _Blocking(part.data_ptr(), blocked.data_ptr(), *part.stride(), *part.shape, lanes)
        _run(functions.plures_block, ctypes.byref(layout), 0)
    return output


def _unblock(x: Tensor, images: int) -> Tensor:
    functions = load().functions
    x = x.contiguous()
    members, _, channels, height, width, lanes = x.shape
    output = x.new_empty(members * images, channels, height, width)
    for part, blocked in zip(output.chunk(members), x, strict=True):
        layout = _Blocking(part.data_ptr(), blocked.data_ptr(), *part.stride(), *part.shape, lanes)
        _run(functions.plures_block, ctypes.byref(layout), 1)
    return output


def _affine(x: Tensor, factor: Tensor, shift: Tensor, relu: bool) -> Tensor:
    x = _ready(x, 6, factor, factor.shape[1])
    members, channels = factor.shape
    if factor.shape != shift.shape:
        raise PluresError(f"factors and shifts differ in shape: {tuple(factor.shape)} and {tuple(shift.shape)}")
    output = x.new_empty(members, *x.shape[1:])
    layer = _Affine(
        *(x.data_ptr(), factor.data_ptr(), shift.data_ptr(), output.data_ptr(), 0 if x.shape[0] == 1 else x.stride(0)),
        *(members, x.shape[1], channels, x.shape[3] * x.shape[4] * x.shape[5], relu),
    )
    _run(load().functions.plures_affine, ctypes.byref(layer))
    return output


def _fake_convolution(x: Tensor, _added: object, *rest: Any) -> Tensor:
    bias, kernel, stride, padding = rest[3:7]
    return _convolved(x, bias, kernel, stride, padding)


def _fake_linear(x: Tensor, _starts: object, _places: object, _values: object, bias: Tensor, *_: object) -> Tensor:
    return _rows(x, bias)


def _fake_block(x: Tensor, members: int, lanes: int) -> Tensor:
    return x.new_empty(_blocked_shape(x, members, lanes))


def _fake_unblock(x: Tensor, images: int) -> Tensor:
    return x.new_empty(x.shape[0] * images, x.shape[2], x.shape[3], x.shape[4])


def _fake_affine(x: Tensor, factor: Tensor, _shift: Tensor, _relu: bool) -> Tensor:
    return x.new_empty(factor.shape[0], *x.shape[1:])


for _name, _kernel, _fake in (
    ("convolution", _convolution, _fake_convolution),
    ("linear", _linear, _fake_linear),
    ("block_linear", _block_linear, _fake_linear),
    ("block", _block, _fake_block),
    ("unblock", _unblock, _fake_unblock),
    ("affine", _affine, _fake_affine),
):
    _operators.impl(_name, _kernel, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"plures::{_name}", _fake)


def _ready(x: Tensor, dimensions: int, of_members: Tensor, inputs: int) -> Tensor:
    members = of_members.shape[0]
    fits = x.dim() == dimensions and x.shape[0] in (1, members) and x.shape[2] == inputs
    if not fits or x.dtype != torch.float32 or not x.is_cpu:
        raise PluresError(
            f"activations must be float32 on the CPU with {dimensions} dimensions, of 1 or {members} members and "
            f"{inputs} inputs, not {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    return x.contiguous()


def _check_lists(starts: Tensor, places: Tensor, values: Tensor, members: int, lists: int, each: int) -> None:
    entries = places.numel()
    fits = starts.shape == (members, lists + 1) and starts.is_contiguous() and values.numel() == entries * each
    if not fits:  # what the lists say is right by the way they are made
        raise PluresError(
            f"lists {tuple(starts.shape)} of {entries} entries do not fit this layer: ({members}, {lists + 1})"
        )


def _run(function: Any, *arguments: object) -> None:
    if function(*arguments, torch.get_num_threads()):
        raise MemoryError("no memory is left for the native library")
