"""What a method costs relative to one network: measured side by side, so that the machine's mood cancels out."""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plures.ensemble import Ensemble, Stage
from plures.errors import PluresError
from plures.lab.compare.rows import Costs, Row
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import Run, device_for, network_for, open_run
from plures.lab.timing.estimates import finish, one_thread, training_step
from plures.methods.deterministic import Deterministic
from plures.storage import save

ROUNDS = 9
SHORTEST = 0.05  # seconds: what takes less is repeated, because clocks are coarse
PREDICTED = 64  # images at a time

Action = Callable[[], object]


def with_costs(rows: Sequence[Row]) -> list[Row]:
    """Measure the rows that were not measured yet, and keep what was found in their first run folder.

    rows = with_costs(rows_of([Path("runs/digits")]))
    """
    return [row if row.costs is not None or not row.runs else replace(row, costs=_kept(row)) for row in rows]


def measure(run: Run, options: Mapping[str, Any]) -> Costs:
    """Compare an ensemble with one network of the same recipe: file, time to predict, training in epochs.

    measure(open_run(folder), RunFolder(folder).config()["options"]).prediction
    """
    if isinstance(run.ensemble, Deterministic):  # the yardstick itself
        return Costs(size=1.0, prediction=1.0, epochs=float(run.recipe.epochs.train))
    info = run.info
    network = network_for(run.recipe, len(info.classes), info.channels, info.size)
    single = Deterministic(network).to(device_for())
    images = torch.randn(PREDICTED, info.channels, info.size, info.size, device=device_for())
    images = images.contiguous(memory_format=torch.channels_last)
    fresh = type(run.ensemble)(network, **options).to(device_for())
    with one_thread():
        return Costs(
            size=(run.path / "ensemble.safetensors").stat().st_size / _file_size(single),
            prediction=relative(_prediction(run.ensemble, images), _prediction(single, images)),
            epochs=_epochs(fresh, single, run),
        )


def relative(action: Action, baseline: Action) -> float:
    """Measure how many times as long as another thing something takes: each at its best of some rounds in turn.

    relative(lambda: ensemble.predict(images), lambda: network(images))
    """
    times = [max(1, round(SHORTEST / max(_seconds(one, 1, warm=True), 1e-6))) for one in (action, baseline)]
    best = [math.inf, math.inf]  # not the middle: what else runs here makes some rounds longer, and none shorter
    for _ in range(ROUNDS):
        for index, (one, count) in enumerate(zip((action, baseline), times, strict=True)):
            best[index] = min(best[index], _seconds(one, count) / count)
    return best[0] / best[1]


def _seconds(action: Action, count: int, warm: bool = False) -> float:
    # On a CPU, count the time in which this process was at work: other processes must not show in the figures.
    clock = time.process_time if device_for().type == "cpu" else time.perf_counter
    if warm:
        action()
    started = clock()
    for _ in range(count):
        action()
    return clock() - started


def _kept(row: Row) -> Costs:
    folder = RunFolder(row.runs[0].path)
    costs = measure(open_run(folder.path), row.runs[0].config["options"])
    with contextlib.suppress(PluresError):  # a folder that cannot be written to: measure again next time
        folder.write(folder.path / "costs.json", json.dumps(asdict(costs), indent=2).encode() + b"\n")
    return costs


def _epochs(ensemble: Ensemble, single: Ensemble, run: Run) -> float:
    """Add up the epochs of all stages, each as long as its step is compared with one of the single network."""
    plain = _step(single.open(single.plan()[0]), run)
    ratios: dict[str, float] = {}
    for stage in ensemble.stages():
        if stage.phase not in ratios:
            ratios[stage.phase] = relative(_step(stage, run), plain)
    return sum(run.recipe.epochs.of(step.phase) * ratios[step.phase] for step in ensemble.plan())


def _step(stage: Stage, run: Run) -> Action:
    stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = training_step(stage, run.recipe, run.info.channels, run.info.size)
    return lambda: step(run.recipe.batch_size)


def _prediction(ensemble: Ensemble, images: Tensor) -> Action:
    def predict() -> None:
        ensemble.predict(images)
        finish(images)

    return predict


def _file_size(ensemble: Ensemble) -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(ensemble, Path(folder) / "single")
            return (Path(folder) / "single").stat().st_size
    except OSError as error:
        raise PluresError(f"cannot write a temporary file: {error.strerror}; make room and start again") from error
