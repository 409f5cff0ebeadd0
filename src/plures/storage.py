"""Keep an ensemble in one safetensors file: no pickle, every tensor checked, written beside and renamed."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from plures.ensemble import Ensemble, Loss
from plures.errors import PluresError
from plures.methods import METHODS
from plures.tensors import aliases, tensors
from plures.version import __version__

FORMAT = 1
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


def save(ensemble: Ensemble, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write an ensemble to a file of about the size of one network.

        plures.save(ensemble, "birds.safetensors")
        plures.save(ensemble, "birds-half.safetensors", dtype=torch.bfloat16)

    Weights are stored as they are, or in the `dtype` given (float32, bfloat16 or float16); statistics keep theirs. A
    partly trained ensemble is stored with all that training needs to go on. A crash leaves the old file or the new one.
    """
    if dtype not in DTYPES:
        raise PluresError(f"dtype={dtype}; weights are stored as float32, bfloat16 or float16")
    path = Path(path)
    if not path.parent.is_dir():
        raise PluresError(f"cannot save to {path}: there is no folder {path.parent}")
    stored = {name: tensor.cpu().contiguous() for name, tensor in ensemble.tensors(dtype).items()}
    document = json.dumps(
        {
            "format": FORMAT,
            "library": __version__,
            "method": type(ensemble).__name__,
            "options": ensemble.options(),
            "state": ensemble.state(),
            "shapes": ensemble.shapes,
            "tied": ensemble.tied,
            "own_loss": ensemble.loss is not F.cross_entropy,
            "checksums": {name: _checksum(tensor) for name, tensor in stored.items()},
        },
        separators=(",", ":"),
    )
    # One entry: the order of several is not defined, and equal ensembles shall give equal bytes.
    _write_beside_and_rename(stored, {"plures": f"{_digest(document.encode())} {document}"}, path)


def load(
    path: str | Path,
    network: nn.Module | Callable[[], nn.Module],
    *,
    members: Sequence[int] | None = None,
    loss: Loss | None = None,
) -> Ensemble:
    """Read an ensemble back; the network gives the code, the file gives the numbers.

        ensemble = plures.load("birds.safetensors", network)
        ensemble = plures.load("birds.safetensors", lambda: resnet18(num_classes=200), members=[0, 2])

    `network` is a network of the class that was saved, or a function that makes one; it is copied, not changed. With
    `members` only those are read. Nothing in the file is ever executed, and a damaged file is refused. A file cannot
    hold a loss: to train on with one of your own, give it again.
    """
    path = Path(path)
    if not path.is_file():
        raise PluresError(f"there is no file {path}")
    made = network if isinstance(network, nn.Module) else network()
    try:
        with safe_open(path, framework="pt") as file:
            document = _document(path, file.metadata())
            _same_network(path, made, document["shapes"], document["tied"])
            checksums = document["checksums"]
            if set(file.keys()) != set(checksums):
                raise PluresError(f"{path} is damaged: its list of tensors does not match its header")

            def read(name: str) -> Tensor:
                if name not in checksums:
                    raise PluresError(f"{path} is damaged: tensor {name!r} is missing")
                tensor: Tensor = file.get_tensor(name)
                if _checksum(tensor) != checksums[name]:
                    raise PluresError(f"{path} is damaged: tensor {name!r} does not match its checksum")
                return tensor

            method: type[Ensemble] = getattr(import_module(METHODS[document["method"]]), document["method"])
            restore_arguments = (document["options"], document["state"], read, list(checksums), members)
            ensemble = method.restore(made, *restore_arguments)
            ensemble.loss = loss or (_missing_loss if document["own_loss"] else F.cross_entropy)
            return ensemble
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise PluresError(f"{path} is damaged or no safetensors file: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PluresError(f"{path} cannot be read as an ensemble: {type(error).__name__}: {error}") from error


def _document(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if metadata is None or "plures" not in metadata:
        raise PluresError(f"{path} was not written by plures.save: its header has no 'plures' entry")
    checksum, _, text = metadata["plures"].partition(" ")
    if checksum != _digest(text.encode()):
        raise PluresError(f"{path} is damaged: its header does not match its checksum")
    document: dict[str, Any] = json.loads(text)
    if document["format"] > FORMAT:
        raise PluresError(
            f"{path} has format {document['format']}, written by plures {document['library']}; this is plures "
            f"{__version__}, which reads up to format {FORMAT}: upgrade it"
        )
    if document["method"] not in METHODS:
        raise PluresError(f"{path} holds a {document['method']}, which plures {__version__} does not know")
    return document


def _missing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    raise PluresError("this ensemble was trained with a loss of its own: give it again, plures.load(..., loss=...)")


def _same_network(path: Path, network: nn.Module, stored: dict[str, list[int]], tied: dict[str, str]) -> None:
    if not isinstance(network, nn.Module):
        raise PluresError(f"network must be an nn.Module or a function that makes one, not {type(network).__name__}")
    given = {name: list(tensor.shape) for name, tensor in tensors(network).items()}
    differing = [
        f"{name}: {stored.get(name, 'absent')} in the file, {given.get(name, 'absent')} in the network"
        for name in dict.fromkeys([*stored, *given])
        if stored.get(name) != given.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise PluresError(f"{path} was saved from another network; {'; '.join(differing[:3])}{more}")
    if tied != aliases(network):
        raise PluresError(f"{path} was saved from another network; tied there: {tied}, here: {aliases(network)}")


def _write_beside_and_rename(stored: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    beside = path.parent / f".{path.name[:100]}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        beside.touch()
        usual = beside.stat().st_mode
        save_file(stored, beside, metadata=metadata)
        beside.chmod(usual)  # as readable as the user's other files: safetensors alone makes it private
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise PluresError(f"cannot save to {path}: {error}; what was there before is unchanged") from error
    finally:
        beside.unlink(missing_ok=True)


def _checksum(tensor: Tensor) -> str:
    """Cover type and shape with the bytes, so that a header entry cannot change unseen."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return _digest(f"{tensor.dtype}{list(tensor.shape)}".encode(), data)


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
