"""Train without multiplying by zero: decide which batches members run side by side, and refuse all others."""

import logging
import random
import threading
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from plures.graph import has_hooks, is_of_torch
from plures.methods.orthogonal_dropout.agreement import agrees
from plures.methods.orthogonal_dropout.alone import Alone
from plures.methods.orthogonal_dropout.side_by_side import SideBySide
from plures.methods.orthogonal_dropout.together import Members
from plures.methods.orthogonal_dropout.training_plan import Plan, can_norm
from plures.native.library import load

log = logging.getLogger("plures")
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class TrainingEngine:
    """Run the network of a stage in training, of one member or of all.

    It uses the tensors of the stage, so gradients arrive where they always do, and agree to rounding. Convolutions run
    over the kernels that members own, by the native library on batches that fill the vectors; on a GPU, as one grouped
    convolution. Large linear layers run over the weights that members own, by the native library; others, or without
    it, as one batched product. The network must be one of float32 that torch.fx can trace. The first batch is compared
    with the network itself, gradients included. In all other cases the network itself is called.
    """

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._refused: nn.Module | None = None  # a network that cannot be run here
        self._running = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingEngine, ()  # a copy is of another network

    def output(self, network: nn.Module, inputs: Any) -> Any:
        """Return what the network returns for a batch, or None if the network must be called itself."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return None
        floats = isinstance(inputs, Tensor) and inputs.dim() > 1 and inputs.is_floating_point()
        if not floats or inputs.device.type not in ("cpu", "cuda"):
            return None
        if not network.training or torch._C._are_functorch_transforms_active():
            return None
        if not self._running.acquire(blocking=False):  # by another thread
            return None
        try:
            return self._output(network, inputs)
        finally:
            self._running.release()

    def _output(self, network: nn.Module, inputs: Tensor) -> Any:
        if not self.takes(network, len(inputs)):
            return None
        prepared = cast(_Prepared, self._prepared)
        agreed = prepared.compared or agrees(network, lambda trial: cast(_Prepared, _prepared(trial)).run, inputs)
        if agreed is False:
            self._refused, self._prepared = network, None
        prepared.compared = bool(agreed)  # None: nothing can be learned from this batch
        return prepared.run(inputs) if agreed and prepared.is_up_to_date() else None

    def takes(self, network: nn.Module, samples: int) -> bool:
        """Return whether batches of this many samples can be run, in float32, if a comparison agrees."""
        if self._refused is network:
            return False
        known = self._prepared
        if known is None or known.network is not network or known.others_own():
            self._prepared = _prepared(network)
            self._refused = network if self._prepared is None else None
            if self._prepared is not None and known is not None:
                self._prepared.compared = known.compared and known.network is network
        if self._prepared is None or not samples:
            return False
        return not self._prepared.plan.kernels or samples % load().lanes == 0


class _Prepared:
    """A traced network that can be run, and what it was when it was traced."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.plan = Plan(network if isinstance(network, Members) else Alone(network))
        self.run = SideBySide(self.plan).run
        self.compared = False  # with the network itself, on a batch
        self._modules = list(network.modules())
        self._attributes = _plain_attributes(network)
        marks = self.plan.subject.marks()
        self._versions, self._copies = [mark._version for mark in marks], [mark.clone() for mark in marks]

    def is_up_to_date(self) -> bool:
        """Return whether the network is as it was: not all of its layers are called here."""
        modules = list(self.network.modules())
        if len(modules) != len(self._modules) or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        for layer, known in zip(modules, self._modules, strict=True):
            if layer is not known or not layer.training or has_hooks(layer) or "forward" in vars(layer):
                return False
            if any(one is not None and one.dtype != torch.float32 for one in layer._parameters.values()):
                return False
        return all(map(can_norm, self.plan.norms)) and not _changed(self._attributes, self.network)

    def others_own(self) -> bool:
        """Return whether masks or owners have changed since the kernels were listed."""
        marks = self.plan.subject.marks()
        versions = [mark._version for mark in marks]
        if versions != self._versions and all(map(torch.equal, marks, self._copies)):
            self._versions = versions  # written again with the same values, by a run that resumes or by DDP
        return versions != self._versions


def _prepared(network: nn.Module) -> _Prepared | None:
    float32 = all(one.dtype == torch.float32 for one in network.parameters())
    if any(map(has_hooks, network.modules())) or not float32:
        return None
    before, drawn = _plain_attributes(network), _random_states()
    try:
        with torch.random.fork_rng(devices=[]):
            prepared = _Prepared(network)
            same = drawn == _random_states()
    except Exception:  # whatever code does that cannot be traced, and layers whose tensors are not known
        return None
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    # What forward draws or changes, a trace would leave as it is.
    return prepared if same and prepared.plan.pays() and not _changed(before, network) else None


def _random_states() -> tuple[Any, Any, list[int]]:
    """Return the states of the generators that code may draw its choices from."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


def _plain_attributes(network: nn.Module) -> dict[str, Any]:
    """Return what the user's own modules hold beside tensors and modules: a trace has taken it as it was."""
    found: dict[str, Any] = {}
    for path, one in (network.network if isinstance(network, Members) else network).named_modules():
        if not is_of_torch(one):
            found |= {f"{path}.{name}": _plain(held) for name, held in vars(one).items() if name not in OF_MODULES}
    return found


def _changed(before: dict[str, Any], network: nn.Module) -> bool:
    """Return whether what the modules hold has changed, and log what has."""
    now = _plain_attributes(network)
    if now != before:
        _tell(next(name for name in now | before if now.get(name) != before.get(name)).lstrip("."))
    return now != before


@cache  # once, however many stages there are
def _tell(name: str) -> None:
    log.warning("the network trains without its faster engine, because its attribute %s changes in training", name)


def _plain(value: Any) -> Any:
    """Return what can be compared of a value: numbers and words, also in lists and dicts; of others, who they are."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return id(value)
