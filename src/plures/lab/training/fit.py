"""Train all stages of an ensemble: the same for all methods, because all are sequences of stages."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plures.checkpoints import Position, damaged, pack, position_of, unpack
from plures.ensemble import Ensemble
from plures.lab.data import Data, steps
from plures.lab.recipes import Recipe
from plures.lab.runs.config import Made, describe
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import device_for
from plures.lab.training.loop import RecipeLoop, resolve
from plures.progress import ProgressLine
from plures.stage import Step, due
from plures.storage import refill, save

log = logging.getLogger("plures")
FEW = 4  # steps of an epoch: fewer are hardly worth its passes over the images


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
    folder = None if run is None else RunFolder(run)
    config = describe(ensemble, data, recipe, resolve(recipe.precision, device), made)
    with ExitStack() as stack:
        stack.enter_context(own_random_numbers(device))
        if folder is not None:
            if not folder.finished:  # a finished run is read without a lock, and nothing is written
                stack.enter_context(folder.locked())
            begun, here = folder.begin(config)["environment"].get("threads"), torch.get_num_threads()
            if isinstance(begun, int) and 0 < begun != here:  # on another number, sums are rounded differently
                log.warning("the run started with %d threads and resumes with as many, instead of %d", begun, here)
                torch.set_num_threads(begun)
                stack.callback(torch.set_num_threads, here)
            _restore(ensemble, folder)
        ensemble.to(device)
        longer = recipe.epochs_for(len(data.train))
        epochs = {step.name: longer.of(step.phase) for step in ensemble.plan()}
        display = stack.enter_context(ProgressLine(ensemble.plan(), epochs, quiet=quiet))
        if recipe.least_steps is None:
            _warn_of_few_steps(data, recipe)
        _Run(ensemble, data, recipe, folder, device, display).train(finish)
    return ensemble


def _restore(ensemble: Ensemble, folder: RunFolder) -> None:
    """Restore the ensemble from the run folder; write the first file into a new folder."""
    path = next((path for path in (folder.ensemble, folder.partial) if path.is_file()), None)
    if path is None:
        # Even before the first epoch: the next process may draw another network.
        save(ensemble, folder.partial, base=True)
    else:
        refill(ensemble, path)


@dataclass(frozen=True)
class _Run:
    """Go through the open stages and keep the folder, if there is one, up to date."""

    ensemble: Ensemble
    data: Data
    recipe: Recipe
    folder: RunFolder | None
    device: torch.device
    display: ProgressLine

    def train(self, finish: Callable[[], None]) -> None:
        folder = self.folder
        step = due(self.ensemble.plan())
        if step is None:
            self.display.say("the ensemble is finished: nothing is left to train")
        saved = None if folder is None or step is None else self._saved(folder, step)
        while step is not None:
            self._train_stage(step, saved)
            step, saved = due(self.ensemble.plan()), None
            if folder is not None and step is not None:
                save(self.ensemble, folder.partial, base=True)
        if folder is not None:
            self._finish(folder, finish)

    def _train_stage(self, step: Step, saved: tuple[bytes, Position] | None) -> None:
        loop = RecipeLoop(self.ensemble, step, self.data, self.recipe, self.device)
        done = 0
        if saved is not None:
            state, position = saved
            done = position.epoch
            if done > loop.epochs:
                raise damaged(f"it is after epoch {done} of {loop.epochs}")
            unpack(state, loop.stage, loop.optimizer)
            loop.scaler.load_state_dict(position.loss_scale)
            self.display.say(f"resuming {step.name} after epoch {done} of {loop.epochs}")
        for number in range(done + 1, loop.epochs + 1):
            record = loop.epoch(number)
            if self.folder is not None:
                self._write_epoch(self.folder, loop, record)
            self.display.epoch(record)
        loop.stage.commit()

    def _committed(self) -> list[str]:
        return [step.name for step in self.ensemble.plan() if step.committed]

    def _saved(self, folder: RunFolder, step: Step) -> tuple[bytes, Position] | None:
        """Return the state of the open stage, if there is one, and cut the log after its last epoch."""
        state, committed = folder.read_state(), self._committed()
        saved = None if state is None else (state, position_of(state))
        if saved is not None and saved[1].committed != len(committed):  # of a stage that was committed since
            saved = None
        epochs = 0 if saved is None else saved[1].epoch
        folder.keep_records(committed, step.name, epochs)
        return saved

    def _write_epoch(self, folder: RunFolder, loop: RecipeLoop, record: Mapping[str, Any]) -> None:
        folder.append_record(record)  # before the state, which says how many records count
        position = Position(len(self._committed()), record["epoch"], loop.scaler.state_dict())
        folder.write_state(pack(loop.stage, loop.optimizer, position))

    def _finish(self, folder: RunFolder, finish: Callable[[], None]) -> None:
        # Until the file is written, the state of the last stage is there to begin from again.
        if not folder.finished:
            finish()
            save(self.ensemble, folder.ensemble, base=True)
        folder.clean()


def _warn_of_few_steps(data: Data, recipe: Recipe) -> None:
    per_epoch = steps(data.train, recipe.batch_size, drop_last=len(data.train) >= recipe.batch_size)
    if per_epoch < FEW:
        several = "" if per_epoch == 1 else "s"
        log.warning(
            f"an epoch has only {per_epoch} step{several}, because a batch has {recipe.batch_size} of the "
            f"{len(data.train)} training images: use a smaller batch_size, or more epochs"
        )


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the caller's random generators as they were, and let the same numbers give the same bits on a GPU, too."""
    with_generator = device.type not in ("cpu", "mps")
    kind = {"device_type": device.type} if with_generator else {}
    with (
        torch.random.fork_rng(devices=[device] if with_generator else [], **kind),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
    ):
        yield
