"""The tables and figures of the paper: which runs each needs at which scale, and how a figure is drawn from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.compare import Comparison, Variant
from plures.lab.compare.rows import Finished, Row
from plures.lab.compare.table import PAPER_TITLE, Column, columns, paper_column
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import LOOKS
from plures.lab.paper import published
from plures.lab.paper.figures import Bars, Point, Series, against_members, member_bars
from plures.lab.paper.published import TABLE1, TABLE3, Published, paper_data
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
FORM = tuple(f"{name}={value}" for name, value in published.PAPER_FORM["orthogonal-dropout"].items())
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

    about: str
    recipes: Mapping[str, tuple[str, ...]]  # of each scale
    variants: Callable[[str], tuple[Variant, ...]]  # of a recipe
    columns: Callable[[Sequence[Row]], list[Column]] = columns
    paper: Mapping[str, Mapping[str, Published]] = field(default_factory=dict)  # if it is not table 1 or 2
    notes: dict[str, str] = field(default_factory=lambda: {"paper": published.PAPER})

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
        *(_with_members("orthogonal-dropout", count, recipe) for count in range(2, FIGURE_MEMBERS + 1)),
        Variant("deep-ensemble", members=FIGURE_MEMBERS, label="deep-ensemble"),
        Variant("deep-ensemble", ("classifier=fixed",), members=FIGURE_MEMBERS, label="deep-ensemble + FC"),
    )


def member_counts_mimo(recipe: str) -> tuple[Variant, ...]:
    """List the runs of figure 3: MIMO and orthogonal dropout with the numbers of members that MIMO has room for."""
    counts = range(2, MOST_MIMO_MEMBERS + 1)
    return (
        *(_with_members("orthogonal-dropout", count, recipe) for count in counts),
        *(_with_members("mimo", count, recipe) for count in counts),
        Variant("deep-ensemble", members=MOST_MIMO_MEMBERS, label="deep-ensemble"),
    )


def _with_members(method: str, count: int, recipe: str) -> Variant:
    """Leave out the number of members if it is that of the recipe: other tables then share the run."""
    usual = Variant(method).recipe(get_recipe(recipe)).members
    form = FORM if method == AS_PUBLISHED.method else ()
    return Variant(method, form, members=None if count == usual else count, label=f"{method} {count}")


def _methods(recipe: str) -> tuple[Variant, ...]:
    return (*map(Variant, LOOKS), AS_PUBLISHED)


def _methods_with_members(recipe: str) -> tuple[Variant, ...]:
    return tuple(one for one in _methods(recipe) if one.method not in ("deterministic", "mc-dropout"))


TAKEN_OVER = f"of which {', '.join(sorted(published.FROM_MIMO_PAPER))}"
TARGETS = {
    "table1": Target("all methods on four data sets", RESNETS, _methods, columns),
    "table2": Target(
        "all methods with a wide ResNet",
        WIDE_RESNETS,
        _methods,
        columns,
        notes={
            "paper": published.PAPER,
            TAKEN_OVER: published.MIMO_PAPER,
            "deep-ensemble, mc-dropout": published.MIMO_PAPER_NOTE,
        },
    ),
    "table3": Target(
        "what each part contributes",
        CONVOLUTIONS,
        lambda recipe: ABLATION,
        ablation_columns,
        TABLE3,
        notes={"paper": published.PAPER, "mc-dropout": published.MC_DROPOUT_NOTE},
    ),
    "figure1": Target("the accuracy of each member", RESNETS, _methods_with_members),
    "figure2": Target("quality against the number of members", CIFARS, member_counts),
    "figure3": Target("quality against the number of members, with MIMO", CIFARS, member_counts_mimo),
}


def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3 as PDF, PNG and SVG, and return their paths."""
    if target == "figure1":
        return member_bars({comparison.name: _bars(comparison, rows) for comparison, rows in tables}, stem)
    return against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables}, stem)


def _bars(comparison: Comparison, rows: Sequence[Row]) -> list[Bars]:
    paper = TABLE3.get(paper_data(comparison.recipe.data), {})
    # The ablation calls the usual form by its parts.
    full = {AS_PUBLISHED.name: "orthogonal-dropout + MO + FC"}
    groups = []
    for row in rows:
        known = paper.get(full.get(row.name, row.name))
        members = tuple(tuple(run.metrics["member_accuracies"]) for run in row.runs)
        ensemble = tuple(row.values("accuracy"))
        groups.append(Bars(row.name, members, ensemble, known.member_accuracy if known else None))
    return groups


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        name = row.name
        if name.startswith("deep-ensemble"):
            points[name] = _first_members(row.runs, data_dir)
        else:
            method, _, count = name.rpartition(" ")
            figures = (tuple(row.values(key)) for key in ("accuracy", "nll", "ece"))
            points.setdefault(method, []).append(Point(int(count), *figures))
    data = paper_data(comparison.recipe.data)
    known = {**TABLE1.get(data, {}), "deep-ensemble + FC": TABLE3.get(data, {}).get("deep-ensemble + FC")}
    series = []
    for name, found in points.items():
        of_paper = known.get(name)
        paper = [] if of_paper is None else [Point.published(published.paper_members(name, wide=False), of_paper)]
        series.append(Series(name, tuple(found), tuple(paper)))
    return series


def _first_members(runs: Sequence[Finished], data_dir: Path | None) -> list[Point]:
    found = []
    for finished in runs:
        run = open_run(finished.path)
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        found.append([scores(members[:count], targets) for count in range(2, len(members) + 1)])
    return [
        Point(index + 2, *(tuple(seed[index][key] for seed in found) for key in ("accuracy", "nll", "ece")))
        for index in range(len(found[0]) if found else 0)
    ]
