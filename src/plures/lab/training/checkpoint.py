"""The state of an open stage as the bytes of one safetensors file: no pickle, no random generators, checksums."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from plures.errors import PluresError
from plures.files import sealed, unsealed
from plures.tensors import checksum


class Position(NamedTuple):
    """Where training was: how many stages are committed, and how many epochs of the next one are done."""

    committed: Annotated[int, Meta(ge=0)]
    epoch: Annotated[int, Meta(ge=0)]
    log_length: Annotated[int, Meta(ge=0)]  # bytes of the log up to this epoch
    loss_scale: dict[str, float]  # of fp16; else empty


def pack(stage: nn.Module, optimizer: Optimizer, position: Position) -> bytes:
    """Return a stage, its optimizer and the position as bytes."""
    stored = {
        # Cloned: safetensors takes neither other memory formats nor tensors that share memory.
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _tensors(stage, optimizer).items()
    }
    document = json.dumps({"position": position._asdict(), "checksums": _checksums(stored)})
    contents: bytes = save(stored, metadata={"stage": sealed(document)})
    return contents


def position_of(contents: bytes) -> Position:
    """Read the position alone."""
    return _document(contents)[0]


def unpack(contents: bytes, stage: nn.Module, optimizer: Optimizer) -> None:
    """Restore the stage and the optimizer that `pack` was given."""
    try:
        stored = load(contents)
    except SafetensorError as error:
        raise damaged(error) from error
    checksums = _document(contents)[1]
    if checksums is not None and _checksums(stored) != checksums:
        raise damaged("a tensor does not match its checksum")
    # The first versions kept no record of the training.
    current = {n: t for n, t in _tensors(stage, optimizer).items() if n in stored or not n.startswith("stage.record.")}
    if {name: tensor.shape for name, tensor in stored.items()} != {name: one.shape for name, one in current.items()}:
        raise damaged("it does not fit the stage")
    with torch.no_grad():
        for name, tensor in current.items():
            # Copied into the tensors that are there: in another memory format, sums would round differently.
            tensor.copy_(stored[name])


def prime(optimizer: Optimizer) -> None:
    """Create the tensors that an optimizer would create at its first step, so that a state can be copied into them.

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


def _document(contents: bytes) -> tuple[Position, dict[str, str] | None]:
    """Read position and checksums; before there were checksums, the position stood alone."""
    try:
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])["__metadata__"]
        if "stage" not in header:
            return _position(json.loads(header["position"])), None
        text = unsealed(header["stage"])
        if text is None:
            raise damaged("its header does not match its checksum")
        document = json.loads(text)
        return _position(document["position"]), document["checksums"]
    except (msgspec.ValidationError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error


def _position(values: Any) -> Position:
    return msgspec.convert([values[name] for name in Position._fields], Position)


def _checksums(stored: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in stored.items()}


def damaged(reason: Any) -> PluresError:
    """Return the error for a damaged state."""
    return PluresError(
        f"state.safetensors in the run folder is damaged ({reason}): "
        "delete it, and the open stage is trained again from its start"
    )
