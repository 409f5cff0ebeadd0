"""The state of an open stage as the bytes of one safetensors file: no pickle, no random generators."""

import json
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from plures.errors import PluresError


class Position(NamedTuple):
    """Where training was: so many stages committed, so many epochs of the next one done.

    Position(committed=3, epoch=12, log_length=5120, loss_scale={})
    """

    committed: int
    epoch: int
    log_length: int  # bytes of the log that belong to it
    loss_scale: dict[str, float]  # of fp16; empty otherwise


def pack(stage: nn.Module, optimizer: Optimizer, position: Position) -> bytes:
    """Put a stage, its optimizer and the position into bytes.

    contents = pack(stage, optimizer, Position(committed=3, epoch=12, log_length=5120, loss_scale={}))
    """
    stored = {
        # Cloned: safetensors takes neither other memory formats nor tensors that share memory.
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _tensors(stage, optimizer).items()
    }
    contents: bytes = save(stored, metadata={"position": json.dumps(position._asdict())})
    return contents


def position_of(contents: bytes) -> Position:
    """Read the position alone.

    position_of(path.read_bytes()).epoch
    """
    try:
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
        return Position(**json.loads(header["__metadata__"]["position"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(error) from error


def unpack(contents: bytes, stage: nn.Module, optimizer: Optimizer) -> None:
    """Bring a stage and its optimizer back to where `pack` found them.

    unpack(path.read_bytes(), stage, optimizer)
    """
    try:
        stored = load(contents)
    except SafetensorError as error:
        raise _damaged(error) from error
    current = _tensors(stage, optimizer)
    if {name: tensor.shape for name, tensor in stored.items()} != {name: one.shape for name, one in current.items()}:
        raise _damaged("it does not fit the stage")
    with torch.no_grad():
        for name, tensor in current.items():
            # Copied into the tensors that are there: in another memory format, sums would round otherwise.
            tensor.copy_(stored[name])


def prime(optimizer: Optimizer) -> None:
    """Make all tensors that an optimizer makes at its first step, so that a state can be copied into them.

        prime(optimizer)

    A momentum of zero gives the same first step as none; Adam's tensors start at zero anyway.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            else:
                optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )


def _tensors(stage: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    parameters = dict(stage.named_parameters())
    result = {f"stage.{name}": tensor for name, tensor in (parameters | dict(stage.named_buffers())).items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"optimizer.{name}.{key}"] = value
    return result


def _damaged(reason: Any) -> PluresError:
    return PluresError(
        f"state.safetensors in the run folder is damaged ({reason}): "
        "delete it, and the open stage is trained again from its start"
    )
