"""The tables and figures of the paper: which runs each needs at which scale, and how a figure is drawn from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.compare import Comparison, Variant
from plures.lab.compare.rows import Finished, Row
from plures.lab.compare.table import PAPER_TITLE, Column, columns, paper_column
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import LOOKS
from plures.lab.paper import (
    FROM_MIMO_PAPER,
    MC_DROPOUT_NOTE,
    MIMO_PAPER,
    MIMO_PAPER_NOTE,
    PAPER_FORM,
    TABLE1,
    TABLE3,
    Published,
    paper_data,
    paper_members,
)
from plures.lab.paper.figures import Bars, RunMetrics, Series, against_members, member_bars
from plures.lab.recipes import get_recipe
from plures.lab.runs.open import open_run

Scale = Literal["paper", "cpu", "digits"]

# The recipes that stand for the paper's data sets at each scale.
RESNETS = {
    "paper": ("cifar10", "cifar100", "cub200", "tiny-imagenet"),
    "cpu": ("cifar10-cpu", "cifar100-cpu", "cub200-cpu", "tiny-imagenet-cpu"),
    "digits": ("digits",),
}
WIDE_RESNETS = {
    "paper": ("cifar10-wrn", "cifar100-wrn"),
    "cpu": ("cifar10-wrn-cpu", "cifar100-wrn-cpu"),
    "digits": ("digits-wrn",),
}
# The ablation needs convolutions: kernels can own nothing in a perceptron.
CONVOLUTIONS = {"paper": ("cifar10", "cifar100"), "cpu": ("cifar10-cpu", "cifar100-cpu"), "digits": ("digits-resnet",)}
CIFARS = {"paper": ("cifar10", "cifar100"), "cpu": ("cifar10-cpu", "cifar100-cpu"), "digits": ("digits",)}

SEEDS = {"paper": 3, "cpu": 1, "digits": 2}  # as many as are made within a sensible time

LONGER = 2.1  # orthogonal dropout trains a member for 200 + 20 + 200 epochs, a deep ensemble for 200
FORM = tuple(f"{name}={value}" for name, value in PAPER_FORM["orthogonal-dropout"].items())
AS_PUBLISHED = Variant("orthogonal-dropout", FORM, label="orthogonal-dropout, as published")
ABLATION = (
    Variant("mc-dropout"),
    Variant(
        "orthogonal-dropout",
        ("optimize-masks=false", "classifier=split", "granularity=weight"),
        label="orthogonal-dropout, random masks",
    ),
    Variant("orthogonal-dropout", ("classifier=split", "granularity=weight"), label="orthogonal-dropout + MO"),
    replace(AS_PUBLISHED, label="orthogonal-dropout + MO + FC"),
    Variant("orthogonal-dropout", ("classifier=fixed",), label="orthogonal-dropout + MO + FC, kernels"),
    Variant("orthogonal-dropout", label="orthogonal-dropout, our default"),
    Variant("deep-ensemble"),
    Variant("deep-ensemble", ("classifier=fixed",), label="deep-ensemble + FC"),
    Variant("deep-ensemble", longer=LONGER, label=f"deep-ensemble, {LONGER:g} x epochs"),
)
FIGURE_MEMBERS = 10
MOST_MIMO_MEMBERS = 4  # more have no room in a ResNet


@dataclass(frozen=True)
class Target:
    """One table or figure of the paper."""

    recipes: Mapping[str, tuple[str, ...]]  # of each scale
    variants: Callable[[str], tuple[Variant, ...]]  # of a recipe
    columns: Callable[[Sequence[Row]], list[Column]] = columns
    paper: Mapping[str, Mapping[str, Published]] = field(default_factory=dict)  # if it is not table 1 or 2
    notes: Mapping[str, str] = field(default_factory=dict)

    def comparisons(self, scale: Scale, seeds: int | None = None, only: Sequence[str] = ()) -> list[Comparison]:
        """List the runs that the target needs, one comparison per recipe; `only` leaves out the other recipes."""
        for name in only:
            if name not in self.recipes[scale]:
                raise unknown(f"recipe of the scale {scale} here", name, self.recipes[scale])
        if seeds is not None and seeds < 1:
            raise PluresError(f"--seeds {seeds}: at least one is needed")
        numbers = tuple(range(seeds or SEEDS[scale]))
        return [
            Comparison(name, recipe, self.variants(name), numbers, self.paper.get(paper_data(recipe.data), {}))
            for name in only or self.recipes[scale]
            for recipe in [get_recipe(name)]
        ]


def ablation_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the paper's table 3, and the costs of each row."""
    every = {column.title: column for column in columns(rows)}
    order = ("member accuracy %", "accuracy %", "NLL", "ECE", "agreement", "size", "training epochs")
    ours = [every[title] for title in order if title in every]
    keys = ("member_accuracy", "accuracy", "nll", "ece", "agreement")
    paper = paper_column("paper: member accuracy % / accuracy % / NLL / ECE / agreement", *keys)
    return [*ours, paper] if PAPER_TITLE in every else ours


