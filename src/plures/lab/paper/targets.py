"""The tables and figures of the paper: which runs each needs at which scale, and how a figure is drawn from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.compare import Comparison, Variant
from plures.lab.compare.rows import Finished, Row
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.method_names import LOOKS
from plures.lab.paper import TABLE1, TABLE2, TABLE2_NOTES, TABLE3, TABLE3_NOTES, Published, paper_data
from plures.lab.paper.figures import RunMetrics, Series, against_members, member_bars
from plures.lab.recipes import get_recipe
from plures.lab.runs.open import open_run

Scale = Literal["paper", "cpu", "digits"]
Papers = Mapping[str, Mapping[str, Published]]  # the published figures by data set and name of the row

SEEDS = {"paper": 3, "cpu": 1, "digits": 2}  # as many as are made within a sensible time

LONGER = 2.1  # orthogonal dropout trains a member for 200 + 20 + 200 epochs, a deep ensemble for 200
FORM = ("classifier=fixed", "granularity=weight")  # the options of the paper that differ from our defaults
AS_PUBLISHED = Variant("orthogonal-dropout", FORM, label="orthogonal-dropout, as published")
FIXED = Variant("deep-ensemble", ("classifier=fixed",), label="deep-ensemble + FC")
METHODS = (*map(Variant, LOOKS), AS_PUBLISHED)
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
    FIXED,
    Variant("deep-ensemble", longer=LONGER, label=f"deep-ensemble, {LONGER:g} x epochs"),
)
FIGURE_MEMBERS = 10
MOST_MIMO_MEMBERS = 4  # more have no room in a ResNet


@dataclass(frozen=True)
class Target:
    """One table or figure of the paper."""

    recipes: Mapping[str, tuple[str, ...]]  # of each scale
    variants: tuple[Variant, ...]
    paper: Papers = field(default_factory=dict)
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
            Comparison(name, recipe, self.variants, numbers, self.paper.get(paper_data(recipe.data), {}))
            for name in only or self.recipes[scale]
            for recipe in [get_recipe(name)]
        ]


def _scales(*names: str, digits: str = "digits") -> dict[str, tuple[str, ...]]:
    """Return the recipes that stand for the paper's data sets at each scale."""
    return {"paper": names, "cpu": tuple(f"{name}-cpu" for name in names), "digits": (digits,)}


def _counted(variant: Variant, most: int) -> list[Variant]:
    """Return a variant with two members and more."""
    return [replace(variant, members=count, label=f"{variant.method} {count}") for count in range(2, most + 1)]


def _as_published(table: Papers, row: str) -> Papers:
    """Return a table of the paper with one of its rows named as our variant of the same form."""
    return {
        data: {AS_PUBLISHED.name if name == row else name: figures for name, figures in rows.items()}
        for data, rows in table.items()
    }


RESNETS = _scales("cifar10", "cifar100", "cub200", "tiny-imagenet")
WIDE_RESNETS = _scales("cifar10-wrn", "cifar100-wrn", digits="digits-wrn")
# The ablation needs convolutions: kernels can own nothing in a perceptron.
CONVOLUTIONS = _scales("cifar10", "cifar100", digits="digits-resnet")
CIFARS = _scales("cifar10", "cifar100")
TARGETS = {
    "table1": Target(RESNETS, METHODS, _as_published(TABLE1, "orthogonal-dropout")),
    "table2": Target(WIDE_RESNETS, METHODS, _as_published(TABLE2, "orthogonal-dropout"), TABLE2_NOTES),
    "table3": Target(CONVOLUTIONS, ABLATION, TABLE3, TABLE3_NOTES),
    "figure1": Target(
        RESNETS,
        tuple(one for one in METHODS if one.method not in ("deterministic", "mc-dropout")),
        _as_published(TABLE3, "orthogonal-dropout + MO + FC"),
    ),
    # The members of a deep ensemble know nothing of each other: its first two are a deep ensemble of two.
    "figure2": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, FIGURE_MEMBERS),
            Variant("deep-ensemble", members=FIGURE_MEMBERS, label="deep-ensemble"),
            replace(FIXED, members=FIGURE_MEMBERS),
        ),
    ),
    "figure3": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, MOST_MIMO_MEMBERS),
            *_counted(Variant("mimo"), MOST_MIMO_MEMBERS),
            Variant("deep-ensemble", members=MOST_MIMO_MEMBERS, label="deep-ensemble"),
        ),
    ),
}


def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3 as PDF, PNG and SVG, and return their paths."""
    if target == "figure1":
        return member_bars({comparison.name: rows for comparison, rows in tables}, stem)
    return against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables}, stem)


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, dict[int, RunMetrics]] = {}
    for row in rows:
        if row.name.startswith("deep-ensemble"):
            points[row.name] = _first_members(row.runs, data_dir)
        else:
            method, _, count = row.name.rpartition(" ")
            points.setdefault(method, {})[int(count)] = [run.metrics for run in row.runs]
    data = paper_data(comparison.recipe.data)
    known = TABLE3.get(data, {}) | TABLE1.get(data, {})
    return [
        Series(name, found, {2 if name == "mimo" else 5: known[name]} if name in known else {})
        for name, found in points.items()
    ]


def _first_members(runs: Sequence[Finished], data_dir: Path | None) -> dict[int, RunMetrics]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for finished in runs:
        run = open_run(finished.path)
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        for count in range(2, len(members) + 1):
            found.setdefault(count, []).append(scores(members[:count], targets))
    return dict(found)
