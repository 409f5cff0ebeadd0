"""Draw how good an ensemble gets for how much training, on images that are neither trained nor tested on.

    python docs/make/cheaper.py digits-resnet --seeds 3
    python docs/make/cheaper.py cifar10-cpu --data-dir data
    python docs/make/cheaper.py cifar10-cpu --data-dir data --schedules "deep ensemble" "split, as the recipe"

Missing runs are made, finished ones skipped, interrupted ones resumed. Table and picture go to docs/results;
`make docs` puts the table into docs/results.md.

Training is counted, not timed: in epochs of one network, and in multiplications, where a member of a split network
needs no more than the share of the weights that it trains. (Today's training multiplies by the zeros, too.) A pass of
teachers for distillation counts as a third of a training step, and a parent with all of its epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from held_out import RESULTS, Line, arguments, make, measured, save
from plures.lab.compare.jobs import Comparison, Job, Variant
from plures.lab.compare.pool import is_done
from plures.lab.recipes import Recipe, get_recipe
from plures.lab.runs.folder import RunFolder

matplotlib.rcParams |= {"svg.hashsalt": "plures", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}

SPLIT, DEEP, SINGLE = Variant("orthogonal-dropout"), Variant("deep-ensemble"), Variant("deterministic")
DISTILLED = Variant("orthogonal-dropout", ("distill=0.5",))
FORWARD = 1 / 3  # of a training step: forward, and backward to activations and to weights
COLUMNS = ["schedule", "epochs", "by multiplications", "accuracy %", "NLL", "ECE", "member accuracy %", "agreement"]


@dataclass(frozen=True)
class Schedule:
    """A way to train an ensemble: shares of the recipe's epochs and rates."""

    name: str
    variant: Variant = SPLIT
    pretrain: float = 1  # of the recipe's epochs
    finetune_rate: float | None = None  # of the recipe's rate
    parent: bool = False  # whether all members start from one trained network

    def changed(self, recipe: Recipe, parent: Path) -> Recipe:
        """Give the recipe of the schedule."""
        epochs = replace(recipe.epochs, pretrain=round(self.pretrain * recipe.epochs.pretrain))
        rate = None if self.finetune_rate is None else self.finetune_rate * recipe.learning_rate
        weights = str(parent) if self.parent else None
        return replace(recipe, epochs=epochs, finetune_rate=rate, weights=weights)


SCHEDULES = (
    Schedule("one network", SINGLE),
    Schedule("deep ensemble, half the epochs", replace(DEEP, longer=0.5)),
    Schedule("deep ensemble", DEEP),
    Schedule("split, random masks", replace(SPLIT, settings=("optimize-masks=false",))),
    Schedule("split, as the recipe"),
    Schedule("split, half the pre-training", pretrain=0.5),
    Schedule("split, a quarter of the pre-training", pretrain=0.25),
    Schedule("split, a quarter, finetuned from a third of the rate", pretrain=0.25, finetune_rate=0.3),
    Schedule("split, finetuned from a third of the rate", finetune_rate=0.3),
    Schedule("split from one parent, no more pre-training", pretrain=0, parent=True),
    Schedule("split from one parent, a quarter", pretrain=0.25, parent=True),
    Schedule("split, a quarter, distilled", DISTILLED, pretrain=0.25),
    Schedule("split, distilled", DISTILLED),
)


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs, the tables and the pictures."""
    parser = arguments(__doc__ or "")
    names = [schedule.name for schedule in SCHEDULES]
    parser.add_argument(
        "--schedules", nargs="+", choices=names, default=names, help="train these; all that are finished are shown"
    )
    asked = parser.parse_args(words)
    for recipe in asked.recipes:
        jobs = {one: jobs_of(one, recipe, range(asked.seeds), asked.runs) for one in SCHEDULES}
        chosen = [one for one in SCHEDULES if one.name in asked.schedules]
        if any(one.parent for one in chosen):
            chosen.append(SCHEDULES[0])  # the parents are its runs
        jobs = {one: own for one, own in jobs.items() if one in chosen or all(map(is_done, own))}
        for parents_first in (False, True):
            make([job for one in jobs for job in jobs[one] if one.parent is parents_first], asked.jobs, asked.data_dir)
        lines = [measured(one.name, own, asked.data_dir) for one, own in jobs.items()]
        costs = [cost(one, own[0], parent_of(own[0], asked.runs, recipe)) for one, own in jobs.items()]
        save(f"cheaper-{recipe}", lines, COLUMNS, [cells(*pair) for pair in zip(lines, costs, strict=True)])
        draw(lines, costs, RESULTS / f"cheaper-{recipe}.svg")


def jobs_of(schedule: Schedule, recipe: str, seeds: Sequence[int], runs: Path) -> list[Job]:
    """List the runs of a schedule; one that changes nothing shares them with `plures compare`."""
    usual, jobs = get_recipe(recipe), []
    for seed in seeds:
        changed = schedule.changed(usual, runs / recipe / SINGLE.folder / f"seed-{seed}")
        name = recipe if changed == usual else f"{recipe}-{schedule.name.replace(',', '').replace(' ', '-')}"
        jobs += Comparison(name, changed, (schedule.variant,), (seed,)).jobs(runs)
    return jobs


def parent_of(job: Job, runs: Path, recipe: str) -> Path:
    """Say where the run of the single network of the same seed is."""
    return runs / recipe / SINGLE.folder / f"seed-{job.recipe.seed}"


def cost(schedule: Schedule, job: Job, parent: Path) -> tuple[float, float]:
    """Count what a run took: in epochs of one network, and in what of these is not multiplied by zero."""
    members = job.recipe.members if job.variant.method == SPLIT.method else 1
    epochs = multiplied = float(len(RunFolder(parent).records())) if schedule.parent else 0.0
    for record in RunFolder(job.run).records():
        number = record["member"] or 0
        free = 1 - number / members if members > 1 else 1.0
        epochs += 1
        multiplied += 1 / members if record["phase"] in ("finetune", "train") else free
        if "distill=0.5" in job.variant.settings and record["phase"] == "finetune":
            epochs += FORWARD * number
            multiplied += FORWARD * number / members
    return epochs, multiplied


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


if __name__ == "__main__":
    main()
