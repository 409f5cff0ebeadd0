"""The native library's operators as torch sees them: with schema and shapes, so that export and compile can trace them.

Activations of all members are `blocked`: [members, blocks of images, channels, rows, columns, lanes]. As many images as
there are lanes lie side by side and fill the CPU's vectors; with one lane the pixels of one image do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plures.errors import PluresError
from plures.native.library import Library, load
from plures.native.structures import (
    BLOCK,
    MOST,
    MOST_PLACES,
    Affine,
    Blocking,
    BlockLinear,
    Convolution,
    check_lists,
    filled,
    floats,
    is_plain,
    refuse_gradients,
)

MOST_STEPS = 256  # the largest size, stride and padding of a kernel

_LISTS = "Tensor starts, Tensor places, Tensor values, Tensor bias"
_operators = torch.library.Library("plures", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    f"convolution(Tensor x, Tensor? residual, {_LISTS}, int[] kernel, int[] stride, int[] padding, int inputs, "
    "int group, bool whole, bool relu) -> Tensor",
    f"linear(Tensor x, {_LISTS}, int inputs, int group, bool relu) -> Tensor",
    "block(Tensor x, int members, int lanes) -> Tensor",
    "unblock(Tensor x, int images) -> Tensor",
    "affine(Tensor x, Tensor factor, Tensor shift, bool relu) -> Tensor",
)
for _schema in _SCHEMAS:
    _operators.define(_schema)  # type: ignore[no-untyped-call]

convolution = torch.ops.plures.convolution
linear = torch.ops.plures.linear
block = torch.ops.plures.block
unblock = torch.ops.plures.unblock
affine = torch.ops.plures.affine


def _convolved(x: Tensor, bias: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    sizes = [(x.shape[3 + axis] + 2 * padding[axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1)]
    return x.new_empty(bias.shape[0], x.shape[1], bias.shape[1], *sizes, x.shape[5])


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
    pairs = len(kernel) == len(stride) == len(padding) == 2
    if not pairs or not all(0 < n <= MOST_STEPS for n in (*kernel, *stride, *(n + 1 for n in padding))):
        raise PluresError(
            f"a kernel {tuple(kernel)} with the stride {tuple(stride)} and the padding {tuple(padding)} cannot run: "
            f"use two numbers below {MOST_STEPS} each"
        )
    x, bias = _ready(x, 6, bias, inputs)
    members, outputs = bias.shape
    output = _convolved(x, bias, kernel, stride, padding)
    _, images, channels, height, width, lanes = x.shape
    read = inputs * (3 * stride[0] + kernel[0]) * (3 * stride[1] + kernel[1]) * library.lanes  # by a tile of outputs
    if min(output.shape) < 1 or lanes not in (1, library.lanes) or read >= MOST:
        raise PluresError(f"a kernel of {tuple(kernel)} cannot run over {tuple(x.shape)}")
    refuse_gradients(residual)
    if residual is not None:
        residual = floats("residual", residual, *output.shape)
    taps = kernel[0] * kernel[1]
    named, each = (1, taps) if whole else (taps, 1)
    values = _checked(starts, places, values, (members, outputs), inputs, group, named, each)
    layer = filled(
        Convolution,
        *(x, residual, values, bias, starts, places, output),
        0 if x.shape[0] == 1 else x.stride(0),
        *(height * width, 1, output.stride(2), output.stride(3), output.stride(4)),
        *(members, images, channels, height, width, outputs, output.shape[3], output.shape[4]),
        *(*kernel, *stride, *padding, lanes, group, whole, relu),
    )
    library.run("plures_convolution", library.kernels, layer)
    return output


def _linear(
    x: Tensor, starts: Tensor, places: Tensor, values: Tensor, bias: Tensor, inputs: int, group: int, relu: bool
) -> Tensor:
    """Run a linear layer, over blocks of outputs if each entry has the values of one, or over single weights."""
    library = load()
    x, bias = _ready(x, 3, bias, inputs)
    members, outputs = bias.shape
    rows, stride = x.shape[1], 0 if x.shape[0] == 1 else x.stride(0)
    output = x.new_empty(members, rows, outputs)
    in_blocks = values.shape[1:] == (BLOCK,)
    lists, each = (-(-outputs // BLOCK), BLOCK) if in_blocks else (outputs, 1)
    values = _checked(starts, places, values, (members, lists), inputs, group, 1, each)
    if in_blocks:
        sizes = (stride, members, rows, inputs, outputs, group, relu)
        layer = filled(BlockLinear, x, values, bias, starts, places, output, *sizes)
    else:  # a kernel of one tap over a map of one line: its pixels are the rows
        layer = filled(
            Convolution,
            *(x, None, values, bias, starts, places, output),
            *(stride, 1, inputs, 1, rows, outputs),
            *(members, 1, inputs, 1, rows, outputs, 1, rows),
            *(1, 1, 1, 1, 0, 0, 1, group, True, relu),
        )
    if output.numel():
        library.run("plures_block_linear" if in_blocks else "plures_convolution", library.kernels, layer)
    return output


def _blocked_shape(x: Tensor, members: int, lanes: int) -> list[int]:
    images = x.shape[0] // members
    return [members, -(-images // lanes), *x.shape[1:], lanes]


def _block(x: Tensor, members: int, lanes: int) -> Tensor:
    library = load()
    refuse_gradients(x)
    fits = x.dim() == 4 and members > 0 and x.shape[0] % members == 0 and lanes in (1, library.lanes)
    if not fits or not is_plain(x):
        raise PluresError(
            f"images must be float32 on the CPU, [{members} members * batch, channels, rows, columns], in 1 or "
            f"{library.lanes} lanes, not {x.dtype} {tuple(x.shape)} on {x.device} in {lanes} lanes"
        )
    output = x.new_empty(_blocked_shape(x, members, lanes))
    _relay(library, x, output, back=False)
    return output


def _unblock(x: Tensor, images: int) -> Tensor:
    library = load()
    refuse_gradients(x)
    x = floats("activations", x, *[None] * 6)
    members, blocks, channels, height, width, lanes = x.shape
    if lanes not in (1, library.lanes) or not (blocks - 1) * lanes < images <= blocks * lanes:
        raise PluresError(f"{blocks} blocks of {lanes} lanes do not hold {images} images")
    output = x.new_empty(members * images, channels, height, width)
    _relay(library, output, x, back=True)
    return output


def _relay(library: Library, plain: Tensor, blocked: Tensor, back: bool) -> None:
    """Lay the images of each member side by side, or back."""
    if not plain.numel():
        return
    for part, side_by_side in zip(plain.chunk(len(blocked)), blocked, strict=True):
        layout = filled(Blocking, part, side_by_side, *part.stride(), *part.shape, blocked.shape[-1])
        library.run("plures_block", layout, int(back))


def _affine(x: Tensor, factor: Tensor, shift: Tensor, relu: bool) -> Tensor:
    x, factor = _ready(x, 6, factor, factor.shape[-1] if factor.dim() else 0)
    members, channels = factor.shape
    shift = floats("shifts", shift, members, channels)
    refuse_gradients(shift)
    output = x.new_empty(members, *x.shape[1:])
    layer = filled(
        Affine,
        *(x, factor, shift, output, 0 if x.shape[0] == 1 else x.stride(0)),
        *(members, x.shape[1], channels, x.shape[3] * x.shape[4] * x.shape[5], relu),
    )
    if output.numel():
        load().run("plures_affine", layer)
    return output


def _on_one_device(fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Refuse what is partly on the meta device: new tensors of a real one would hold whatever was in memory."""

    def checked(*args: Any) -> Tensor:
        devices = {str(argument.device) for argument in args if isinstance(argument, Tensor)}
        if len(devices) > 1:
            raise PluresError(f"the native library needs all tensors on the CPU, not on {', '.join(sorted(devices))}")
        return fake(*args)

    return checked


