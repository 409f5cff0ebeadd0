"""The one training loop, for every method; it needs torch alone."""

import json
import logging
import math
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from plures import checkpoints, files
from plures.arrays import IGNORED
from plures.calling import pairs_of
from plures.checks import one_of, whole_number
from plures.errors import PluresError
from plures.losses import classes_second, is_for_numbers, loss_of_all
from plures.prediction import Predictor
from plures.progress import ProgressLine
from plures.seeding import seed_of
from plures.stage import Stage, Step, check_classes, due, unwrapped

Schedule = Literal["cosine", "constant"]
CHECK_EVERY = 50  # steps between looks at the loss: on a GPU each look waits for the device
FEW_STEPS = 200  # of a stage: most networks need more to learn anything
PRUNE_SHARE = 0.1  # of the epochs, as in the paper: 20 for 200
WARMUP = 0.05  # of a stage, in which the rate rises
RATE, DECAY = 1e-3, 1e-2  # of AdamW: as torch and most papers have them
BEST = "best."  # before the names of what a stage was in its best epoch, in a checkpoint
LATER = (BEST, "_draft.", "_extra_state")  # names of what is not the same at the start and later
log = logging.getLogger("plures")


class Best(NamedTuple):
    """The lowest validation loss of a stage, the epoch that reached it, and the state that the stage had."""

    loss: float
    epoch: int
    state: dict[str, Tensor]


