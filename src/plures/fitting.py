"""fit: the one training loop, for every method; it needs torch alone."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from plures import checkpoints, files
from plures.checks import one_of, whole_number
from plures.errors import PluresError
from plures.losses import Loss
from plures.progress import ProgressLine
from plures.seeding import seed_of
from plures.stage import Stage, Step, due

Schedule = Literal["cosine", "constant"]
CHECK_EVERY = 50  # steps between looks at the loss: on a GPU each look waits for the device
FEW_STEPS = 200  # of a stage: most networks need more to learn anything
PRUNE_SHARE = 0.1  # of the epochs, as in the paper: 20 for 200
WARMUP = 0.05  # of a stage, in which the rate rises
RATE, DECAY = 1e-3, 1e-2  # of AdamW: as torch and most papers have them
TARGETS = ("labels", "label", "targets", "target")  # the names that a batch may have for them
log = logging.getLogger("plures")


class Fittable(Protocol):
    """What `fit` needs of an ensemble."""

    seed: int

    def plan(self) -> list[Step]:
        """List all stages in order, with the committed ones marked."""

    def open(self, step: Step) -> Stage:
        """Open the stage of one step of the plan."""

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values."""

    def calibrate(self, inputs: Any) -> Any:
        """Calibrate the confidence on held-out batches."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters."""

    def to(self, device: torch.device) -> Any:
        """Move to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Restore all tensors."""


