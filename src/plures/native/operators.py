"""The native library's operators as torch sees them: with schema and shapes, so that export and compile can trace them.

Activations of all members are `blocked`: [members, blocks of images, channels, rows, columns, lanes]. As many images as
there are lanes lie side by side and fill the CPU's vectors; with one lane the pixels of one image do.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plures.errors import PluresError
from plures.native.library import Library, load
from plures.native.structures import (
    BLOCK,
    LINEAR_GROUP,
    MOST,
    MOST_PLACES,
    Affine,
    Blocking,
    Convolution,
    Linear,
    Rows,
    check_lists,
    filled,
    floats,
    is_plain,
    recall,
    refuse_gradients,
    remember,
)

MOST_STEPS = 256  # the largest size, stride and padding of a kernel

_LISTS = "Tensor starts, Tensor places, Tensor values, Tensor bias"
_operators = torch.library.Library("plures", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    f"convolution(Tensor x, Tensor? residual, {_LISTS}, int[] kernel, int[] stride, int[] padding, int inputs, "
    "int group, bool whole, int relu) -> Tensor",
    "linear(Tensor x, Tensor starts, Tensor places, Tensor weights, Tensor owners, Tensor bias, Tensor ids, "
    "int[] sizes) -> Tensor",
    "block(Tensor x, int members, int lanes) -> Tensor",
    "unblock(Tensor x, int images) -> Tensor",
    "affine(Tensor x, Tensor factor, Tensor shift, int relu) -> Tensor",
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
    relu: int,
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
    if min(output.shape) < 1 or lanes not in library.layouts or read >= MOST:
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
        *(0 if x.shape[0] == 1 else x.stride(0), *output.stride()[2:5]),
        *(members, images, channels, height, width, outputs, output.shape[3], output.shape[4]),
        *(*kernel, *stride, *padding, lanes, group, whole, relu),
    )
    library.run("plures_convolution", library.kernels, layer)
    return output


def _linear(
    x: Tensor,
    starts: Tensor,
    places: Tensor,
    weights: Tensor,
    owners: Tensor,
    bias: Tensor,
    ids: Tensor,
    sizes: list[int],
) -> Tensor:
    """Run a chain of linear layers of all members, whose `LinearWeights` are joined.

    `ids` says which number the members have among the owners. Each layer
    has five sizes: inputs, outputs, each, the length of its places, and whether a ReLU follows.
    """
    held = (starts, places, weights, owners, bias, ids)
    if (layers := recall(held, *sizes)) is None:
        layers = _layers(held, sizes)
        remember(layers, held, *sizes)
    members, outputs = ids.shape[0], sizes[-4]
    refuse_gradients(x, weights, bias)
    x = floats("activations", x, None, None, sizes[0])
    own, rows, _ = x.shape
    if own not in (1, members) or rows >= MOST:
        raise PluresError(f"activations {tuple(x.shape)} do not fit {members} members")
    output = x.new_empty(members, rows, outputs)
    if rows:
        library, stride = load(), 0 if own == 1 else x.stride(0)
        given = (x.data_ptr(), output.data_ptr(), None, None, ctypes.addressof(layers), ids.data_ptr(), stride)
        library.run("plures_rows", library.kernels, Rows(*given, members, rows, len(layers), 0))
    return output


def linear_of(x: Tensor) -> Callable[..., Tensor]:
    """Return how to run a chain on a tensor: without torch's dispatcher, which takes as long as a small layer."""
    return linear if torch.compiler.is_compiling() or type(x) is not Tensor else _linear


def _layers(held: Sequence[Tensor], sizes: list[int]) -> Any:
    """Check the layers of a chain, and fill their structures."""
    members, made, used = len(held[-1]), (Linear * (len(sizes) // 5))(), [0] * 5
    whole, real = torch.int32, torch.float32
    kinds = [(whole, 2), (torch.int16, 1), (real, 1), (torch.uint8, 1), (real, 2), (whole, 1)]
    plain = [(one.dtype, one.dim()) for one in held if one.is_cpu and one.is_contiguous()] == kinds
    if not plain or not members or not sizes or len(sizes) % 5 or len(held[0]) != members or len(held[4]) != members:
        raise PluresError("linear layers take float32 and lists on the CPU, one after the other: use linear_lists")

    def take(place: int, length: int) -> Tensor:
        first, used[place] = used[place], used[place] + length
        if not 0 <= length <= held[place].shape[-1] - first:
            raise PluresError("the tensors of a chain of linear layers are too short for it: make them by linear_lists")
        return held[place].narrow(-1, first, length)

    outputs = sizes[0]
    for number, layer in enumerate(made):
        before, (inputs, outputs, each, count, relu) = outputs, sizes[5 * number :][:5]
        if (
            inputs != before
            or not 0 < min(inputs, outputs) <= max(inputs, outputs) < MOST // 8
            or each not in (1, BLOCK)
        ):
            raise PluresError(f"a layer of {inputs} inputs and {outputs} outputs cannot follow {before} outputs")
        group = min(inputs, LINEAR_GROUP)
        groups, single = -(-inputs // group), outputs * inputs if each == 1 else 0
        starts, places = take(0, groups * -(-outputs // each) + 1), take(1, count)
        check_lists(starts, places, groups, group, inputs - (groups - 1) * group)
        weights, owners, bias = take(2, single or count * BLOCK), take(3, single), take(4, outputs)
        pointers = (weights.data_ptr(), owners.data_ptr() if single else None, starts.data_ptr(), places.data_ptr())
        strides = (held[0].shape[1], 0, inputs, 1)
        layer.forward = (*pointers, *strides, inputs, outputs, group, each)
        layer.bias, layer.bias_stride, layer.relu = bias.data_ptr(), held[4].shape[1], relu
    return made


def _blocked_shape(x: Tensor, members: int, lanes: int) -> list[int]:
    images = x.shape[0] // members
    return [members, -(-images // lanes), *x.shape[1:], lanes]


def _block(x: Tensor, members: int, lanes: int) -> Tensor:
    library = load()
    refuse_gradients(x)
    fits = x.dim() == 4 and members > 0 and x.shape[0] % members == 0 and lanes in library.layouts
    if not fits or not is_plain(x):
        raise PluresError(
            f"images must be float32 on the CPU, [{members} members * batch, channels, rows, columns], in "
            f"{library.layouts} lanes, not {x.dtype} {tuple(x.shape)} on {x.device} in {lanes} lanes"
        )
    output = x.new_empty(_blocked_shape(x, members, lanes))
    _relay(library, x, output, back=False)
    return output


def _unblock(x: Tensor, images: int) -> Tensor:
    library = load()
    refuse_gradients(x)
    x = floats("activations", x, *[None] * 6)
    members, blocks, channels, height, width, lanes = x.shape
    if lanes not in library.layouts or not (blocks - 1) * lanes < images <= blocks * lanes:
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


def _affine(x: Tensor, factor: Tensor, shift: Tensor, relu: int) -> Tensor:
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
    ("linear", _linear, lambda x, *given: x.new_empty(len(given[5]), x.shape[1], given[6][-4])),
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
    if starts.shape != (members, groups * outputs + 1) or not starts.is_contiguous() or places.dim() != 1:
        raise PluresError(
            f"lists {tuple(starts.shape)} do not fit this layer: they must be ({members}, {groups * outputs + 1})"
        )
    refuse_gradients(values)
    check_lists(starts, places, groups, group * named, (inputs - (groups - 1) * group) * named)
    return floats("values", values, len(places), each)
