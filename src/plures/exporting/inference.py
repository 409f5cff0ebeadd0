"""What an exported file computes, as one module: preprocessing, members that share what they store, prediction."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plures.answers import Prediction, Regression, single
from plures.calibration import ClassCalibration, NumberCalibration
from plures.calling import Arguments, arguments, logits_of
from plures.ensemble import Ensemble
from plures.losses import GaussianNLL, Loss, classes_second, is_for_numbers
from plures.methods.orthogonal_dropout.masks import spread
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.tensors import canonical, tensors
from plures.trunk import Run, Trunk

CLASS_OUTPUTS = ("probabilities", "label", "confidence", "total", "aleatoric", "epistemic", "members")
NUMBER_OUTPUTS = ("mean", "std", "aleatoric", "epistemic", "members")

Part = Callable[[int], Tensor]  # of a member, by its place among the trained


class Inference(nn.Module):
    """Compute the fields of a `Prediction` or a `Regression`, by name, with the operations of `predict` and `regress`.

    It takes the tensors among `example_inputs` one by one; other arguments keep their value. The ensemble's calibration
    is part of it. `preprocess` turns the inputs of the file into those of the network: pixels into normalised images.
    """

    def __init__(self, ensemble: Ensemble, example_inputs: object, preprocess: nn.Module | None = None) -> None:
        super().__init__()
        apart = type(ensemble).checkout is not Ensemble.checkout  # its members are networks of their own
        self.members: nn.Module = SplitMembers(ensemble) if apart else ensemble
        self.preprocess = None if preprocess is None else copy.deepcopy(preprocess).eval()
        self.like = arguments(example_inputs)
        self.variance = isinstance(ensemble.loss, GaussianNLL)
        found = ensemble.calibration
        self.numbers = is_for_numbers(ensemble.loss) or isinstance(found, NumberCalibration)
        self.scales = found if isinstance(found, NumberCalibration) else None
        self.temperature = found if isinstance(found, ClassCalibration) else None
        self.outputs = NUMBER_OUTPUTS if self.numbers else CLASS_OUTPUTS

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return all outputs by name."""
        rest = iter(tensors)
        given = [next(rest) if isinstance(value, Tensor) else value for value in self.like.args]
        named = {name: next(rest) if isinstance(value, Tensor) else value for name, value in self.like.kwargs.items()}
        args, kwargs = self._prepared(Arguments(tuple(given), named))
        outputs = self.members(*args, **kwargs)
        if self.numbers:
            return self._by_name(Regression.from_outputs(outputs, variance=self.variance, calibration=self.scales))
        return self._by_name(Prediction.computed(single(outputs).softmax(2), self.temperature))

    def live(self, ensemble: Ensemble, given: Arguments) -> dict[str, Tensor]:
        """Return what the ensemble itself predicts for arguments of the file, by name."""
        inputs = self._prepared(given)
        return self._by_name(ensemble.regress(inputs) if self.numbers else ensemble.predict(inputs))

    def _prepared(self, given: Arguments) -> Arguments:
        """Return the arguments of the network for those of the file."""
        return given if self.preprocess is None else arguments(self.preprocess(*given.args, **given.kwargs))

    def _by_name(self, found: Prediction | Regression) -> dict[str, Tensor]:
        return {name: getattr(found, name) for name in self.outputs}