class StageLoop:
    """Train one stage, an epoch at a time.

    `factor` is what the rates of the optimizer are multiplied with in a step, counted from 0, so there is nothing to
    restore; without a number of `steps` in an epoch, it is asked once an epoch. All random numbers of an epoch follow
    from the seed, the epoch and the process: an epoch gives the same result whether or not those before it ran in the
    same process.
    """

    # With several processes, or in mixed precision, a loop has others.
    rank: int = 0
    world: int = 1
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
        model: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.stage, self.loader, self.steps, self.epochs = stage, loader, steps, epochs
        self.optimizer, self.factor, self.seed, self.device = optimizer, factor, seed, device
        self.model = stage if model is None else model
        self.scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.loss = CountingLoss(stage.loss)
        del stage.loss  # without this, a module cannot be replaced by a function
        stage.loss = self.loss

    def batches(self, number: int) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over the batches of an epoch, counted from 1."""
        return _pairs(self.loader, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the stage computes."""
        return nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of the values of all processes."""
        return value

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for one epoch, counted from 1, and return its record."""
        started, begun = time.perf_counter(), time.process_time()
        torch.manual_seed(seed_of(self.seed, "epoch", number, self.rank))
        total, index, samples = torch.zeros((), device=self.device), 0, 0
        self.loss.reset(self.device)
        for index, (inputs, targets) in enumerate(self.batches(number), start=1):
            self._set_rates(number, index)
            with self.autocast():
                loss = self.model(inputs, targets).float()
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
                f"the loader gave no batch in epoch {number}: pass a list or a DataLoader, which can be read in every "
                "epoch, and not a generator"
            )
        self._refuse_nan(total, number)
        if not all(bool(parameter.isfinite().all()) for parameter in self.stage.parameters()):
            self._refuse_nan(torch.full_like(total, math.nan), number)
        right, seen = self.total(torch.stack([self.loss.right, self.loss.seen])).tolist()
        seconds = time.perf_counter() - started
        return {
            "stage": self.stage.name,
            "phase": self.stage.phase,
            "member": self.stage.member,
            "epoch": number,
            "epochs": self.epochs,
            "loss": self.total(total).item() / (index * self.world * self.stage.heads),
            "train_accuracy": right / seen if seen else None,
            "validation_accuracy": None,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "images_per_second": round(samples * self.world / seconds, 1),
            "seconds": round(seconds, 3),
            # What the training costs, whatever else the machine does.
            "cost": time.process_time() - begun if self.device.type == "cpu" else seconds,
        }

    def accuracy(self, batches: Iterable[tuple[Any, Tensor]]) -> float | None:
        """Return the share of correct labels of the stage as it is now; None if there are no labels."""
        right, seen = torch.zeros((), device=self.device), 0
        self.stage.eval()
        with torch.no_grad(), self.autocast():
            for inputs, targets in batches:
                logits = self.stage.logits(inputs)
                if logits.dim() == 3:  # of several members
                    logits = logits.float().softmax(-1).mean(0)
                if logits.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
                    right += (logits.argmax(-1) == targets).sum()
                    seen += len(targets)
        self.stage.train()
        return right.item() / seen if seen else None

    def _set_rates(self, number: int, index: int) -> None:
        step = number - 1 if self.steps is None else (number - 1) * self.steps + index - 1
        factor = self.factor(step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def _refuse_nan(self, loss: Tensor, number: int) -> None:
        if not math.isfinite(self.total(loss).item()):
            rate = self.optimizer.param_groups[0]["lr"]
            raise PluresError(
                f"the loss became NaN or infinite in stage '{self.stage.name}', epoch {number}, at the learning rate "
                f"{rate:g}; the state before this epoch is kept: start anew with a lower learning rate, a longer "
                "warm-up or gradient clipping"
            )


class CountingLoss(nn.Module):
    """A loss that also counts correct labels, which costs no forward pass."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.reset(torch.device("cpu"))

    @property
    def __wrapped__(self) -> Loss:
        """The loss that it watches, under the name that functools uses."""
        return self.loss

    def reset(self, device: torch.device) -> None:
        """Count from zero."""
        self.right = torch.zeros((), device=device)
        self.seen = torch.zeros((), device=device)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        whole = logits.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point()
        if whole:  # anything else is not a classification
            self.right += (logits.detach().argmax(1) == targets).sum()
            self.seen += len(targets)
        return self.loss(logits, targets)


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


def fit(
    ensemble: Fittable,
    loader: Iterable[Any],
    epochs: int | Mapping[str, int],
    *,
    validation: Any = None,
    optimizer: Callable[[Stage], torch.optim.Optimizer] | None = None,
    schedule: Schedule = "cosine",
    device: torch.device | str | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    callbacks: Sequence[Callable[[dict[str, Any]], object]] = (),
) -> None:
    """Train all open stages of an ensemble; `Ensemble.fit` explains the arguments."""
    one_of("schedule", schedule, get_args(Schedule))
    if isinstance(validation, Iterator):
        raise PluresError("validation is read more than once: pass a list or a DataLoader, and not a generator")
    where = next(iter(ensemble.parameters())).device if device is None else torch.device(device)
    ensemble.to(where)
    file = None if checkpoint is None else Path(checkpoint)
    saved = file.read_bytes() if file is not None and files.is_file(file) else None
    about = json.dumps([ensemble.options(), epochs], sort_keys=True)
    if saved is not None and due(ensemble.plan()) is not None:
        if checkpoints.about_of(saved) != about:
            raise PluresError(f"{file} is of an ensemble with other options or epochs: give another file, or remove it")
        _resume(ensemble, checkpoints.others_of(saved), str(file))
    by_step = {step.name: _epochs_of(step.phase, epochs) for step in ensemble.plan()}
    make = _default_optimizer if optimizer is None else optimizer
    with (
        torch.random.fork_rng(devices=[where] if where.type == "cuda" else []),
        ProgressLine(ensemble.plan(), by_step, quiet=not progress) as display,
    ):
        while (step := due(ensemble.plan())) is not None:
            loop = _loop(ensemble, step, loader, by_step[step.name], make, schedule, where)
            committed = sum(one.committed for one in ensemble.plan())
            done = 0
            if saved is not None and (position := checkpoints.position_of(saved)).committed == committed:
                done = position.epoch
                checkpoints.unpack(saved, loop.stage, loop.optimizer)
                display.say(f"resuming {step.name} after epoch {done} of {loop.epochs}")
            for number in range(done + 1, loop.epochs + 1):
                record = loop.epoch(number)
                if validation is not None:
                    record["validation_accuracy"] = loop.accuracy(_pairs(validation, where))
                if file is not None:
                    position = checkpoints.Position(committed, number, {})
                    files.write(
                        file, checkpoints.pack(loop.stage, loop.optimizer, position, ensemble.state_dict(), about)
                    )
                display.epoch(record)
                for callback in callbacks:
                    callback(record)
            loop.stage.commit()
    if validation is not None:
        ensemble.calibrate(_pairs(validation, where))


def _resume(ensemble: Fittable, state: Mapping[str, Tensor], name: str) -> None:
    """Restore an untrained ensemble from a checkpoint of the same method and network."""
    own = ensemble.state_dict()
    if any(step.committed for step in ensemble.plan()):
        raise PluresError(f"{name} would replace what the ensemble has learned: remove it, or train a new ensemble")
    shapes = {key: value.shape for key, value in own.items() if not key.startswith("_draft.")}
    stored = {key: value.shape for key, value in state.items() if not key.startswith("_draft.")}
    if shapes != stored:
        raise PluresError(f"{name} is a checkpoint of another network or method: give another file")
    ensemble.load_state_dict(state)


def _loop(
    ensemble: Fittable,
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
    total = epochs * (steps or 1)
    if steps is not None and total < FEW_STEPS and step.phase != "prune":
        log.warning(
            f"stage '{step.name}' has only {total} steps, {epochs} epochs of {steps} batches: if it learns too little, "
            f"use smaller batches, or epochs={math.ceil(FEW_STEPS / max(1, steps))} or more"
        )
    factor = partial(_cosine, total=total) if schedule == "cosine" else lambda _: 1.0
    return StageLoop(stage, loader, steps, epochs, optimizer(stage), factor, seed=seed, device=device)


def _epochs_of(phase: str, epochs: int | Mapping[str, int]) -> int:
    if isinstance(epochs, Mapping):
        if phase not in epochs:
            raise PluresError(f"epochs has {', '.join(epochs)}, and nothing for the phase {phase!r}: add it")
        return whole_number(f"epochs[{phase!r}]", epochs[phase])
    whole = whole_number("epochs", epochs)
    return max(1, round(PRUNE_SHARE * whole)) if phase == "prune" else whole


def _default_optimizer(stage: Stage) -> torch.optim.Optimizer:
    return torch.optim.AdamW(stage.parameter_groups(weight_decay=DECAY), lr=RATE * stage.pace)


def _cosine(step: int, total: int) -> float:
    """Return the share of the highest rate in a step: it rises for a twentieth of a stage, then falls to zero."""
    warmup = max(1.0, WARMUP * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup))) / 2


def _pairs(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Read batches of (inputs, targets), or dicts with labels, and move them to a device."""
    for batch in loader:
        if isinstance(batch, Mapping):
            name = next((one for one in TARGETS if one in batch), None)
            if name is None:
                raise PluresError(f"a batch has {', '.join(map(str, batch))}, and none of {', '.join(TARGETS)}")
            inputs, targets = {key: value for key, value in batch.items() if key != name}, batch[name]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
        else:
            raise PluresError(
                f"the loader gave {type(batch).__name__}; expected pairs of inputs and targets, or dicts with labels"
            )
        yield _moved(inputs, device), torch.as_tensor(targets).to(device)


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _moved(one, device) for name, one in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_moved(one, device) for one in inputs)
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs
