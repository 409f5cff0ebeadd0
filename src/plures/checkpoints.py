"""The state of an open stage, as bytes: a safetensors file behind its checksum, no pickle and no random generators."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from plures.errors import PluresError
from plures.files import digest

CHECKSUM = 64  # bytes before the safetensors file


class Position(NamedTuple):
    """How far training was: how many stages are committed, how many epochs of the next one are done, and its best."""

    committed: int
    epoch: int
    loss_scale: dict[str, float]  # of fp16; else empty
    best_loss: float = math.inf
    best_epoch: int = 0


def pack(
    stage: nn.Module,
    optimizer: Optimizer,
    position: Position,
    others: Mapping[str, Tensor] | None = None,
    about: str = "",
) -> bytes:
    """Return a stage, its optimizer, the position, other tensors and what they are of as bytes."""
    tensors = _tensors(stage) | {
        f"optimizer.{name}.{key}": value
        for name, parameter in stage.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    tensors |= {f"other.{name}": tensor for name, tensor in (others or {}).items()}
    # Cloned: safetensors takes neither other memory formats nor tensors that share memory.
    stored = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    contents = safetensors.torch.save(stored, metadata={"position": json.dumps(position._asdict()), "about": about})
    return digest(contents, length=CHECKSUM).encode() + contents


class Checkpoint(NamedTuple):
    """What `pack` was given."""

    position: Position
    about: str
    tensors: dict[str, Tensor]

    def others(self) -> dict[str, Tensor]:
        """Return the other tensors."""
        return {name.removeprefix("other."): one for name, one in self.tensors.items() if name.startswith("other.")}

    @torch.no_grad()
    def restore(self, stage: nn.Module, optimizer: Optimizer) -> None:
        """Restore a stage and its optimizer."""
        stored = {name: one for name, one in self.tensors.items() if not name.startswith("other.")}
        for name, tensor in _tensors(stage).items():
            if name not in stored and name.startswith("stage.record."):
                continue  # version 0.1 kept no record of the training
            if name not in stored or stored[name].shape != tensor.shape:
                raise damaged("it does not fit the stage")
            tensor.copy_(stored.pop(name))
        parameters = dict(stage.named_parameters())
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        places = {id(one): place for place, one in enumerate(trained)}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            path, _, key = name.removeprefix("optimizer.").rpartition(".")
            parameter = parameters.get(path)
            if parameter is None or id(parameter) not in places or tensor.numel() > max(1, parameter.numel()):
                raise damaged("it does not fit the stage")
            if tensor.shape == parameter.shape:
                # In the memory format of the parameter: in another, sums would round differently.
                tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            state.setdefault(places[id(parameter)], {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def read(contents: bytes) -> Checkpoint:
    """Read what `pack` returned, or version 0.1, which had no checksum."""
    rest = contents[CHECKSUM:]
    contents = rest if contents[:CHECKSUM] == digest(rest, length=CHECKSUM).encode() else contents
    try:
        tensors = safetensors.torch.load(contents)
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])["__metadata__"]
        stored = json.loads(header["position"])  # 0.1 stored more
        position = Position(**{name: stored[name] for name in Position._fields if name in stored})
        counts = (position.committed, position.epoch, position.best_epoch)
        plain = all(type(one) is int and one >= 0 for one in counts)
        if not plain or not all(
            isinstance(one, int | float) for one in (position.best_loss, *position.loss_scale.values())
        ):
            raise ValueError(f"its position is {tuple(position)!r}")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error
    return Checkpoint(position, str(header.get("about", "")), tensors)


def _tensors(stage: nn.Module) -> dict[str, Tensor]:
    return {f"stage.{name}": tensor for name, tensor in (*stage.named_parameters(), *stage.named_buffers())}


def damaged(reason: Any) -> PluresError:
    """Return the error for a damaged state."""
    return PluresError(
        f"the stored state of training is damaged ({reason}): "
        "delete it, and the open stage is trained again from its start"
    )
