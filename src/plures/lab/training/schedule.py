"""The learning rate as a function of the step: nothing to save, nothing to restore."""

import math

from plures.lab.recipes import Recipe

# One-cycle as in fast training practice (Smith and Topin, 2019): rise for 30 % of the stage, then fall below the start.
RISE = 0.3
START = 1 / 25
END = START / 1e4


def learning_rate(recipe: Recipe, step: int, steps: int, steps_per_epoch: int) -> float:
    """Give the rate of one optimizer step, counted from 0, of a stage of `steps` steps.

        learning_rate(recipe, step=0, steps=2340, steps_per_epoch=78)

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
    """Go from one value to another along half a cosine wave."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