def named_tensors(given: Arguments) -> dict[str, Tensor]:
    """Return the tensors among arguments by name: `inputs`, `inputs_1`, ... by position, others by their own name."""
    places = [f"inputs_{place}" if place else "inputs" for place in range(len(given.args))]
    named = dict(zip(places, given.args, strict=True)) | given.kwargs
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class SplitMembers(nn.Module):
    """Run each member as a network of its own; shared tensors and split weights are stored once."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        trained = ensemble._all_ready()
        self.count = len(trained)
        self.loss: Loss = ensemble.loss
        networks = [ensemble.checkout(member) for member in trained]
        # Buffers that are not part of the state, such as positions, run as well.
        states = [tensors(network) | dict(network.named_buffers(remove_duplicate=False)) for network in networks]
        self._first_names = {name: name for name in states[0]} | canonical(networks[0])
        split = ensemble._split if isinstance(ensemble, OrthogonalDropout) else None
        owners, given = ({}, {}) if split is None else (split.owners(), split.given())
        self._kept: dict[str, _Whole | _Split] = {}
        for number, name in enumerate(dict.fromkeys(self._first_names.values())):
            values = [state[name] for state in states]
            shared = all(torch.equal(values[0], other) for other in values[1:])
            alone = values[:1] if shared else values
            whole = name not in owners
            kept = _Whole(alone) if whole else _Split(values, owners[name], trained, given.get(name))
            self._kept[name] = kept
            self.add_module(f"kept_{number}", kept)
        # Only the code of the network is run: its own tensors would go into the file as well.
        own = {name for name, first in self._first_names.items() if not self._kept[first].common}
        self._trunk = Trunk([networks[0].to("meta")], own)  # what comes before the first of them is in the file once

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes, ...]."""
        parts = {name: kept() for name, kept in self._kept.items()}

        def ready(index: int) -> Run:
            named = {name: parts[first](index) for name, first in self._first_names.items()}
            call = partial(functional_call, self._trunk.networks[0], named, tie_weights=False, strict=True)
            return lambda given: logits_of(call(given.args, given.kwargs))

        run = self._trunk.outputs([Arguments(args, kwargs)], [partial(ready, index) for index in range(self.count)])
        return classes_second(run, self.loss)


class _Whole(nn.Module):
    """A tensor for each member, or one that all of them share."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        for index, value in enumerate(values):
            self.register_buffer(f"value_{index}", value.detach().clone())
        self.common = len(values) == 1  # to all members

    def forward(self) -> Part:
        return lambda index: getattr(self, f"value_{0 if self.common else index}")


class _Split(nn.Module):
    """A weight that every member owns a part of, kept whole with its owners packed, and the background if it has one.

    Each part is cut out of it by operations that a runtime folds when it loads the file.
    """

    weight: Tensor
    given: Tensor | None
    packed: Tensor
    common = False

    def __init__(self, parts: list[Tensor], owners: Tensor, trained: list[int], given: Tensor | None) -> None:
        super().__init__()
        weight = torch.zeros_like(parts[0]) if given is None else given.clone()
        for member, part in zip(trained, parts, strict=True):
            weight = torch.where(spread(owners, part) == member, part.detach(), weight)
        self.register_buffer("weight", weight)
        self.register_buffer("given", given)
        count = len(trained)  # also the digit of what no trained member owns
        rank = torch.full((256,), count, dtype=torch.int64)
        rank[trained] = torch.arange(count)
        digits = rank[owners.cpu().long()]
        self.base = int(digits.max()) + 1
        self.shape = owners.shape
        self.register_buffer("packed", pack_bytes(digits, self.base).to(self.weight.device))

    def forward(self) -> Part:
        owners = spread(unpack_bytes(self.packed, self.base, math.prod(self.shape)).reshape(self.shape), self.weight)
        return lambda index: torch.where(owners == index, self.weight, 0.0 if self.given is None else self.given)


def pack_bytes(digits: Tensor, base: int) -> Tensor:
    """Pack small integers into bytes, as digits of a base; every runtime divides numbers below 256 exactly."""
    powers = _powers(base)
    flat = digits.reshape(-1).long()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % len(powers))]).reshape(-1, len(powers))
    return (padded * powers).sum(1).to(torch.uint8)


def unpack_bytes(packed: Tensor, base: int, count: int) -> Tensor:
    """Unpack `count` digits, by division and remainder."""
    # Division of whole numbers takes a file many more operators. The half keeps every quotient away from whole ones.
    quotients = ((packed.float() + 0.5).unsqueeze(1) / _powers(base).float().to(packed.device)).floor().int()
    return quotients.remainder(max(base, 2)).reshape(-1)[:count]


def _powers(base: int) -> Tensor:
    base = max(base, 2)
    return base ** torch.tensor([power for power in range(8) if base ** (power + 1) <= 256])
