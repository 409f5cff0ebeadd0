"""Lists of what each member owns, in the order in which the kernels use it."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures.errors import PluresError

BLOCK = 8  # outputs of one input that have one owner with granularity "block": a vector of the CPU
MOST_PLACES = 2**16  # of one list: they are kept in 16 bits


class Lists(NamedTuple):
    """What the members own of a layer: a list per member, group of inputs, and output or block of outputs.

        lists = kernel_lists(conv.weight, owners, members=[0, 1, 2])
        lists.values  # [kernels, taps], or [weights, 1]

    `starts`, [members, lists + 1], says where each list begins and the last one ends, `places` what its entries are
    multiplied with, `values` by what. `group` inputs are processed at a time, so that they stay in the cache.
    """

    starts: Tensor
    places: Tensor
    values: Tensor
    inputs: int
    group: int
    whole: bool


def kernel_lists(weight: Tensor, owners: Tensor, members: list[int], scales: Tensor | None = None) -> Lists:
    """List the kernels or single weights of a convolution, [outputs, inputs, height, width], that each member owns.

        lists = kernel_lists(conv.weight, owners, members=[0, 1, 2])

    Owners have the shape of the weight, or [outputs, inputs, 1, 1] where a kernel has one owner. `scales`, [members,
    outputs], are multiplied in.
    """
    outputs, inputs, *kernel = weight.shape
    taps = int(np.prod(kernel))
    whole = owners.numel() == outputs * inputs
    # Single weights need an input of their own each: this many channels stay in the first cache. Kernels do not.
    most = MOST_PLACES if whole and taps > 1 else min(max(1, MOST_PLACES // taps), 32 if taps > 1 else 64)
    group = min(inputs, most)
    places = 1 if whole else taps
    entries = weight.detach().reshape(outputs, inputs, places, -1)
    return _sorted(entries, owners.reshape(outputs, inputs, places), members, scales, group, whole)


def block_lists(weight: Tensor, owners: Tensor, members: list[int], scales: Tensor | None = None) -> Lists:
    """List the blocks of 8 outputs of a linear layer, [outputs, inputs], that each member owns.

        lists = block_lists(linear.weight, owners, members=[0, 1, 2])

    Owners have the shape [outputs / 8, inputs], rounded up.
    """
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    padded = weight.detach().new_zeros(blocks * BLOCK, inputs)
    padded[:outputs] = weight.detach()
    if scales is not None:
        wide = scales.new_zeros(len(members), blocks * BLOCK)
        wide[:, :outputs] = scales
        scales = wide
    entries = padded.reshape(blocks, BLOCK, inputs).transpose(1, 2).reshape(blocks, inputs, 1, BLOCK)
    return _sorted(entries, owners.reshape(blocks, inputs, 1), members, scales, min(inputs, 512), True)


def _sorted(
    entries: Tensor, owners: Tensor, members: list[int], scales: Tensor | None, group: int, whole: bool
) -> Lists:
    """Sort entries [outputs, inputs, places, values] by member, group of inputs and output; drop what has no owner."""
    outputs, inputs, places = owners.shape
    if entries.dtype != torch.float32:
        raise PluresError(f"the native library multiplies float32, not {entries.dtype}")
    groups = -(-inputs // group)
    turn = np.full(256, -1, np.int32)
    turn[members] = np.arange(len(members))
    member = turn[owners.cpu().numpy().reshape(-1)]
    found = np.flatnonzero(member >= 0)
    member = member[found]
    output, rest = np.divmod(found.astype(np.int32), np.int32(inputs * places))
    channel, place = np.divmod(rest, np.int32(places))
    in_group, within = np.divmod(channel, np.int32(group))
    list_of = (member * groups + in_group) * outputs + output
    order = np.argsort(list_of, kind="stable")
    lengths = np.bincount(list_of, minlength=len(members) * groups * outputs).reshape(len(members), -1)
    ends = np.cumsum(lengths, dtype=np.int32).reshape(lengths.shape)
    starts = np.concatenate([ends[:, :1] - lengths[:, :1].astype(np.int32), ends], axis=1)
    values = entries.cpu().reshape(outputs * inputs * places, -1)[torch.from_numpy(found[order])]
    if scales is not None:
        per_output = scales.shape[1] // outputs  # 8 in blocks
        factors = scales.detach().cpu().reshape(len(members), outputs, per_output)
        values = values * factors[torch.from_numpy(member[order]).long(), torch.from_numpy(output[order]).long()]
    named = (within * places + place)[order].astype(np.uint16).view(np.int16)
    return Lists(
        torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(named), values.contiguous(), inputs, group, whole
    )
