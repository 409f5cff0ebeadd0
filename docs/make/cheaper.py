"""The table and the picture of how good an ensemble gets for how much training, on held-out images.

`docs/make/evidence.py` makes the runs. Training is counted, not timed: in epochs of one network, and in
multiplications, where a member of a split network needs no more than the share of the weights that it trains. (On a CPU
the training engine skips about half of the other multiplications, a GPU none.) A parent counts
with all of its epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

import store
from held_out_table import Line, lines_of, save
from plures.lab.compare.jobs import Comparison, Job, Variant
from plures.lab.recipes import Recipe

matplotlib.rcParams |= {"svg.hashsalt": "plures", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}

SPLIT, DEEP, SINGLE = Variant("orthogonal-dropout"), Variant("deep-ensemble"), Variant("deterministic")
COLUMNS = ["schedule", "epochs", "by multiplications", "accuracy %", "NLL", "ECE", "member accuracy %", "agreement"]


@dataclass(frozen=True)
class Schedule:
    """A way to train an ensemble: shares of the recipe's epochs and rates."""

    name: str
    variant: Variant = SPLIT
    pretrain: float = 1  # of the recipe's epochs
    parent: bool = False  # whether all members start from one trained network

    def changed(self, recipe: Recipe, parent: Path) -> Recipe:
        """Give the recipe of the schedule."""
        epochs = replace(recipe.epochs, pretrain=round(self.pretrain * recipe.epochs.pretrain))
        weights = str(parent) if self.parent else None
        return replace(recipe, epochs=epochs, weights=weights)


SCHEDULES = (
    Schedule("one network", SINGLE),
    Schedule("deep ensemble, half the epochs", replace(DEEP, longer=0.5)),
    Schedule("deep ensemble", DEEP),
    Schedule("split, random masks", replace(SPLIT, settings=("optimize-masks=false",))),
    Schedule("split, as the recipe"),
    Schedule("split, half the pre-training", pretrain=0.5),
    Schedule("split, a quarter of the pre-training", pretrain=0.25),
    Schedule("split from one parent, no more pre-training", pretrain=0, parent=True),
    Schedule("split from one parent, a quarter", pretrain=0.25, parent=True),
)


def jobs_of(recipe: str, seeds: Sequence[int], runs: Path) -> dict[str, list[Job]]:
    """List the runs of a recipe, by schedule; one that changes nothing shares them with the other tables."""
    usual = store.recipe_of(recipe)
    found: dict[str, list[Job]] = {}
    for schedule in SCHEDULES:
        for seed in seeds:
            changed = schedule.changed(usual, runs / recipe / SINGLE.folder / f"seed-{seed}")
            name = recipe if changed == usual else f"{recipe}-{schedule.name.replace(',', '').replace(' ', '-')}"
            found.setdefault(schedule.name, []).extend(
                Comparison(name, changed, (schedule.variant,), (seed,)).jobs(runs)
            )
    return found


def write(recipe: str, seeds: Sequence[int]) -> int:
    """Write the table and the picture of the schedules whose runs were kept, and say how many runs there are."""
    lines = lines_of(jobs_of(recipe, seeds, Path()))
    if not lines:
        return 0
    named = {schedule.name: schedule for schedule in SCHEDULES}
    costs = [cost(named[line.name], line.runs[0]["stages"], store.recipe_of(recipe)) for line in lines]
    draw(lines, costs, store.RESULTS / f"cheaper-{recipe}.svg")
    return save(f"cheaper-{recipe}", lines, COLUMNS, [cells(*pair) for pair in zip(lines, costs, strict=True)])


def cost(schedule: Schedule, stages: Sequence[Any], usual: Recipe) -> tuple[float, float]:
    """Count what a run took: in epochs of one network, and in what of these is not multiplied by zero."""
    members = usual.members if schedule.variant.method == SPLIT.method else 1
    total = multiplied = float(usual.epochs.train) if schedule.parent else 0.0
    for phase, number, epochs in stages:
        free = 1 - number / members if members > 1 else 1.0
        total += epochs
        multiplied += epochs * (1 / members if phase in ("finetune", "train") else free)
    return total, multiplied


def cells(line: Line, spent: tuple[float, float]) -> list[str]:
    """Write one line of the table."""
    figures = (
        ("accuracy", 1, 100),
        ("nll", 3, 1),
        ("ece", 4, 1),
        ("mean_member_accuracy", 1, 100),
        ("agreement", 3, 1),
    )
    return [line.name, *(f"{one:.0f}" for one in spent), *(line.cell(*figure) for figure in figures)]


def draw(lines: Sequence[Line], costs: Sequence[tuple[float, float]], path: Path) -> None:
    """Draw the NLL against both costs; numbers stand for the lines of the table."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    for place, (axis, title) in enumerate(zip(axes, ("epochs of one network", "by multiplications"), strict=True)):
        for number, (line, spent) in enumerate(zip(lines, costs, strict=True), start=1):
            colour = "#D55E00" if line.name.startswith("split") else "#0072B2" if "deep" in line.name else "#7F7F7F"
            label = f"{number} {line.name}" if place else None
            axis.plot(spent[place], line.mean("nll"), "o", color=colour, ms=4, label=label)
            axis.annotate(f" {number}", (spent[place], line.mean("nll")), fontsize=8)
        axis.set(xlabel=f"training, {title}")
    axes[0].set_ylabel("NLL, held-out images")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
