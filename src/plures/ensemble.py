"""Ensemble: what every method implements, and what a file holds of it."""

import inspect
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from plures import calibration, losses
from plures.errors import PluresError
from plures.files import replacing, sealed
from plures.fitting import Trainable
from plures.losses import Loss
from plures.prediction import Predictor
from plures.tensors import aliases, check_network, checksums, overwrite, own_tensors, shell, tensors
from plures.version import __version__

FORMAT = 1  # of files
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
log = logging.getLogger("plures")


@dataclass(frozen=True)
class Given:
    """The network that an ensemble was made from: its class, its tensors and its size.

    `shapes` has all names of its tensors; `tied` maps each further name of a tied tensor to the first.
    """

    name: str
    shapes: dict[str, list[int]]
    tied: dict[str, str]
    nbytes: int

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """Describe a network."""
        shapes = {name: list(tensor.shape) for name, tensor in tensors(network).items()}
        nbytes = sum(tensor.nbytes for tensor in own_tensors(network).values())
        return cls(type(network).__name__, shapes, aliases(network), nbytes)


@dataclass(frozen=True)
class Stored:
    """What a file holds of an ensemble; its tensors are read one by one, when they are needed.

    `get` reads a tensor whatever its size; `read` first compares its shape. `loss` is the one that the file names, if
    it names one.
    """

    options: Mapping[str, Any]
    state: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    get: Callable[[str], Tensor]
    loss: Loss | None = None

    def check(self, name: str, expected: Sequence[int]) -> None:
        """Refuse a file whose options promise another shape than it holds, before anything of that size is made."""
        shape = self.shapes.get(name)
        if shape is None or list(shape) != list(expected):
            found = "missing" if shape is None else f"of shape {list(shape)}"
            raise PluresError(f"tensor {name!r} is {found}; expected {list(expected)}")

    def read(self, name: str, expected: Sequence[int]) -> Tensor:
        """Read a tensor, after its shape was compared with the one expected."""
        self.check(name, expected)
        return self.get(name)


class Ensemble(Trainable, ABC):
    """An ensemble of members, trained stage by stage.

        for stage in ensemble.stages():
            train(stage)
        logits = ensemble(images)  # [members, batch, classes]
        prediction = ensemble.predict(images)
        print(ensemble)  # members, sizes, and the size of the file

    An ensemble only predicts: its networks stay in eval mode, even after `train()`. Stages, which are copies, do the
    training. A method has `members` and implements `plan`, `open`, `trained` and `forward`.
    """

    members: int

    def __init__(self, network: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        check_network(network)
        if loss is not None and not callable(loss):
            raise PluresError(f"loss={loss!r}; give a function of outputs and targets, such as plures.GaussianNLL()")
        self.loss = loss or F.cross_entropy
        self.given = Given.of(network)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""

    def checkout(self, member: int) -> nn.Module:
        """Return one trained member as a plain network; methods whose members live in one network refuse."""
        raise PluresError(f"the members of {type(self).__name__} live in one network: none can be checked out")

    def engine(self, kind: str | None = None, *, memory: int | None = None, fold: bool = True) -> Predictor:
        """Return what predicts the same in less time or memory: the ensemble itself, unless the method has engines.

            predictor = ensemble.engine()
            prediction = predictor.predict(images)

        `OrthogonalDropout.engine` explains the arguments.
        """
        if kind is not None:
            raise PluresError(f"{type(self).__name__} has no engines: leave out kind={kind!r}")
        return self

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None, base: bool = False) -> None:
        """Write the ensemble to a file; `plures.save` explains the options.

        ensemble.save("birds.safetensors")
        """
        if dtype not in DTYPES:
            raise PluresError(f"dtype={dtype}; weights are stored as float32, bfloat16 or float16")
        path = Path(path)
        if not path.parent.is_dir():
            raise PluresError(f"cannot save to {path}: there is no folder {path.parent}")
        opened = None if self._opened is None else self._opened()
        if opened is not None and not opened.committed and opened.touched:
            log.warning(
                "stage '%s' is not committed, so %s does not have it: call stage.commit() first", opened.name, path
            )
        held = self.tensors(dtype) | (self._base(dtype) if base else {}) | calibration.to_tensors(self.calibration)
        stored = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
        document = json.dumps(
            {
                "format": FORMAT,
                "library": __version__,
                "method": type(self).__name__,
                "options": self.options(),
                "state": self._state() | self._belongs_to(),
                "shapes": self.given.shapes,
                "tied": self.given.tied,
                "own_loss": self.loss is not F.cross_entropy,
                "loss": losses.as_json(self.loss),
                "calibration": self.calibration and self.calibration.kind,
                "checksums": checksums(stored),
            },
            separators=(",", ":"),
        )
        # One entry: the order of several is not defined, and equal ensembles must give equal bytes.
        with replacing(path) as beside:
            try:
                save_file(stored, beside, metadata={"plures": sealed(document)})
            except SafetensorError as error:  # its way to say that the disk is full
                raise OSError(str(error)) from error

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values, so that the ensemble can be rebuilt from a file.

        Each argument is an attribute of the same name, which may begin with an underscore; a method that stores one in
        another form overrides this.
        """
        arguments = inspect.signature(type(self)).parameters.values()
        named = [one.name for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        own = {name: name if hasattr(self, name) else f"_{name}" for name in named if name not in ("network", "loss")}
        return {name: getattr(self, attribute) for name, attribute in own.items()}

    def _number(self, member: int | None) -> int:
        if not isinstance(member, int) or not 0 <= member < self.members:
            raise PluresError(f"there is no member {member!r}: members count from 0 to {self.members - 1}")
        return member

    def _ready(self, member: int) -> int:
        if self._number(member) not in self.trained:
            raise PluresError(f"member {member} is not trained; trained members: {self.trained or 'none'}")
        return member

    def _all_ready(self, chosen: Sequence[int] | None = None) -> list[int]:
        """Return the trained members, or some of them by their places; refuse an ensemble that has none."""
        trained = self.trained
        if not trained:
            raise PluresError("no member of this ensemble is trained: train its stages() or load a trained file")
        return trained if chosen is None else [trained[place] for place in chosen]

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if name in SHOWN_OPTIONS)
        plan = self.plan()
        done = sum(step.committed for step in plan)
        so_far = "trained" if done == len(plan) else f"{done} of {len(plan)} stages trained"
        so_far = so_far if done else "not trained: call fit, or loop over stages()"
        heading = f"{type(self).__name__} of {self.given.name} ({options}): {so_far}"
        calibrated = [] if self.calibration is None else [self.calibration.summary()]
        return "\n".join([heading, *self._size_lines(), *calibrated])

    def _size_lines(self) -> list[str]:
        """Describe the size of the ensemble; a method with more details overrides this."""
        return [file_line(sum(tensor.nbytes for tensor in self.tensors().values()), self.given.nbytes)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # a copy has no part in the stages of this ensemble

    def _state(self) -> dict[str, Any]:
        """Return the state that training goes on from, beside options and tensors, as JSON values."""
        return {}

    def _take_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `_state` returned, from a file or a state dict."""

    def _belongs_to(self) -> dict[str, Any]:
        """Return what a file says of the network that the ensemble belongs to, as JSON values."""
        return {}

    def get_extra_state(self) -> Tensor:
        """Return the progress for the state dict, as the bytes of its JSON."""
        return torch.tensor(list(json.dumps(self._state()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the progress from a state dict."""
        try:
            self._take_state(json.loads(bytes(state.tolist())))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PluresError(f"the progress in the state dict cannot be read: {error}") from error

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors for a file, with weights (not statistics) in the given dtype."""
        return {name: as_stored(tensor, dtype) for name, tensor in own_tensors(self).items()}

    def _base(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the tensors of the network that the ensemble belongs to, if a file can leave them out."""
        return {}

    @classmethod
    def _restore(cls, network: nn.Module, stored: Stored) -> Self:
        """Build an ensemble from the results of `options`, `_state` and `tensors`."""
        loss = {} if stored.loss is None else {"loss": stored.loss}
        cls._check(network, stored, **stored.options, **loss)
        ensemble = cls(network, **stored.options, **loss)
        ensemble._fill(stored)
        return ensemble

    @classmethod
    def _check(cls, network: nn.Module, stored: Stored, **options: Any) -> None:
        """Refuse a file that lacks what its options promise, which may need more memory than there is."""
        try:
            sketch = cls(shell(network).to("meta"), **options)  # where nothing takes memory
        except Exception:  # of a method outside plures, which needs numbers; what else is wrong shows now
            return
        for name, tensor in own_tensors(sketch).items():
            stored.check(name, tensor.shape)

    def _fill(self, stored: Stored) -> None:
        """Copy tensors and progress from a file of an ensemble with the same network and options."""
        self._take_state(stored.state)
        with torch.no_grad():
            for name, tensor in own_tensors(self).items():
                overwrite(tensor, stored.read(name, tensor.shape), name)


SHOWN_OPTIONS = ("members", "passes", "classifier", "granularity", "schedule", "optimize_masks")


def file_line(stored: float, plain: float) -> str:
    """Describe the size of an ensemble's file.

    >>> file_line(1_080_000, 1_000_000)
    'file: about 1.1 MB, 1.08 x the plain network'
    """
    unit, size = ("MB", 1e6) if stored >= 1e6 else ("kB", 1e3)
    return f"file: about {stored / size:.1f} {unit}, {stored / plain if plain else math.nan:.2f} x the plain network"


def as_stored(tensor: Tensor, dtype: torch.dtype | None, like: Tensor | None = None) -> Tensor:
    """Return a tensor as a file holds it: weights in the dtype asked for, vectors and buffers as they are.

    `like` is the tensor of the network that this one stands for, if it is another.
    """
    like = tensor if like is None else like
    weight = isinstance(like, nn.Parameter) and like.is_floating_point() and like.dim() > 1
    return tensor.detach().to(dtype) if dtype is not None and weight else tensor.detach()
