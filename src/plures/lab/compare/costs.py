"""The cost of finished runs relative to one network."""

import contextlib
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import DataInfo
from plures.lab.evaluation.evaluate import fastest
from plures.lab.method_names import method_class
from plures.lab.recipes import Recipe
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import Described, device_for, read_run
from plures.lab.runs.schemas import Number, read_object
from plures.lab.timing import Action, one_thread, prediction, timed, training_step
from plures.lab.training.distributed import resolve
from plures.lab.training.loop import lay_out
from plures.methods.deterministic import Deterministic
from plures.stage import Step
from plures.storage import save

ROUNDS = 9
SHORTEST = 0.02  # seconds: an action that takes less is repeated, because clocks are coarse
PREDICTED = 64  # images at a time


@dataclass(frozen=True)
class Costs:
    """The cost of a run relative to one network of its recipe."""

    size: Number  # of the file
    prediction: Number | None = None  # time, by the fastest engine that the method has; None if not measured
    epochs: Number | None = None  # training, in epochs of one network; None if not measured


def kept_costs(folder: Path) -> Costs | None:
    """Return the costs that are stored with a run, or None."""
    path = folder / "costs.json"
    if not files.is_file(path):
        return None
    return msgspec.convert(read_object(path, Costs, "remove it, and it is measured again"), Costs)


def measured_costs(folder: Path, *, trust_code: bool = False) -> Costs:
    """Measure a finished run and store its costs in its folder."""
    found = _measure(read_run(folder, trust_code=trust_code))
    with contextlib.suppress(PluresError):  # a folder that cannot be written to: measure again next time
        files.write_json(folder / "costs.json", asdict(found))
    return found


def size_of(folder: Path, *, trust_code: bool = False) -> Costs:
    """Return the size of a finished run relative to one network, without timing anything.

    size_of(Path("runs/digits-orthogonal-dropout-seed0")).size  # 1.09
    """
    run = read_run(folder, trust_code=trust_code)
    return Costs(RunFolder(folder).ensemble.stat().st_size / file_size(Deterministic(run.network())))


def _measure(run: Described) -> Costs:
    """Measure an ensemble of the same network, method and options: costs do not depend on the values of weights."""
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
    epochs = _epochs(ensemble, single, recipe, info)  # first: it goes through the stages
    asked, plain = (prediction(one.predict, inputs) for one in (fastest(ensemble), single))
    return Costs(file_size(ensemble) / file_size(single), relative(asked, plain), epochs)


def relative(action: Action, baseline: Action) -> float:
    """Return the time of an action divided by that of another, on one thread, each the shortest of several rounds.

        relative(lambda: ensemble.predict(images), lambda: network(images))

    The shortest, not the median: other processes make some rounds longer, and none shorter.
    """
    with one_thread() as clock:
        own, other = timed([action, baseline], ROUNDS, clock=clock, shortest=SHORTEST)
    return min(own) / min(other)


def _epochs(ensemble: Ensemble, single: Ensemble, recipe: Recipe, info: DataInfo) -> float:
    """Return the sum of the epochs of all stages, each weighted by its step relative to one of the single network."""
    precision = resolve(recipe.precision, device_for())
    inputs = torch.randn(recipe.batch_size, info.channels, info.size, info.size, device=device_for())
    targets = torch.zeros(recipe.batch_size, dtype=torch.long, device=inputs.device)
    plain = training_step(single.open(single.plan()[0]), inputs, targets, precision)
    ratios: dict[str, float] = {}
    names: dict[Step, str] = {}  # stages of one phase take equally long, unless they leave out what a member lacks
    for stage in ensemble.stages():
        own = lay_out(stage, recipe.batch_size, inputs.device, mixed=precision != "no")
        name = names[stage.step] = stage.name if own else stage.phase
        if name not in ratios:
            ratios[name] = relative(training_step(stage, inputs, targets, precision), plain)
    return sum(recipe.epochs.of(step.phase) * ratios[name] for step, name in names.items())


def file_size(ensemble: Ensemble) -> int:
    """Return the bytes of the file that an ensemble is saved in."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(ensemble, Path(folder) / "single")
            return (Path(folder) / "single").stat().st_size
    except OSError as error:
        raise PluresError(
            f"cannot write a temporary file: {error.strerror}; free some space and start again"
        ) from error