class StageLoop:
    """Train one stage, an epoch at a time.

    `factor` is what the rates of the optimizer are multiplied with in a step, counted from 0, so there is nothing to
    restore; without a number of `steps` in an epoch, it is asked once an epoch. All random numbers of an epoch follow
    from the seed and the epoch: an epoch gives the same result whether or not those before it ran in the same process.
    """

    clip: float | None = None

    def __init__(
        self,
        stage: Stage,
        loader: Iterable[Any],
        steps: int | None,
        epochs: int,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        *,
        seed: int,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.stage, self.loader, self.steps, self.epochs = stage, loader, steps, epochs
        self.optimizer, self.factor, self.seed, self.device = optimizer, factor, seed, device
        self.scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.best = Best(math.inf, 0, {})

    def warn_if_few_steps(self) -> None:
        """Log a warning if the stage has too few steps to learn much; pruning needs fewer."""
        if self.steps is None or self.stage.phase == "prune" or (total := self.epochs * self.steps) >= FEW_STEPS:
            return
        log.warning(
            f"stage '{self.stage.name}' has only {total} step{'s' * (total != 1)} (epochs: {self.epochs}, batches: "
            f"{self.steps}): if it learns too little, use smaller batches, or "
            f"{math.ceil(FEW_STEPS / max(1, self.steps))} epochs"
        )

    def batches(self, number: int) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over the batches of an epoch, counted from 1."""
        return _pairs(self.loader, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the stage computes."""
        return nullcontext()

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for one epoch, counted from 1, and return its record."""
        started, begun = time.perf_counter(), time.process_time()
        torch.manual_seed(seed_of(self.seed, "epoch", number, 0))
        total, index, samples = torch.zeros((), device=self.device), 0, 0
        for index, (inputs, targets) in enumerate(self.batches(number), start=1):
            factor = self.factor(number - 1 if self.steps is None else (number - 1) * self.steps + index - 1)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
            with self.autocast():
                loss = self.stage(inputs, targets).float()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.stage.parameters(), self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.detach()
            samples += len(targets)
            if index % CHECK_EVERY == 0:
                self._refuse_nan(total, number)
        if not index:
            raise PluresError(
                f"the loader gave no batch in epoch {number}: it is empty, drops its only batch, or is a generator, "
                "which can be read once; pass a list or a DataLoader"
            )
        self._refuse_nan(total, number)
        if not all(bool(parameter.isfinite().all()) for parameter in self.stage.parameters()):
            self._refuse_nan(torch.full_like(total, math.nan), number)
        seconds = time.perf_counter() - started
        return {
            "stage": self.stage.name,
            "phase": self.stage.phase,
            "member": self.stage.member,
            "epoch": number,
            "epochs": self.epochs,
            "loss": total.item() / (index * self.stage.heads),
            "validation_accuracy": None,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "images_per_second": round(samples / seconds, 1),
            "seconds": round(seconds, 3),
            # What the training costs, whatever else the machine does.
            "cost": time.process_time() - begun if self.device.type == "cpu" else seconds,
        }

    def score(
        self, batches: Iterable[tuple[Any, Tensor]], *, with_loss: bool = False
    ) -> tuple[float | None, float | None]:
        """Return the share of correct labels of the stage as it is now, None if there are no labels, and its loss.

        Members that train together are judged as an ensemble.
        """
        right, loss, labels, samples = torch.zeros((), device=self.device), 0.0, 0, 0
        self.stage.eval()
        with torch.no_grad(), self.autocast():
            for inputs, targets in batches:
                outputs = self.stage.outputs(inputs)
                if with_loss:
                    loss += len(targets) * loss_of_all(unwrapped(self.stage.loss), outputs, targets).item()
                    samples += len(targets)
                if outputs.dim() == 3 and targets.dim() == 1 and not targets.is_floating_point():
                    right += (outputs.float().softmax(-1).mean(0).argmax(-1) == targets).sum()
                    labels += len(targets)
        self.stage.train()
        return right.item() / labels if labels else None, loss / samples if samples else None

    @torch.no_grad()
    def check(self, batches: Iterable[tuple[Any, Tensor]]) -> None:
        """Refuse held-out labels that do not fit the outputs: they would be missed only after the training."""
        outputs, loss = None, unwrapped(self.stage.loss)
        for inputs, targets in batches:
            if outputs is None:  # the network runs once
                self.stage.eval()
                outputs = self.stage.outputs(inputs)
                self.stage.train()
                check_classes(loss, outputs[0], targets)
                outputs = classes_second(outputs, loss)
            if is_for_numbers(loss) or targets.is_floating_point() or targets.dim() != outputs.dim() - 2:
                return
            wrong = targets[(targets < 0) | (targets >= outputs.shape[2])]
            if len(wrong := wrong[wrong != IGNORED]):
                known = f"the network has {outputs.shape[2]} classes, from 0, and {IGNORED} is no label"
                raise PluresError(f"validation has the target {int(wrong[0])}: {known}")

    def _refuse_nan(self, loss: Tensor, number: int) -> None:
        if not math.isfinite(loss.item()):
            where = f"the loss became NaN or infinite in stage '{self.stage.name}', epoch {number}"
            if self.stage.record.tainted:
                raise PluresError(f"{where}, because inputs or targets have NaN or infinity: clean the data")
            rate = self.optimizer.param_groups[0]["lr"]
            raise PluresError(
                f"{where}, at the learning rate {rate:g}; the state before this epoch is kept: start anew with a lower "
                "learning rate, a longer warm-up or gradient clipping"
            )


def lay_out(stage: Stage, batch_size: int, device: torch.device, *, mixed: bool) -> bool:
    """Lay a stage out in memory as it trains fastest, and return whether its own engine trains it.

    Torch's convolutions are faster in channels_last; the engine of a stage has a layout of its own. `mixed`: whether it
    trains in mixed precision.
    """
    plain = device.type == "cpu" and not mixed
    if plain and stage.engine is not None and stage.engine.takes(stage.network, batch_size):
        return True
    if not any(parameter.dim() == 5 for parameter in stage.parameters()):  # videos have another format
        stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return False


class Trainable(Predictor):
    """A predictor that is trained stage by stage: with `fit`, or with a loop of your own over `stages`."""

    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._opened: weakref.ref[Stage] | None = None  # the last stage of `stages`

    @abstractmethod
    def plan(self) -> list[Step]:
        """List all stages in order, with the committed ones marked."""

    @abstractmethod
    def open(self, step: Step) -> Stage:
        """Open the stage of one step of the plan."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values."""

    def stages(self) -> Iterator[Stage]:
        """Iterate over the stages that are not committed yet.

            for stage in ensemble.stages():
                train(stage, epochs[stage.phase])

        Moving on to the next stage commits the previous one. Leaving the loop early discards the open stage and keeps
        the committed ones; the next call continues there.
        """
        while (step := due(self.plan())) is not None:
            stage = self.open(step)
            self._opened = weakref.ref(stage)
            yield stage
            if not stage.committed:
                stage.commit()
            del stage  # the next one takes as much memory

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int | Mapping[str, int],
        *,
        validation: Iterable[Any] | None = None,
        patience: int | None = None,
        optimizer: Callable[[Stage], torch.optim.Optimizer] | None = None,
        schedule: Schedule = "cosine",
        device: torch.device | str | None = None,
        checkpoint: str | Path | None = None,
        progress: bool = True,
        callbacks: Sequence[Callable[[dict[str, Any]], object]] = (),
    ) -> Self:
        """Train all open stages, and return the ensemble.

            ensemble.fit(loader, epochs=60, validation=held_out_loader, checkpoint="training.safetensors")
            ensemble.fit(loader, epochs=60, optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1))

        - `loader`: batches of (inputs, targets), or of dicts with `labels`, that can be read in every epoch.
        - `epochs`: of each stage; pruning takes a tenth of them. A dict has them by phase.
        - `validation`: held-out batches; their accuracy is shown, and they calibrate the trained ensemble.
        - `patience`: end a stage after this many epochs without a lower loss on `validation`, and keep its best epoch.
          Members that train together are judged as an ensemble.
        - `optimizer`: a function that makes the optimizer of a stage; by default AdamW with a rate of 0.001 times
          `stage.pace`: members with few weights of their own need a higher rate.
        - `schedule`: "cosine" lets the rate rise for a twentieth of a stage and fall to zero; "constant" keeps it.
        - `device`: where to train; by default where the ensemble is.
        - `checkpoint`: a file that is written after every epoch; the same call continues from it, with the same bits.
        - `progress`: show one line on the standard error.
        - `callbacks`: functions that are called after every epoch with its record, a dict.
        """
        one_of("schedule", schedule, get_args(Schedule))
        if isinstance(validation, Iterator):
            raise PluresError("validation is read more than once: pass a list or a DataLoader, and not a generator")
        if patience is not None and validation is None:
            raise PluresError(f"patience={whole_number('patience', patience)} needs held-out batches: give validation=")
        where = next(iter(self.parameters())).device if device is None else torch.device(device)
        self.to(where)
        by_step = {step.name: _epochs_of(step.phase, epochs) for step in self.plan()}
        if (first := due(self.plan())) is None:
            log.warning("fit trains nothing: all stages are committed; make a new ensemble to train from the start")
        make = optimizer or (lambda stage: AdamW(stage.parameter_groups(weight_decay=DECAY), lr=RATE * stage.pace))
        file = None if checkpoint is None else CheckpointFile(Path(checkpoint), self, epochs)
        with (
            torch.random.fork_rng(devices=[where] if where.type == "cuda" else []),
            ProgressLine(self.plan(), by_step, quiet=not progress) as display,
        ):
            while (step := due(self.plan())) is not None:
                loop = _loop(self, step, loader, by_step[step.name], make, schedule, where)
                if validation is not None and step == first:
                    loop.check(_pairs(validation, where))
                if number := 0 if file is None else file.resume(loop):
                    display.say(f"resuming {step.name} after epoch {number} of {loop.epochs}")
                while number < loop.epochs and (patience is None or number - loop.best.epoch < patience):
                    number += 1
                    record = loop.epoch(number)
                    if validation is not None:
                        accuracy, loss = loop.score(_pairs(validation, where), with_loss=patience is not None)
                        record |= {"validation_accuracy": accuracy, "validation_loss": loss}
                        if loss is not None and loss < loop.best.loss:
                            loop.best = Best(loss, number, {n: t.clone() for n, t in loop.stage.state_dict().items()})
                    if file is not None:
                        file.write(loop, number)
                    display.epoch(record)
                    for callback in callbacks:
                        callback(record)
                if loop.best.state:
                    loop.stage.load_state_dict(loop.best.state)
                loop.stage.commit()
                del loop
        if validation is not None:
            try:
                self.calibrate(_pairs(validation, where))
            except PluresError as error:  # what was trained is not lost for that
                log.warning("the ensemble is trained and not calibrated: %s", error)
        return self


