"""Save and load an ensemble as one safetensors file: no pickle, a checksum per tensor, atomic writes."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from plures import calibration, losses
from plures.checks import whole_number
from plures.ensemble import FORMAT, Ensemble, Stored
from plures.errors import PluresError
from plures.files import is_file, unsealed
from plures.losses import Loss
from plures.methods import METHODS
from plures.tensors import aliases, check_network, checksums, tensors
from plures.version import __version__

log = logging.getLogger("plures")

# What the header tells of an ensemble, and the types that JSON has for it.
PARTS: dict[str, type] = {
    "method": str,
    "options": dict,
    "state": dict,
    "shapes": dict,
    "tied": dict,
    "own_loss": bool,
    "checksums": dict,
}
# A file may be this many times smaller than its network (half precision, narrow members), and not more.
MOST_SMALLER, SMALL = 64, 1 << 26


def save(ensemble: Ensemble, path: str | Path, *, dtype: torch.dtype | None = None, base: bool = False) -> None:
    """Write an ensemble to a file of about the size of one network.

        plures.save(ensemble, "birds.safetensors")
        plures.save(ensemble, "birds-half.safetensors", dtype=torch.bfloat16)

    Weights keep their type, or get the given `dtype` (float32, bfloat16 or float16); statistics keep theirs. A partly
    trained ensemble is stored with everything that further training needs. A crash leaves either the old file or the
    new one.

    An ensemble that changes a pre-trained network (`plures.adapt`) is stored as its changes and a checksum of that
    network, which `load` then needs; with `base`, the file contains the network as well.
    """
    if not isinstance(ensemble, Ensemble):
        raise PluresError(
            f"save takes an ensemble, not a {type(ensemble).__name__}: save the ensemble that it was made from"
        )
    ensemble.save(path, dtype=dtype, base=base)


def load(
    path: str | Path,
    network: nn.Module | Callable[[], nn.Module],
    *,
    loss: Loss | None = None,
    method: type[Ensemble] | None = None,
) -> Ensemble:
    """Load an ensemble: the network gives the code, the file gives the numbers.

        ensemble = plures.load("birds.safetensors", network)
        ensemble = plures.load("birds.safetensors", lambda: resnet18(num_classes=200))

    Nothing in the file is ever executed or imported, and a damaged file is refused.

    - `network`: a network of the class that was saved, or a function that makes one; it is copied, not changed. If the
      file holds changes to a pre-trained network, it must be that network.
    - `loss`: needed only to continue training with a custom loss; a file stores the losses of plures and mse_loss.
    - `method`: the class of a method that is not part of plures.
    """
    path = Path(path)
    made = network() if callable(network) and not isinstance(network, nn.Module) else network
    check_network(made)

    def build(document: dict[str, Any], stored: Stored) -> Ensemble:
        _same_network(path, made, document["shapes"], document["tied"])
        ensemble = _method(path, document["method"], method)._restore(made, stored)
        ensemble.loss = loss or stored.loss or (_missing_loss if document["own_loss"] else F.cross_entropy)
        ensemble.calibration = calibration.from_tensors(document.get("calibration"), stored.get)
        return ensemble

    return _reading(path, max((one.numel() for one in tensors(made).values()), default=0), build)


def refill(ensemble: Ensemble, path: str | Path) -> None:
    """Restore an ensemble, but for its loss, from a file of the same network, method and options."""
    path = Path(path)

    def fill(document: dict[str, Any], stored: Stored) -> None:
        _same_shapes(path, ensemble.given.shapes, document["shapes"])
        if document["method"] != type(ensemble).__name__:
            raise PluresError(f"{path} contains the method {document['method']}, not {type(ensemble).__name__}")
        ensemble._fill(stored)
        ensemble.calibration = calibration.from_tensors(document.get("calibration"), stored.get)

    _reading(path, max(map(math.prod, ensemble.given.shapes.values()), default=0), fill)


def check_size(path: Path, sketch: nn.Module) -> None:
    """Refuse a network that is of no size with what a file holds, before it is built.

    The `sketch` is the network on the meta device, where nothing takes memory. A file of a few bytes can ask for a
    network of any size: what it says of shapes is compared, and what it holds.
    """
    wanted = sum(tensor.nbytes for tensor in tensors(sketch).values())
    held = path.stat().st_size if is_file(path) else 0
    if wanted > MOST_SMALLER * held + SMALL:
        raise PluresError(f"{path} holds {held} bytes, too few for a network of {wanted}: they are not compatible")
    _reading(path, 0, lambda document, _: _same_network(path, sketch, document["shapes"], document["tied"]))


Result = TypeVar("Result")


def _reading(path: Path, largest: int, use: Callable[[dict[str, Any], Stored], Result]) -> Result:
    """Open a file, check its header and tensors, those of more than `largest` numbers when needed, and word errors."""
    if not is_file(path):
        raise PluresError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file, ThreadPoolExecutor(1) as pool:
            document = _document(path, file.metadata())
            known = document["checksums"]
            if set(file.keys()) != set(known):
                raise PluresError(f"{path} is damaged: its list of tensors does not match its header")
            shapes = {name: file.get_slice(name).get_shape() for name in known}
            usual = {name: file.get_tensor(name) for name, shape in shapes.items() if math.prod(shape) <= largest}
            verified = pool.submit(_verified, path, usual, known)  # while the ensemble is built

            def read(name: str) -> Tensor:
                if name not in known:
                    raise PluresError(f"{path} is damaged: tensor {name!r} is missing")
                held = verified.result() if name in usual else _verified(path, {name: file.get_tensor(name)}, known)
                return held[name]

            loss = losses.from_json(document.get("loss"))  # files of the first versions say nothing of it
            return use(document, Stored(document["options"], document["state"], shapes, read, loss))
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise PluresError(f"{path} is damaged or not a safetensors file: {error}") from None
    except PluresError:
        raise
    except Exception as error:  # a forged header: wrong types, missing keys, numbers beyond all bounds
        raise PluresError(f"{path} cannot be read as an ensemble: {type(error).__name__}: {error}") from error


def _verified(path: Path, held: dict[str, Tensor], known: Mapping[str, str]) -> dict[str, Tensor]:
    for name, found in checksums(held).items():
        if found != known[name]:
            raise PluresError(f"{path} is damaged: tensor {name!r} does not match its checksum")
    return held


def _method(path: Path, name: str, given: type[Ensemble] | None) -> type[Ensemble]:
    if given is not None:
        if name != given.__name__:
            raise PluresError(
                f"{path} contains the method {name}, not {given.__name__}: leave out method=, or give that class"
            )
        return given
    if name not in METHODS:
        raise PluresError(
            f"{path} contains the method {name}, which plures {__version__} does not know: if it is your own, give its "
            "class, plures.load(..., method=...)"
        )
    found: type[Ensemble] = getattr(import_module(METHODS[name]), name)
    return found


def _document(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if metadata is None or "plures" not in metadata:
        raise PluresError(f"{path} was not written by plures.save: its header has no 'plures' entry")
    text = unsealed(metadata["plures"])
    if text is None:
        raise PluresError(f"{path} is damaged: its header does not match its checksum")
    document: dict[str, Any] = json.loads(text, parse_constant=_refuse_constant)
    whole_number("format", document["format"])
    if document["format"] > FORMAT:
        raise PluresError(
            f"{path} has format {document['format']}, written by plures {document['library']}; this is plures "
            f"{__version__}, which reads formats up to {FORMAT}: upgrade it"
        )
    for name, kind in PARTS.items():
        if not isinstance(document[name], kind):
            raise PluresError(f"{path} cannot be read as an ensemble: its {name} is {document[name]!r}")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _missing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    raise PluresError("this ensemble was trained with a custom loss: give it again, plures.load(..., loss=...)")


def _same_network(path: Path, network: nn.Module, stored: dict[str, list[int]], tied: dict[str, str]) -> None:
    _same_shapes(path, {name: list(tensor.shape) for name, tensor in tensors(network).items()}, stored)
    if tied != aliases(network):
        raise PluresError(f"{path} was saved from another network; tied there: {tied}, here: {aliases(network)}")


def _same_shapes(path: Path, given: dict[str, list[int]], stored: dict[str, list[int]]) -> None:
    differing = [
        f"{name}: {stored.get(name, 'absent')} in the file, {given.get(name, 'absent')} in the network"
        for name in dict.fromkeys([*stored, *given])
        if stored.get(name) != given.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise PluresError(f"{path} was saved from another network; {'; '.join(differing[:3])}{more}")
