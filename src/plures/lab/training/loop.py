"""Train one stage, epoch by epoch; the learning rate is a function of the step, so there is nothing to restore."""

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.data import Augment, Data, batches, steps
from plures.lab.recipes import Recipe
from plures.lab.training.distributed import Processes
from plures.losses import Loss
from plures.seeding import seed_of
from plures.stage import Stage, Step

CHECK_EVERY = 50  # steps between looks at the loss: on a GPU each look waits for the device


class StageLoop:
    """Train one stage, an epoch at a time.

    All random numbers of an epoch follow from the seed, the stage, the epoch and the process: an epoch gives
    the same result whether or not those before it ran in the same process.
    """

    def __init__(self, ensemble: Ensemble, step: Step, data: Data, recipe: Recipe, processes: Processes) -> None:
        self.data = data
        self.recipe = recipe
        self.processes = processes
        self.epochs = recipe.epochs.of(step.phase)
        self.batch_size = processes.batch_size(recipe)
        self.augment = Augment(crop=recipe.crop, flip=recipe.flip)
        # A last, smaller batch would weigh its images more, and batch norm cannot take a batch of one.
        self.drop_last = len(data.train) >= recipe.batch_size
        self.steps = steps(data.train, self.batch_size, drop_last=self.drop_last, world=processes.world)
        torch.manual_seed(seed_of(recipe.seed, "open", step.name))
        self.stage = ensemble.open(step)
        self.loss = CountingLoss(smoothed(self.stage.loss, recipe.label_smoothing))
        del self.stage.loss  # without this, a module cannot be replaced by a function
        self.stage.loss = self.loss
        self.stage.to(processes.device)
        lay_out(self.stage, self.batch_size, processes.device, mixed=processes.precision != "no")
        self.optimizer = make_optimizer(self.stage, recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=processes.precision == "fp16")
        self.model = processes.wrap(self.stage)

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for one epoch, counted from 1, and return its record."""
        started = time.perf_counter()
        loss, accuracy = self._train(number)
        self.stage.after_epoch(number / self.epochs, self.optimizer)
        trained = time.perf_counter()
        # Each process has seen its own images: the ensemble keeps their mean.
        self.processes.average(self.stage.buffers())
        validation = self.validate()
        return {
            "stage": self.stage.name,
            "phase": self.stage.phase,
            "member": self.stage.member,
            "epoch": number,
            "epochs": self.epochs,
            "loss": loss,
            "train_accuracy": accuracy,
            "validation_accuracy": validation,
            "learning_rate": self._rate(number * self.steps - 1),
            "images_per_second": round(self.steps * self.batch_size * self.processes.world / (trained - started), 1),
            "seconds": round(time.perf_counter() - started, 3),
        }

    def validate(self) -> float | None:
        """Measure the accuracy on the validation images; None if there are none."""
        split = self.data.validation
        if not len(split):
            return None
        rank, world, device = self.processes.rank, self.processes.world, self.processes.device
        right = torch.zeros((), device=device)
        own = len(range(rank, len(split), world))  # the order wraps around at its end: those come twice
        self.stage.eval()
        with torch.no_grad(), self.processes.autocast():
            for images, labels in batches(split, self.batch_size, shuffle=False, rank=rank, world=world, device=device):
                logits = self.stage.logits(images)
                if logits.dim() == 3:  # of several members
                    logits = logits.float().softmax(-1).mean(0)
                right += (logits.argmax(-1) == labels)[:own].sum()
                own -= len(labels)
        self.stage.train()
        return self.processes.sum(right).item() / len(split)

    def _train(self, number: int) -> tuple[float, float | None]:
        rank, world, device = self.processes.rank, self.processes.world, self.processes.device
        seed = seed_of(self.recipe.seed, self.stage.name)
        torch.manual_seed(seed_of(seed, "epoch", number, rank))
        stream = batches(
            self.data.train,
            self.batch_size,
            seed=seed,
            epoch=number,
            augment=self.augment,
            drop_last=self.drop_last,
            rank=rank,
            world=world,
            device=device,
        )
        total = torch.zeros((), device=device)
        self.loss.reset(device)
        first = (number - 1) * self.steps
        for index, (images, labels) in enumerate(stream, start=1):
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(first + index - 1)
            with self.processes.autocast():
                loss = self.model(images, labels).float()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            if self.recipe.clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.stage.parameters(), self.recipe.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.detach()
            if index % CHECK_EVERY == 0 or index == self.steps:
                self._refuse_nan(self.processes.sum(total).item(), number)
        if not all(bool(parameter.isfinite().all()) for parameter in self.stage.parameters()):
            self._refuse_nan(math.nan, number)
        right, seen = self.processes.sum(torch.stack([self.loss.right, self.loss.seen])).tolist()
        mean_loss = self.processes.sum(total).item() / (self.steps * world * self.stage.heads)
        return mean_loss, right / seen if seen else None

    def _rate(self, step: int) -> float:
        return learning_rate(self.recipe, step, self.steps * self.epochs, self.steps)

    def _refuse_nan(self, loss: float, number: int) -> None:
        if not math.isfinite(loss):
            rate = self.optimizer.param_groups[0]["lr"]
            raise PluresError(
                f"the loss became NaN or infinite in stage '{self.stage.name}', epoch {number}, at the learning rate "
                f"{rate:g}; the state before this epoch is kept: train in a new run folder with a lower "
                "learning rate, a longer warm-up or gradient clipping (clip)"
            )


def lay_out(stage: Stage, batch_size: int, device: torch.device, *, mixed: bool) -> bool:
    """Lay a stage out in memory as it trains fastest, and return whether its own engine trains it.

    Torch's convolutions are faster in channels_last; the engine of a stage has a layout of its own. `mixed`: whether it
    trains in mixed precision.
    """
    plain = device.type == "cpu" and not mixed
    if plain and stage.engine is not None and stage.engine.takes(stage.network, batch_size):
        return True
    stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return False


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
        if logits.dim() == 2 and targets.dim() == 1:  # anything else is not a classification
            self.right += (logits.detach().argmax(1) == targets).sum()
            self.seen += len(targets)
        return self.loss(logits, targets)


def smoothed(loss: Loss, smoothing: float) -> Loss:
    """Return the cross-entropy with label smoothing; raise an error for other losses."""
    if not smoothing:
        return loss
    if loss is not F.cross_entropy:
        raise PluresError(
            f"label_smoothing={smoothing} works only with the default loss: set it to 0 and smooth in your own loss"
        )
    return partial(F.cross_entropy, label_smoothing=smoothing)


def make_optimizer(stage: Stage, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe, with weight decay on the parameters that the method chooses."""
    groups = stage.parameter_groups(recipe.weight_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.learning_rate)
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, nesterov=recipe.nesterov)


# One-cycle as in fast training practice (Smith and Topin, 2019): rise for 30 % of the stage, then fall below the start.
RISE = 0.3
START = 1 / 25
END = START / 1e4


def learning_rate(recipe: Recipe, step: int, steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of one optimizer step, counted from 0, of a stage of `steps` steps.

    The warm-up multiplies the schedule, which counts from the first step: milestones stay where they are.
    """
    factor = _factor(recipe, step / steps)
    warmup = recipe.warmup * steps_per_epoch
    if step < warmup:
        factor *= min(1.0, (step + 1) / warmup)
    return recipe.learning_rate * factor


def _factor(recipe: Recipe, progress: float) -> float:
    if recipe.schedule == "step":
        # The small sum keeps 0.3 * 10 steps from being passed at step 3.0000000000000004 only.
        return recipe.gamma ** sum(progress + 1e-9 >= milestone for milestone in recipe.milestones)
    if recipe.schedule == "cosine":
        return _blend(1.0, 0.0, progress)
    if progress < RISE:
        return _blend(START, 1.0, progress / RISE)
    return _blend(1.0, END, (progress - RISE) / (1 - RISE))


def _blend(start: float, end: float, progress: float) -> float:
    """Return a value between two others, along half a cosine wave."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
