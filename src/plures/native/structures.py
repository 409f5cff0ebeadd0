"""What goes into the library: structures as C sees them, and checks that keep the kernels inside of their buffers."""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plures.errors import PluresError

MOST = 2**30
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
    (_LONG, "input_member_stride"),
    (_INT, "members blocks channels height width outputs output_height output_width"),
    (_INT, "kernel_height kernel_width stride_y stride_x padding_y padding_x"),
)
Norm = _structure(
    "Norm",
    (_POINTER, "input residual weight bias gradient output mean variance"),
    (_POINTER, "to_residual to_input to_weight to_bias"),
    (_LONG, "members blocks channels pixels"),
    (ctypes.c_double, "epsilon"),
    (_INT, "relu backward"),
)
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    Convolution,
    BlockLinear,
    Blocking,
    Affine,
    KernelGradient,
    Norm,
)


def filled(kind: type[ctypes.Structure], *values: Any) -> Any:
    """Fill a structure; refuse numbers that do not fit, which ctypes would cut off.

    layout = filled(Blocking, plain, blocked, *strides, *sizes, lanes)
    """
    for (name, field), value in zip(kind._fields_, values, strict=True):  # type: ignore[misc]
        if field is _INT and not -MOST < value < MOST:  # so that sums of two are integers, too
            raise PluresError(f"{name} is {value}, and the native library counts to {MOST}: use smaller batches")
    return kind(*values)


def floats(name: str, tensor: Tensor, *shape: int | None) -> Tensor:
    """Return a tensor of float32 on the CPU as one block of memory; refuse all others, and other shapes.

    bias = floats("bias", bias, members, None)  # None: any length
    """
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
    """Refuse tensors that require a gradient in grad mode: the kernels that predict compute none.

    refuse_gradients(x, bias)
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise PluresError(
            'the owned engine computes no gradients: call it under torch.no_grad(), or use ensemble.engine("unfolded")'
        )


def was_checked(tensors: Sequence[Tensor], *settings: int) -> bool:
    """Return whether these tensors were passed to `remember` with these settings, and are unchanged since.

    if not was_checked((starts, places), limit): ...
    """
    references, known = _checked.get(tensors[0], ((), None))  # type: ignore[no-untyped-call]
    same = len(references) == len(tensors) and all(map(_refers, references, tensors))
    return same and known == _state(tensors, settings)


def remember(tensors: Sequence[Tensor], *settings: int) -> None:
    """Remember that tensors were found right; those that do not count their changes are checked every time.

    remember((starts, places), limit)
    """
    if not any(tensor.is_inference() for tensor in tensors):
        _checked[tensors[0]] = ([weakref.ref(tensor) for tensor in tensors], _state(tensors, settings))


_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _refers(reference: "weakref.ref[Tensor]", tensor: Tensor) -> bool:
    return reference() is tensor


def _state(tensors: Sequence[Tensor], settings: tuple[int, ...]) -> tuple[Any, ...]:
    return (settings, *((tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()) for tensor in tensors))


def check_lists(starts: Tensor, places: Tensor, groups: int, limit: int, last_limit: int) -> None:
    """Check that lists, starts [members, lists + 1], stay inside of `places`, and places inside of a group of inputs.

        check_lists(starts, places, groups=2, limit=64, last_limit=6)

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