class CheckpointFile:
    """The file of a training: the ensemble, its open stage, and how far that is."""

    def __init__(self, path: Path, ensemble: Trainable, epochs: int | Mapping[str, int]) -> None:
        self.path, self.ensemble = path, ensemble
        self.about = json.dumps([ensemble.options(), epochs], sort_keys=True)
        plan = ensemble.plan()
        self.saved = checkpoints.read(path.read_bytes()) if files.is_file(path) and due(plan) is not None else None
        if self.saved is None:
            return
        if self.saved.about != self.about:
            raise PluresError(f"{path} is of other options or epochs: give another file, or remove it")
        if any(step.committed for step in plan):
            raise PluresError(f"{path} would replace what the ensemble has learned: remove it, or train a new ensemble")
        state, own = self.saved.others(), ensemble.state_dict()
        # The draft of a member in training is there only in the middle of its stages, and the progress has any length.
        shapes, stored = ({k: v.shape for k, v in one.items() if not k.startswith(LATER)} for one in (own, state))
        if shapes != stored:
            raise PluresError(f"{path} is a checkpoint of another network or method: give another file")
        ensemble.load_state_dict({name: one for name, one in state.items() if not name.startswith(BEST)})

    def resume(self, loop: "StageLoop") -> int:
        """Restore the open stage, if the file is of it, and return the number of its finished epochs."""
        saved, self.saved = self.saved, None
        if saved is None or saved.position.committed != self._committed():
            return 0
        saved.restore(loop.stage, loop.optimizer)
        best = {n.removeprefix(BEST): one for n, one in saved.others().items() if n.startswith(BEST)}
        loop.best = Best(saved.position.best_loss, saved.position.best_epoch, best)
        return saved.position.epoch

    def write(self, loop: "StageLoop", number: int) -> None:
        """Write the file after an epoch."""
        position = checkpoints.Position(self._committed(), number, {}, loop.best.loss, loop.best.epoch)
        others = self.ensemble.state_dict() | {BEST + name: one for name, one in loop.best.state.items()}
        files.write(self.path, checkpoints.pack(loop.stage, loop.optimizer, position, others, self.about))

    def _committed(self) -> int:
        return sum(step.committed for step in self.ensemble.plan())


