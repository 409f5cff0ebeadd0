"""Train all stages of an ensemble: the same for all methods, because all are sequences of stages."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plures import checkpoints
from plures.checkpoints import Position, damaged, pack
from plures.ensemble import Ensemble
from plures.lab.data import Data
from plures.lab.recipes import Recipe
from plures.lab.runs.config import Made, describe
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import device_for
from plures.lab.training.loop import RecipeLoop, resolve
from plures.progress import ProgressLine
from plures.stage import due
from plures.storage import refill, save

log = logging.getLogger("plures")


def fit(
    ensemble: Ensemble,
    data: Data,
    recipe: Recipe,
    run: str | Path | None = None,
    *,
    quiet: bool = False,
    made: Made | None = None,
    finish: Callable[[], None] = lambda: None,
) -> Ensemble:
    """Train all open stages of an ensemble.

        recipe = get_recipe("digits")
        fit(ensemble, open_data("digits"), recipe, run="runs/digits")

    With a `run` folder, an interrupted run can be resumed: the same call continues after the last finished epoch and
    ends with the same bits. A finished run returns at once. The state in the folder replaces that of the ensemble,
    which must have the same network, method and options.

    - `quiet`: show no progress.
    - `made`: the words of the command line, for the configuration in the folder.
    - `finish`: called after the last stage, before the file of the ensemble is written.

    A run resumes with the number of torch threads that it started with, because another number rounds differently.
    """
    device = device_for()
    config = describe(ensemble, data, recipe, resolve(recipe.precision, device), made)
    with ExitStack() as stack:
        folder = RunFolder(stack.enter_context(TemporaryDirectory()) if run is None else run)
        stack.enter_context(own_random_numbers(device))
        if not folder.finished:  # a finished run is read without a lock, and nothing is written
            stack.enter_context(folder.locked())
        begun, here = folder.begin(config)["environment"].get("threads"), torch.get_num_threads()
        if isinstance(begun, int) and 0 < begun != here:  # on another number, sums are rounded differently
            log.warning("the run started with %d threads and resumes with as many, instead of %d", begun, here)
            torch.set_num_threads(begun)
            stack.callback(torch.set_num_threads, here)
        path = next((path for path in (folder.ensemble, folder.partial) if path.is_file()), None)
        if path is None:
            # Even before the first epoch: the next process may draw another network.
            save(ensemble, folder.partial, base=True)
        else:
            refill(ensemble, path)
        ensemble.to(device)
        longer = recipe.epochs_for(len(data.train))
        epochs = {step.name: longer.of(step.phase) for step in ensemble.plan()}
        display = stack.enter_context(ProgressLine(ensemble.plan(), epochs, quiet=quiet))
        if due(ensemble.plan()) is None:
            display.say("the ensemble is finished: nothing is left to train")
        while (step := due(ensemble.plan())) is not None:
            committed = [one.name for one in ensemble.plan() if one.committed]
            _train_stage(RecipeLoop(ensemble, step, data, recipe, device), committed, folder, display)
            if due(ensemble.plan()) is not None:
                save(ensemble, folder.partial, base=True)
        # Until the file is written, the state of the last stage is there to begin from again.
        if not folder.finished:
            finish()
            save(ensemble, folder.ensemble, base=True)
        folder.clean()
    return ensemble


def _train_stage(loop: RecipeLoop, committed: list[str], folder: RunFolder, display: ProgressLine) -> None:
    """Train and commit a stage; the folder has its state after every epoch."""
    done, state = 0, folder.read_state()
    saved = None if state is None else checkpoints.read(state)
    if saved is not None and saved.position.committed == len(committed):  # else of a stage before
        done = saved.position.epoch
        if done > loop.epochs:
            raise damaged(f"it is after epoch {done} of {loop.epochs}")
        saved.restore(loop.stage, loop.optimizer)
        loop.scaler.load_state_dict(saved.position.loss_scale)
        display.say(f"resuming {loop.stage.name} after epoch {done} of {loop.epochs}")
    folder.keep_records(committed, loop.stage.name, done)
    if not committed and loop.recipe.least_steps is None:
        loop.warn_if_few_steps()
    for number in range(done + 1, loop.epochs + 1):
        record = loop.epoch(number)
        folder.append_record(record)  # before the state, which says how many records count
        folder.write_state(pack(loop.stage, loop.optimizer, Position(len(committed), number, loop.scaler.state_dict())))
        display.epoch(record)
    loop.stage.commit()


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the caller's random generators as they were, and let the same numbers give the same bits on a GPU, too."""
    devices = [device] if device.type not in ("cpu", "mps") else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
    ):
        yield
