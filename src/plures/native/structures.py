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

from plures.errors import PluresError

MOST = 2**30
BLOCK = 8  # outputs of one input that have one owner with granularity "block": a vector of the CPU
MOST_PLACES = 2**16  # of one list: they are kept in 16 bits
LINEAR_GROUP = 128  # inputs of a linear layer at a time: with the rows of a tile, they stay in the first caches
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_TEXT, _DIGEST = ctypes.c_char_p, ctypes.c_uint8 * 32


def _structure(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    named = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": named})


# As in owned.h and training.h, field by field. The library compares the sizes when it is loaded.
Convolution = _structure(
    "Convolution",
    (_POINTER, "input residual values bias starts places output"),
    (_LONG, "input_member_stride"),
    (_LONG, "output_channel_stride output_row_stride output_pixel_stride"),
    (_INT, "members images channels height width outputs output_height output_width kernel_height kernel_width"),
    (_INT, "stride_y stride_x padding_y padding_x lanes group whole relu"),
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
LinearLists = _structure(
    "LinearLists",
    (_POINTER, "weight owners starts places"),
    (_LONG, "starts_stride member_stride output_stride input_stride"),
    (_INT, "inputs outputs group each"),
)
Linear = _structure(
    "Linear",
    (LinearLists, "forward backward"),
    (_POINTER, "bias to_weight to_bias"),
    (_LONG, "bias_stride"),
    (_INT, "relu"),
)
Rows = _structure(
    "Rows",
    (_POINTER, "input output kept to_input layers ids"),
    (_LONG, "input_member_stride"),
    (_INT, "members rows count backward"),
)
Digits = _structure("Digits", (_POINTER, "words digits"), (_LONG, "count"), (_INT, "base per_word"))
Placing = _structure("Placing", (_POINTER, "owners weight values"), (_LONG, "rows columns size"), (_INT, "block"))
Message = _structure("Message", (_TEXT, "label"), (_POINTER, "data"), (_LONG, "bytes"), (_DIGEST, "digest"))
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    *(Convolution, Blocking, Affine, KernelGradient, Norm, Linear, Rows, Digits, Placing, Message),
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


def recall(tensors: Sequence[Tensor], *settings: int) -> Any:
    """Return what was remembered of these tensors with these settings; None if there is nothing, or they changed."""
    references, known, what = _remembered.get(id(tensors[0]), ((), None, None))
    held = [id(reference()) for reference in references]
    return what if held == list(map(id, tensors)) and known == _state(tensors, settings) else None


def remember(what: Any, tensors: Sequence[Tensor], *settings: int) -> None:
    """Remember what follows from tensors, until they change; those that do not count their changes are not known."""
    if any(tensor.is_inference() for tensor in tensors):
        return
    place = id(tensors[0])
    forget = weakref.ref(tensors[0], lambda gone: _remembered.pop(place, None))
    others = [weakref.ref(tensor) for tensor in tensors[1:]]
    _remembered[place] = [forget, *others], _state(tensors, settings), what


_remembered: dict[int, tuple[Sequence[weakref.ref[Tensor]], Any, Any]] = {}


def _state(tensors: Sequence[Tensor], settings: tuple[int, ...]) -> tuple[Any, ...]:
    return settings, [(one.data_ptr(), one._version, one.shape, one.stride()) for one in tensors]


def check_lists(starts: Tensor, places: Tensor, groups: int, limit: int, last_limit: int) -> None:
    """Check that lists, starts [members, lists + 1], stay inside of `places`, and places inside of a group of inputs.

    What was found right is remembered until the tensors change.
    """
    if recall((starts, places), groups, limit, last_limit):
        return
    for name, tensor, dtype in (("starts", starts, torch.int32), ("places", places, torch.int16)):
        plain = tensor.dtype == dtype and tensor.is_cpu and tensor.layout == torch.strided
        if not plain or tensor.stride(-1) != 1:
            raise PluresError(f"{name} must be contiguous {dtype} on the CPU, not {tensor.dtype} on {tensor.device}")
    begins, named = starts.numpy(), places.numpy().view(np.uint16)
    if begins.min() < 0 or begins.max() > named.size or (np.diff(begins, axis=1) < 0).any():
        raise PluresError(f"the lists do not fit this layer: starts must grow from 0 to at most {named.size}")
    for row in begins:
        middle = row[(groups - 1) * ((row.size - 1) // groups)]
        for part, most in ((named[row[0] : middle], limit), (named[middle : row[-1]], last_limit)):
            if part.size and part.max() >= most:
                raise PluresError(f"the lists do not fit this layer: places must be below {most}, not {part.max()}")
    remember(True, (starts, places), groups, limit, last_limit)


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


def kernel_lists(
    weight: Tensor, owners: Tensor | None, members: list[int], scales: Tensor | None = None, groups: int = 1
) -> Lists:
    """List the kernels or single weights of a convolution, [outputs, inputs / groups, height, width], that members own.

    Owners have the shape of the weight, or [outputs, inputs / groups, 1, 1] if a kernel has one owner; without them,
    every member has a weight of its own, [members, outputs, ...]. `scales`, [members, outputs], are multiplied in.
    """
    if weight.dtype != torch.float32:
        raise PluresError(f"the native library multiplies float32, not {weight.dtype}")
    outputs, each, *kernel = weight.shape[-4:]
    taps, inputs = math.prod(kernel), each * groups
    whole = owners is None or owners.numel() == outputs * each
    # What a group of channels is read from stays in the first cache; kernels of one channel each are read one by one.
    most = min(max(1, MOST_PLACES // taps), inputs if each == 1 else 32 if taps > 1 and not whole else 64)
    places = 1 if whole else taps
    mine = torch.ones(len(members), outputs, each, 1, dtype=torch.bool)
    mine = mine if owners is None else _mine(owners.reshape(outputs, each, places), members)
    if groups > 1:  # an output sees the inputs of its group
        seen = torch.arange(inputs) // each == torch.arange(outputs)[:, None] // (outputs // groups)
        mine = mine.repeat(1, 1, groups, 1) & seen[..., None]
    group = min(inputs, most)
    order = in_order(mine, group)
    rows = (order.output * each + order.channel % each) * places + order.places % places
    if owners is None:
        rows += order.member * (outputs * each)
    values = weight.detach().cpu().reshape(-1, taps // places)[rows]
    if scales is not None:
        values = values * scales.detach().cpu()[order.member, order.output, None]
    return Lists(order.starts, order.places.to(torch.int16), values.contiguous(), inputs, group, whole)


class LinearWeights(NamedTuple):
    """What the members have of a linear layer: lists, as `Lists`, of the inputs that each output is computed from.

    `each` is 1 if members own single weights, and `weights` are in the order of the layer. It is 8 if they own blocks
    of eight outputs, or if each has a weight of its own: these are in the order of the lists.
    """

    starts: Tensor
    places: Tensor
    weights: Tensor
    owners: Tensor
    inputs: int
    outputs: int
    each: int


def linear_lists(weight: Tensor, owners: Tensor | None, members: list[int]) -> LinearWeights:
    """List the weights of a linear layer, [outputs, inputs], that each member owns.

    Owners have the shape of the weight, or [outputs / 8, inputs], rounded up, if eight outputs of an input have one
    owner; without them, every member has a weight of its own, [members, outputs, inputs].
    """
    outputs, inputs = weight.shape[-2:]
    if weight.dtype != torch.float32:
        raise PluresError(f"the native library multiplies float32, not {weight.dtype}")
    weight, group, nothing = weight.detach().cpu(), min(inputs, LINEAR_GROUP), torch.empty(0, dtype=torch.uint8)
    if owners is None:
        mine = torch.ones(len(members), -(-outputs // BLOCK), inputs, 1, dtype=torch.bool)
    else:
        mine = _mine(owners[..., None], members)
    order = in_order(mine, group)
    lists = order.starts, order.places.to(torch.int16)
    if owners is None or len(owners) != outputs:
        padded = F.pad(weight, (0, 0, 0, -outputs % BLOCK))
        blocks = torch.unflatten(padded, -2, (-1, BLOCK)).transpose(-2, -1)
        of = (order.output, order.channel) if owners is not None else (order.member, order.output, order.channel)
        return LinearWeights(*lists, blocks[of].flatten(), nothing, inputs, outputs, BLOCK)
    places_of = torch.full((256,), 255, dtype=torch.uint8)  # of members among those that run; 255 is none of them
    places_of[members] = torch.arange(len(members), dtype=torch.uint8)
    return LinearWeights(*lists, weight.flatten(), places_of[owners.cpu().flatten().long()], inputs, outputs, 1)


def _mine(owners: Tensor, members: list[int]) -> Tensor:
    return owners.cpu() == torch.tensor(members, dtype=owners.dtype).view(-1, *[1] * owners.dim())


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
