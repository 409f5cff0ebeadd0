"""The cost of methods relative to one network: for finished runs, and for every method on a ResNet18."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plures import files
from plures.ensemble import Ensemble, Step
from plures.errors import PluresError
from plures.lab.data import DataInfo
from plures.lab.evaluation.evaluate import fastest
from plures.lab.method_names import METHOD_NAMES, method_class, takes
from plures.lab.recipes import Recipe
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import Described, device_for, read_run
from plures.lab.runs.schemas import read_object
from plures.lab.timing import harness
from plures.lab.timing.harness import Action, Clock
from plures.lab.training.distributed import resolve
from plures.lab.training.loop import lay_out
from plures.methods.deterministic import Deterministic
from plures.storage import save

ROUNDS = 9
SHORTEST = 0.02  # seconds: what takes less is repeated, because one call is over before it can be measured well
PREDICTED = 64  # images at a time


@dataclass(frozen=True)
class Costs:
    """What a run costs relative to one network of its recipe."""

    size: float  # of the file
    prediction: float  # time, by the fastest engine that the method has
    epochs: float  # training, in epochs of one network


def kept_costs(folder: Path) -> Costs | None:
    """Read what was measured of a run before, if it was."""
    path = folder / "costs.json"
    if not files.is_file(path):
        return None
    shape = {one.name: float for one in fields(Costs)}
    found = read_object(path, shape, "remove it, and it is measured again")
    return Costs(**{name: found[name] for name in shape})


def measured_costs(folder: Path, *, trust_code: bool = False) -> Costs:
    """Measure a finished run, and keep what was found in its folder."""
    found = _measure(read_run(folder, trust_code=trust_code))
    with contextlib.suppress(PluresError):  # a folder that cannot be written to: measure again next time
        files.write_json(folder / "costs.json", asdict(found))
    return found


def _measure(run: Described) -> Costs:
    """Measure an ensemble of the same network, method and options: what it costs does not depend on its weights."""
    method: Any = method_class(run.method)
    network = run.network()
    return costs_of(method(network, **RunFolder(run.path).config()["options"]), network, run.recipe, run.info)


def costs_of(ensemble: Ensemble, network: nn.Module, recipe: Recipe, info: DataInfo) -> Costs:
    """Measure an untrained ensemble against its network, as a recipe trains them.

    costs_of(plures.DeepEnsemble(network), network, get_recipe("digits"), data.info).size  # 5.0
    """
    if isinstance(ensemble, Deterministic):  # the yardstick itself
        return Costs(size=1.0, prediction=1.0, epochs=float(recipe.epochs.train))
    ensemble = ensemble.to(device_for())
    single = Deterministic(network).to(device_for())
    inputs = torch.randn(PREDICTED, info.channels, info.size, info.size, device=device_for())
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    with harness.one_thread() as clock:
        epochs = _epochs(ensemble, single, recipe, info, clock)  # first: it goes through the stages
        rivals = fastest(ensemble), single
        asked, plain = (harness.prediction(one.predict, inputs) for one in rivals)
        return Costs(_file_size(ensemble) / _file_size(single), relative(asked, plain, clock), epochs)


def relative(action: Action, baseline: Action, clock: Clock) -> float:
    """Measure how many times as long as another thing something takes: each at its best of some rounds in turn.

        with one_thread() as clock:
            relative(lambda: ensemble.predict(images), lambda: network(images), clock)

    Not the middle of the rounds: what else runs here makes some of them longer, and none shorter.
    """
    own, other = harness.timed([action, baseline], ROUNDS, clock=clock, shortest=SHORTEST)
    return min(own) / min(other)


def _epochs(ensemble: Ensemble, single: Ensemble, recipe: Recipe, info: DataInfo, clock: Clock) -> float:
    """Add up the epochs of all stages, each as long as its step is compared with one of the single network."""
    precision = resolve(recipe.precision, device_for())
    inputs = torch.randn(recipe.batch_size, info.channels, info.size, info.size, device=device_for())
    targets = torch.zeros(recipe.batch_size, dtype=torch.long, device=inputs.device)
    plain = harness.training_step(single.open(single.plan()[0]), inputs, targets, precision)
    ratios: dict[str, float] = {}
    names: dict[Step, str] = {}  # stages of one phase take equally long, unless they leave out what a member lacks
    for stage in ensemble.stages():
        own = lay_out(stage, recipe.batch_size, inputs.device, mixed=precision != "no")
        name = names[stage.step] = stage.name if own else stage.phase
        if name not in ratios:
            ratios[name] = relative(harness.training_step(stage, inputs, targets, precision), plain, clock)
    return sum(recipe.epochs.of(step.phase) * ratios[name] for step, name in names.items())


def _file_size(ensemble: Ensemble) -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(ensemble, Path(folder) / "single")
            return (Path(folder) / "single").stat().st_size
    except OSError as error:
        raise PluresError(
            f"cannot write a temporary file: {error.strerror}; free some space and start again"
        ) from error


@dataclass(frozen=True)
class MethodCost:
    """One row of the benchmark's table of methods: everything relative to the plain network."""

    method: str
    members: int
    parameters: float
    file: float
    step: float
    prediction: float


def method_costs(batch: int, precision: str, rounds: int) -> Iterator[MethodCost]:
    """Measure every method with five members (MC dropout: 30 passes) on ResNet18-CIFAR.

    A step is one batch of the first stage: of one member where they train one after the other, else of all. Prediction
    is of one batch by the ensemble's own forward.
    """
    network = harness.RESNET18.make()
    single = Deterministic(network)
    plain_step, plain_size = harness.first_step(single, batch, precision), _file_size(single)
    inputs, _ = harness.images(batch)
    for word, name in METHOD_NAMES.items():
        method: Any = method_class(word)
        ensemble: Ensemble = method(network, **({"members": 5} if takes(method, "members") else {}))
        step = next(harness.race(name, plain_step, {"": harness.first_step(ensemble, batch, precision)}, rounds))
        for _ in ensemble.stages():
            pass
        plain, ours = (harness.prediction(one.eval(), inputs, precision) for one in (network, ensemble))
        yield MethodCost(
            name,
            len(ensemble(inputs[:2])),
            _parameters(ensemble) / sum(parameter.numel() for parameter in network.parameters()),
            _file_size(ensemble) / plain_size,
            step.value,
            next(harness.race(name, plain, {"": ours}, rounds)).value,
        )


def _parameters(ensemble: Ensemble) -> int:
    """Count the floating numbers that a file holds: what an ensemble needs to predict."""
    statistics = {name for name, _ in ensemble.named_buffers()}
    return sum(
        tensor.numel()
        for name, tensor in ensemble.tensors().items()
        if tensor.is_floating_point() and name not in statistics and "running_" not in name
    )
