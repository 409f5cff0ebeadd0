"""One stage of a run: the loop of `plures.fitting`, with the batches, the rates and the precision of a recipe."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.fitting import StageLoop, lay_out
from plures.lab.data import Augment, Data, batches, steps
from plures.lab.recipes import Recipe
from plures.seeding import seed_of
from plures.stage import Stage, Step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class RecipeLoop(StageLoop):
    """Train one stage as a recipe says, an epoch at a time."""

    def __init__(self, ensemble: Ensemble, step: Step, data: Data, recipe: Recipe, device: torch.device) -> None:
        self.data, self.recipe, self.clip = data, recipe, recipe.clip
        self.precision = resolve(recipe.precision, device)
        # A last, smaller batch would weigh its images more, and batch norm cannot take a batch of one.
        self.drop_last = len(data.train) >= recipe.batch_size
        count = steps(data.train, recipe.batch_size, drop_last=self.drop_last)
        epochs = recipe.epochs_for(len(data.train)).of(step.phase)
        torch.manual_seed(seed_of(recipe.seed, "open", step.name))
        stage = ensemble.open(step).to(device)
        lay_out(stage, recipe.batch_size, device, mixed=self.precision != "no")
        super().__init__(
            stage,
            (),
            count,
            epochs,
            make_optimizer(stage, recipe),
            lambda at: rate_factor(recipe, at, count * epochs, count),
            seed=seed_of(recipe.seed, stage.name),
            device=device,
            scaler=torch.amp.GradScaler(device.type, enabled=self.precision == "fp16"),
        )

    def autocast(self) -> torch.autocast:
        """Return the context in which the stage computes."""
        return torch.autocast(self.device.type, DTYPES.get(self.precision), enabled=self.precision in DTYPES)

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for one epoch, counted from 1, validate, and return its record."""
        started = time.perf_counter()
        record, held_out = super().epoch(number), self.data.validation
        if len(held_out):
            images = batches(held_out, self.recipe.batch_size, shuffle=False, device=self.device)
            record["validation_accuracy"], _ = self.score(images)
        return record | {"seconds": round(time.perf_counter() - started, 3)}

    def batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch, in an order and with crops that follow from the seed."""
        return batches(
            self.data.train,
            self.recipe.batch_size,
            seed=self.seed,
            epoch=number,
            augment=Augment(crop=self.recipe.crop, flip=self.recipe.flip),
            drop_last=self.drop_last,
            device=self.device,
        )


def resolve(precision: str, device: torch.device) -> str:
    """Return the precision that "auto" stands for: bf16 if the device is made to multiply in it, else full precision.

    A CPU is if it has AMX tiles. Others compute in bf16 more slowly than in float32: many times more slowly without
    bf16 instructions, and by a quarter with those of AVX-512 on the one that was measured.
    """
    if precision == "fp16" and device.type == "cpu":
        raise PluresError("precision='fp16' needs a GPU: use auto, bf16 or no on a CPU")
    if precision != "auto":
        return precision
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    cpu = device.type == "cpu" and torch.cpu._is_amx_tile_supported()
    return "bf16" if gpu or cpu else "no"


def make_optimizer(stage: Stage, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe, with weight decay on the parameters that the method chooses."""
    groups = stage.parameter_groups(recipe.weight_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.learning_rate)
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, nesterov=recipe.nesterov)


def rate_factor(recipe: Recipe, step: int, steps: int, steps_per_epoch: int) -> float:
    """Return the share of the highest learning rate in one step, counted from 0, of a stage of `steps` steps.

    The warm-up multiplies the schedule, which counts from the first step: milestones stay where they are.
    """
    progress = step / steps
    if recipe.schedule == "step":
        # The small sum keeps 0.3 * 10 steps from being passed at step 3.0000000000000004 only.
        factor = recipe.gamma ** sum(progress + 1e-9 >= milestone for milestone in recipe.milestones)
    else:
        factor = (1 + math.cos(math.pi * progress)) / 2
    warmup = recipe.warmup * steps_per_epoch
    return factor * min(1.0, (step + 1) / warmup) if step < warmup else factor
