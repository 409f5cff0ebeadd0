"""The state of an open stage as bytes: a checksum, then a safetensors file. No pickle, no random generators."""

import json
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from plures.errors import PluresError
from plures.files import digest

Count = Annotated[int, Meta(ge=0)]
CHECKSUM = 64  # bytes


class Position(msgspec.Struct, frozen=True):
    """Where training was: how many stages are committed, and how many epochs of the next one are done."""

    committed: Count
    epoch: Count
    log_length: Count  # bytes of the log up to this epoch
    loss_scale: dict[str, float]  # of fp16; else empty


def pack(stage: nn.Module, optimizer: Optimizer, position: Position) -> bytes:
    """Return a stage, its optimizer and the position as bytes."""
    tensors = _tensors(stage) | {
        f"optimizer.{name}.{key}": value
        for name, parameter in stage.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    # Cloned: safetensors takes neither other memory formats nor tensors that share memory.
    stored = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    contents = save(stored, metadata={"position": msgspec.json.encode(position).decode()})
    return digest(contents, length=CHECKSUM).encode() + contents


def position_of(contents: bytes) -> Position:
    """Read the position alone."""
    contents = _checked(contents)
    try:
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
        return msgspec.json.decode(header["__metadata__"]["position"], type=Position)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def unpack(contents: bytes, stage: nn.Module, optimizer: Optimizer) -> None:
    """Restore the stage and the optimizer that `pack` was given."""
    try:
        stored = load(_checked(contents))
    except SafetensorError as error:
        raise damaged(error) from error
    for name, tensor in _tensors(stage).items():
        if name not in stored and name.startswith("stage.record."):
            continue  # version 0.1 kept no record of the training
        if name not in stored or stored[name].shape != tensor.shape:
            raise damaged("it does not fit the stage")
        tensor.copy_(stored.pop(name))
    parameters = dict(stage.named_parameters())
    for name, tensor in stored.items():
        place, _, key = name.removeprefix("optimizer.").rpartition(".")
        parameter = parameters.get(place)
        if parameter is None or tensor.shape != (() if key == "step" else parameter.shape):
            raise damaged("it does not fit the stage")
        # In the memory format of the parameter: in another, sums would round differently.
        optimizer.state[parameter][key] = tensor if key == "step" else torch.empty_like(parameter).copy_(tensor)


def _checked(contents: bytes) -> bytes:
    """Take the checksum off; without the right one, the file is one of version 0.1, or no safetensors file."""
    rest = contents[CHECKSUM:]
    return rest if contents[:CHECKSUM] == digest(rest, length=CHECKSUM).encode() else contents


def _tensors(stage: nn.Module) -> dict[str, Tensor]:
    return {f"stage.{name}": tensor for name, tensor in (*stage.named_parameters(), *stage.named_buffers())}


def damaged(reason: Any) -> PluresError:
    """Return the error for a damaged state."""
    return PluresError(
        f"state.safetensors in the run folder is damaged ({reason}): "
        "delete it, and the open stage is trained again from its start"
    )