def _loop(
    ensemble: Trainable,
    step: Step,
    loader: Iterable[Any],
    epochs: int,
    optimizer: Callable[[Stage], torch.optim.Optimizer],
    schedule: Schedule,
    device: torch.device,
) -> StageLoop:
    seed = seed_of(ensemble.seed, step.name)
    torch.manual_seed(seed_of(seed, "open"))
    stage = ensemble.open(step).to(device)
    if isinstance(size := getattr(loader, "batch_size", None), int):
        lay_out(stage, size, device, mixed=False)
    steps = len(loader) if isinstance(loader, Sized) else None
    factor = partial(_cosine, total=epochs * (steps or 1)) if schedule == "cosine" else lambda _: 1.0
    made = optimizer(stage)
    if not isinstance(made, torch.optim.Optimizer):
        raise PluresError(f"optimizer= returned {type(made).__name__}: return an optimizer of stage.parameters()")
    loop = StageLoop(stage, loader, steps, epochs, made, factor, seed=seed, device=device)
    loop.warn_if_few_steps()
    return loop


def _epochs_of(phase: str, epochs: int | Mapping[str, int]) -> int:
    if isinstance(epochs, Mapping):
        if phase not in epochs:
            raise PluresError(f"epochs has {', '.join(epochs)}, and nothing for the phase {phase!r}: add it")
        return whole_number(f"epochs[{phase!r}]", epochs[phase])
    whole = whole_number("epochs", epochs)
    return max(1, round(PRUNE_SHARE * whole)) if phase == "prune" else whole


def _cosine(step: int, total: int) -> float:
    """Return the share of the highest rate in a step: it rises for a twentieth of a stage, then falls to zero."""
    warmup = max(1.0, WARMUP * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup))) / 2


def _pairs(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Read batches of inputs and targets, and move them to a device."""
    for inputs, targets in pairs_of(loader):
        yield _moved(inputs, device), targets.to(device)


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _moved(one, device) for name, one in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_moved(one, device) for one in inputs)
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs
