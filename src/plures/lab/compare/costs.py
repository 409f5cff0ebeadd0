"""The cost of finished runs relative to one network."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import DataInfo
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import device_for, read_run
from plures.lab.runs.schemas import Number, read_object
from plures.lab.timing import Action, one_thread, prediction, timed
from plures.methods.deterministic import Deterministic
from plures.prediction import Predictor
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
    return msgspec.convert(read_object(path, Costs, "remove it"), Costs)


def size_of(folder: Path, *, trust_code: bool = False) -> Costs:
    """Return the size of a finished run relative to one network, without timing anything.

    size_of(Path("runs/digits-orthogonal-dropout-seed0")).size  # 1.09
    """
    run = read_run(folder, trust_code=trust_code)
    return Costs(RunFolder(folder).ensemble.stat().st_size / file_size(Deterministic(run.network())))


def costs_of(ensemble: Ensemble, predictor: Predictor, network: nn.Module, info: DataInfo, epochs: float) -> Costs:
    """Return the costs of a trained ensemble whose training took some epochs of one network."""
    if isinstance(ensemble, Deterministic):  # the yardstick itself
        return Costs(size=1.0, prediction=1.0, epochs=epochs)
    device = device_for()
    single = Deterministic(network).to(device)
    inputs = torch.randn(PREDICTED, info.channels, info.size, info.size, device=device)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    asked, plain = (prediction(one.predict, inputs) for one in (predictor, single))
    return Costs(file_size(ensemble) / file_size(single), relative(asked, plain), epochs)


def epochs_of(records: Sequence[Mapping[str, Any]], plain: float) -> float:
    """Return the training of a log in epochs of one network that sees `plain` images per second.

        >>> log = [{"stage": "train", "images_per_second": speed} for speed in (40, 50)]
        >>> epochs_of(log, plain=100)
        4.0

    The fastest epoch of a stage counts for all: other processes make some epochs longer, and none shorter.
    """
    speeds: dict[str, list[float]] = {}
    for record in records:
        speeds.setdefault(record["stage"], []).append(record["images_per_second"])
    return sum(len(stage) * plain / max(stage) for stage in speeds.values())


def relative(action: Action, baseline: Action) -> float:
    """Return the time of an action divided by that of another, on one thread, each the shortest of several rounds.

        relative(lambda: ensemble.predict(images), lambda: network(images))

    The shortest, not the median: other processes make some rounds longer, and none shorter.
    """
    with one_thread() as clock:
        own, other = timed([action, baseline], ROUNDS, clock=clock, shortest=SHORTEST)
    return min(own) / min(other)


def file_size(ensemble: Ensemble) -> int:
    """Return the bytes of the file that an ensemble is saved in, without its calibration."""
    learned, ensemble.calibration = ensemble.calibration, None
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(ensemble, Path(folder) / "single")
            return (Path(folder) / "single").stat().st_size
    except OSError as error:
        raise PluresError(
            f"cannot write a temporary file: {error.strerror}; free some space and start again"
        ) from error
    finally:
        ensemble.calibration = learned