for _name, _kernel, _fake in (
    ("convolution", _convolution, lambda x, *given: _convolved(x, *given[4:8])),
    ("linear", _linear, lambda x, *given: x.new_empty(len(given[3]), x.shape[1], given[3].shape[1])),
    ("block", _block, lambda x, *settings: x.new_empty(_blocked_shape(x, *settings))),
    ("unblock", _unblock, lambda x, images: x.new_empty(len(x) * images, *x.shape[2:5])),
    ("affine", _affine, lambda x, factor, *_: x.new_empty(len(factor), *x.shape[1:])),
):
    _operators.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # refuses others
    torch.library.register_fake(f"plures::{_name}", _on_one_device(_fake))


def _ready(x: Tensor, dimensions: int, of_members: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Check activations, [members or 1, rows or blocks, inputs, ...], and a table [members, outputs]."""
    refuse_gradients(x, of_members)
    table = floats("table of members", of_members, None, None)
    x = floats("activations", x, *(None, None, inputs, None, None, None)[:dimensions])
    if len(table) < 1 or inputs < 1 or len(x) not in (1, len(table)):
        raise PluresError(f"activations of {len(x)} members with {inputs} inputs do not fit {len(table)} members")
    return x, table


def _checked(
    starts: Tensor, places: Tensor, values: Tensor, of: tuple[int, int], inputs: int, group: int, named: int, each: int
) -> Tensor:
    """Check lists: one per member, group of inputs and output, whose entries name `named` places of each input."""
    if not 1 <= group <= inputs or group * named > MOST_PLACES:
        raise PluresError(f"groups of {group} do not fit a layer of {inputs} inputs")
    groups, (members, outputs) = -(-inputs // group), of
    if starts.shape != (members, groups * outputs + 1) or places.dim() != 1:
        raise PluresError(
            f"lists {tuple(starts.shape)} do not fit this layer: they must be ({members}, {groups * outputs + 1})"
        )
    refuse_gradients(values)
    check_lists(starts, places, groups, group * named, (inputs - (groups - 1) * group) * named)
    return floats("values", values, len(places), each)