def member_counts(recipe: str) -> tuple[Variant, ...]:
    """List the runs of figure 2: an orthogonal dropout for each number of members, and the largest deep ensembles.

    The members of a deep ensemble know nothing of each other: its first two are a deep ensemble of two.
    """
    return (
        *_counted("orthogonal-dropout", FIGURE_MEMBERS, recipe),
        Variant("deep-ensemble", members=FIGURE_MEMBERS, label="deep-ensemble"),
        Variant("deep-ensemble", ("classifier=fixed",), members=FIGURE_MEMBERS, label="deep-ensemble + FC"),
    )


def member_counts_mimo(recipe: str) -> tuple[Variant, ...]:
    """List the runs of figure 3: MIMO and orthogonal dropout with the numbers of members that MIMO has room for."""
    return (
        *_counted("orthogonal-dropout", MOST_MIMO_MEMBERS, recipe),
        *_counted("mimo", MOST_MIMO_MEMBERS, recipe),
        Variant("deep-ensemble", members=MOST_MIMO_MEMBERS, label="deep-ensemble"),
    )


def _counted(method: str, most: int, recipe: str) -> list[Variant]:
    """List a method with two members and more. The recipe's own number is left out: other tables share the run."""
    usual = Variant(method).recipe(get_recipe(recipe)).members
    form = FORM if method == AS_PUBLISHED.method else ()
    return [
        Variant(method, form, members=None if count == usual else count, label=f"{method} {count}")
        for count in range(2, most + 1)
    ]


def _methods(recipe: str) -> tuple[Variant, ...]:
    return (*map(Variant, LOOKS), AS_PUBLISHED)


def _methods_with_members(recipe: str) -> tuple[Variant, ...]:
    return tuple(one for one in _methods(recipe) if one.method not in ("deterministic", "mc-dropout"))


TAKEN_OVER = f"of which {', '.join(sorted(FROM_MIMO_PAPER))}"
WIDE_NOTES = {TAKEN_OVER: MIMO_PAPER, "deep-ensemble, mc-dropout": MIMO_PAPER_NOTE}
ABLATION_NOTES = {"mc-dropout": MC_DROPOUT_NOTE}
TARGETS = {
    "table1": Target(RESNETS, _methods),
    "table2": Target(WIDE_RESNETS, _methods, notes=WIDE_NOTES),
    "table3": Target(CONVOLUTIONS, lambda recipe: ABLATION, ablation_columns, TABLE3, ABLATION_NOTES),
    "figure1": Target(RESNETS, _methods_with_members),
    "figure2": Target(CIFARS, member_counts),
    "figure3": Target(CIFARS, member_counts_mimo),
}


def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3 as PDF, PNG and SVG, and return their paths."""
    if target == "figure1":
        return member_bars({comparison.name: _bars(comparison, rows) for comparison, rows in tables}, stem)
    return against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables}, stem)


def _bars(comparison: Comparison, rows: Sequence[Row]) -> list[Bars]:
    known = {name: row.member_accuracy for name, row in TABLE3.get(paper_data(comparison.recipe.data), {}).items()}
    # The ablation calls the usual form by its parts.
    full = {AS_PUBLISHED.name: "orthogonal-dropout + MO + FC"}
    return [Bars(row.name, _metrics(row), known.get(full.get(row.name, row.name))) for row in rows]


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, dict[int, RunMetrics]] = {}
    for row in rows:
        if row.name.startswith("deep-ensemble"):
            points[row.name] = _first_members(row.runs, data_dir)
        else:
            method, _, count = row.name.rpartition(" ")
            points.setdefault(method, {})[int(count)] = _metrics(row)
    data = paper_data(comparison.recipe.data)
    known = TABLE3.get(data, {}) | TABLE1.get(data, {})
    return [
        Series(name, found, {paper_members(name, wide=False): known[name]} if name in known else {})
        for name, found in points.items()
    ]


def _metrics(row: Row) -> RunMetrics:
    return [run.metrics for run in row.runs]


def _first_members(runs: Sequence[Finished], data_dir: Path | None) -> dict[int, RunMetrics]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for finished in runs:
        run = open_run(finished.path)
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        for count in range(2, len(members) + 1):
            found.setdefault(count, []).append(scores(members[:count], targets))
    return dict(found)
