"""What goes into the library: structures as C sees them, lists of what members own, and checks that keep it safe."""

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from plures.errors import PluresError

MOST = 2**30
BLOCK = 8  # outputs of one input that have one owner with granularity "block": a vector of the CPU
MOST_PLACES = 2**16  # of one list: they are kept in 16 bits
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def _structure(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    named = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": named})


# As in owned.h and training.h, field by field. The library compares the sizes when it is loaded.
Convolution = _structure(
    "Convolution",
    (_POINTER, "input residual values bias starts places output"),
    (_LONG, "input_member_stride input_channel_stride input_pixel_stride"),
    (_LONG, "output_channel_stride output_row_stride output_pixel_stride"),
    (_INT, "members images channels height width outputs output_height output_width kernel_height kernel_width"),
    (_INT, "stride_y stride_x padding_y padding_x lanes group whole relu"),
)
BlockLinear = _structure(
    "BlockLinear",
    (_POINTER, "input values bias starts places output"),
    (_LONG, "input_member_stride"),
    (_INT, "members rows inputs outputs group relu"),
)
Blocking = _structure(
    "Blocking",
    (_POINTER, "plain blocked"),
    (_LONG, "image_stride channel_stride row_stride column_stride"),
    (_INT, "images channels height width lanes"),
)
Affine = _structure(
    "Affine",
    (_POINTER, "input factor shift output"),
    (_LONG, "input_member_stride"),
    (_INT, "members images channels pixels relu"),
)
KernelGradient = _structure(
    "KernelGradient",
    (_POINTER, "input gradient to starts places rows"),
    (_LONG, "input_member_stride gradient_member_stride"),
    (_INT, "members blocks channels height width outputs output_height output_width"),
    (_INT, "kernel_height kernel_width stride_y stride_x padding_y padding_x"),
)
Norm = _structure(
    "Norm",
    (_POINTER, "input residual weight bias gradient output mean variance"),
    (_POINTER, "to_residual to_input to_weight to_bias"),
    (_LONG, "members blocks channels pixels to_input_member_stride"),
    (ctypes.c_double, "epsilon"),
    (_INT, "relu backward"),
)
Rows = _structure(
    "Rows",
    (_POINTER, "input weight bias output to_weight starts places at"),
    (_LONG, "input_member_stride"),
    (_INT, "members rows inputs outputs group"),
)
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    *(Convolution, BlockLinear, Blocking, Affine, KernelGradient, Norm, Rows),
)


def filled(kind: type[ctypes.Structure], *values: Any) -> Any:
    """Fill a structure, with the addresses of tensors; refuse numbers that do not fit, which ctypes would cut off."""
    names = [name for name, field in kind._fields_ if field is _INT]  # type: ignore[misc]  # the last ones
    numbers = values[-len(names) :]
    if not -MOST < min(numbers) <= max(numbers) < MOST:  # so that sums of two are integers, too
        name, value = next(pair for pair in zip(names, numbers, strict=True) if not -MOST < pair[1] < MOST)
        raise PluresError(f"{name} is {value}, and the native library counts to {MOST}: use smaller batches")
    made = kind(*(value.data_ptr() if isinstance(value, Tensor) else value for value in values))
    made.tensors = values  # live as long as their addresses are used
    return made


def floats(name: str, tensor: Tensor, *shape: int | None) -> Tensor:
    """Return a tensor of float32 on the CPU as one block of memory; refuse others, and other shapes (None: any)."""
    lengths = zip(tensor.shape, shape, strict=False)
    fits = tensor.dim() == len(shape) and all(want in (None, have) for have, want in lengths)
    if not fits or not is_plain(tensor):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise PluresError(
            f"the native library needs the {name} as float32 on the CPU with the shape [{wanted}], not "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is float32 on the CPU, with its values in memory as they are.

    >>> is_plain(torch.zeros(3).double())
    False
    """
    usual = tensor.dtype == torch.float32 and tensor.is_cpu and tensor.layout == torch.strided
    return usual and not tensor.is_neg()


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient in grad mode: the kernels that predict compute none."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise PluresError(
            'the owned engine computes no gradients: call it under torch.no_grad(), or use ensemble.engine("unfolded")'
        )


def was_checked(tensors: Sequence[Tensor], *settings: int) -> bool:
    """Return whether these tensors were passed to `remember` with these settings, and are unchanged since."""
    references, known = _checked.get(tensors[0], ((), None))  # type: ignore[no-untyped-call]
    held = [reference() for reference in references]
    return list(map(id, held)) == list(map(id, tensors)) and known == _state(tensors, settings)


def remember(tensors: Sequence[Tensor], *settings: int) -> None:
    """Remember that tensors were found right; those that do not count their changes are checked every time."""
    if not any(tensor.is_inference() for tensor in tensors):
        _checked[tensors[0]] = ([weakref.ref(tensor) for tensor in tensors], _state(tensors, settings))


_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _state(tensors: Sequence[Tensor], settings: tuple[int, ...]) -> tuple[Any, ...]:
    return (settings, *((tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()) for tensor in tensors))


def check_lists(starts: Tensor, places: Tensor, groups: int, limit: int, last_limit: int) -> None:
    """Check that lists, starts [members, lists + 1], stay inside of `places`, and places inside of a group of inputs.

    What was found right is remembered until the tensors change.
    """
    if was_checked((starts, places), groups, limit, last_limit):
        return
    for name, tensor, dtype in (("starts", starts, torch.int32), ("places", places, torch.int16)):
        if tensor.dtype != dtype or not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise PluresError(f"{name} must be contiguous {dtype} on the CPU, not {tensor.dtype} on {tensor.device}")
    begins, named = starts.numpy(), places.numpy().view(np.uint16)
    if begins.min() < 0 or begins.max() > named.size or (np.diff(begins, axis=1) < 0).any():
        raise PluresError(f"the lists do not fit this layer: starts must grow from 0 to at most {named.size}")
    for row in begins:
        middle = row[(groups - 1) * ((row.size - 1) // groups)]
        for part, most in ((named[row[0] : middle], limit), (named[middle : row[-1]], last_limit)):
            if part.size and part.max() >= most:
                raise PluresError(f"the lists do not fit this layer: places must be below {most}, not {part.max()}")
    remember((starts, places), groups, limit, last_limit)


class Lists(NamedTuple):
    """What the members own of a layer: a list per member, group of inputs, and output or block of outputs.

    `starts`, [members, lists + 1], says where each list begins and the last one ends, `places` what its entries are
    multiplied with, `values`, [kernels, taps] or [weights, 1], by what. `group` inputs are processed
    at a time, so that they stay in the cache.
    """

    starts: Tensor
    places: Tensor
    values: Tensor
    inputs: int
    group: int
    whole: bool


def kernel_lists(weight: Tensor, owners: Tensor, members: list[int], scales: Tensor | None = None) -> Lists:
    """List the kernels or single weights of a convolution, [outputs, inputs, height, width], that each member owns.

    Owners have the shape of the weight, or [outputs, inputs, 1, 1] if a kernel has one owner. `scales`, [members,
    outputs], are multiplied in.
    """
    outputs, inputs, *kernel = weight.shape
    taps = math.prod(kernel)
    whole = owners.numel() == outputs * inputs
    # Single weights need an input of their own each: this many channels stay in the first cache. Kernels do not.
    most = MOST_PLACES if whole and taps > 1 else min(max(1, MOST_PLACES // taps), 32 if taps > 1 else 64)
    group = min(inputs, most)
    places = 1 if whole else taps
    entries = weight.reshape(outputs, inputs, places, -1)
    return _lists(entries, owners.reshape(outputs, inputs, places), members, scales, group, whole)


def block_lists(weight: Tensor, owners: Tensor, members: list[int], scales: Tensor | None = None) -> Lists:
    """List the blocks of 8 outputs of a linear layer, [outputs, inputs], that each member owns.

    Owners have the shape [outputs / 8, inputs], rounded up.
    """
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    missing = blocks * BLOCK - outputs
    scales = None if scales is None else F.pad(scales, (0, missing))
    padded = F.pad(weight, (0, 0, 0, missing))
    entries = padded.reshape(blocks, BLOCK, inputs).transpose(1, 2).reshape(blocks, inputs, 1, BLOCK)
    return _lists(entries, owners.reshape(blocks, inputs, 1), members, scales, min(inputs, 512), True)


def _lists(
    entries: Tensor, owners: Tensor, members: list[int], scales: Tensor | None, group: int, whole: bool
) -> Lists:
    """List the entries, [outputs, inputs, places, values], of the members; drop what has no owner."""
    outputs, inputs, places = owners.shape
    if entries.dtype != torch.float32:
        raise PluresError(f"the native library multiplies float32, not {entries.dtype}")
    mine = owners.cpu() == torch.tensor(members, dtype=owners.dtype)[:, None, None, None]
    order = in_order(mine, group)
    rows = order.output * (inputs * places) + order.channel * places + order.places % places
    values = entries.detach().cpu().reshape(outputs * inputs * places, -1)[rows]
    if scales is not None:
        factors = scales.detach().cpu().reshape(len(members), outputs, -1)  # 8 of each output in blocks
        values = values * factors[order.member, order.output]
    return Lists(order.starts, order.places.to(torch.int16), values.contiguous(), inputs, group, whole)


class InOrder(NamedTuple):
    """Where lists start, [members, lists + 1], and for each entry its place in the group, and to what it belongs."""

    starts: Tensor
    places: Tensor
    member: Tensor
    output: Tensor
    channel: Tensor


def in_order(mine: Tensor, group: int) -> InOrder:
    """Order what each member has, [members, outputs, inputs, places], by member, group of inputs and output."""
    padded = F.pad(mine, (0, 0, 0, -mine.shape[2] % group))
    there = torch.unflatten(padded, 2, (-1, group)).transpose(1, 2)
    counts = there.sum((3, 4)).flatten(1)
    ends = counts.flatten().cumsum(0).view(counts.shape)
    starts = torch.cat([ends[:, :1] - counts[:, :1], ends], 1).int()
    member, in_group, output, within, place = there.nonzero().unbind(1)
    return InOrder(starts, within * mine.shape[3] + place, member, output, in_group * group + within)
