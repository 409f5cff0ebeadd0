"""Compare many runs. Here is what to run: recipe, method with its options, seed and run folder.

This module does not import torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plures.errors import PluresError
from plures.lab.method_names import METHOD_NAMES, known_method, short_name
from plures.lab.recipes import Recipe


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a method with its options.

    `longer` multiplies the epochs, `members` replaces the recipe's.
    """

    method: str
    settings: tuple[str, ...] = ()
    longer: float = 1.0
    members: int | None = None
    label: str = ""

    @classmethod
    def parse(cls, words: str) -> "Variant":
        """Read METHOD or METHOD:NAME=VALUE,NAME=VALUE; a METHOD outside the package is package.module:Class.

        >>> Variant.parse("mine.methods:Forest:depth=3").method
        'mine.methods:Forest'
        """
        method, *others = words.split(":")
        if method not in METHOD_NAMES and others and "=" not in others[0]:
            method = f"{method}:{others.pop(0)}"
        known_method(method)  # refuses others
        return cls(method, tuple(option.strip() for option in ":".join(others).split(",") if option.strip()))

    @property
    def name(self) -> str:
        """The name of the row."""
        return self.label or " ".join([short_name(self.method), *self.settings, *self._more()])

    @property
    def folder(self) -> str:
        """The folder of its runs: one for equal variants, whatever their label."""
        return re.sub(r"[^\w.=-]+", "-", " ".join([self.method, *self.settings, *self._more()])).lower()

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a recipe with the changes of this variant."""
        recipe = recipe.for_method(self.method)
        recipe = replace(recipe, epochs=recipe.epochs.times(self.longer))
        return recipe if self.members is None else replace(recipe, members=self.members)

    def _more(self) -> list[str]:
        longer = [f"epochs x {self.longer:g}"] if self.longer != 1 else []
        return longer + ([f"{self.members} members"] if self.members is not None else [])


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    recipe: Recipe
    variant: Variant
    run: Path
    recipe_name: str

    @property
    def name(self) -> str:
        """The name that is shown."""
        return f"{self.recipe_name}, {self.variant.name}, seed {self.recipe.seed}"


@dataclass(frozen=True)
class Published:
    """One row of a table of the paper, for one data set; `None` if the table lacks the column."""

    accuracy: float
    nll: float
    ece: float
    member_accuracy: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The runs of one table: variants of one recipe, each with the same seeds.

    `paper` has the published figures of a variant by its name; `members` are for all methods, also those that usually
    have fewer.
    """

    name: str
    recipe: Recipe
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0,)
    paper: Mapping[str, Published] = field(default_factory=dict)
    members: int | None = None

    def __post_init__(self) -> None:
        for names in ([one.name for one in self.variants], [one.folder for one in self.variants]):
            if doubled := next((name for name in names if names.count(name) > 1), None):
                raise PluresError(f"the method {doubled} is given more than once: leave one out")

    def jobs(self, runs: Path) -> list[Job]:
        """Return the runs, those of the first seed first."""
        jobs = []
        for seed in self.seeds:
            for variant in self.variants:
                usual = self.recipe.for_method(variant.method).members  # such a run is shared with other tables
                folder = replace(variant, members=None).folder if variant.members == usual else variant.folder
                recipe = variant.recipe(replace(self.recipe, seed=seed))
                if self.members is not None:
                    recipe = replace(recipe, members=self.members)
                jobs.append(Job(recipe, variant, runs / self.name / folder / f"seed-{seed}", self.name))
        return jobs


def unique(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs without those that occur twice."""
    return list({job.run: job for job in jobs}.values())


def variants(words: Sequence[str]) -> tuple[Variant, ...]:
    """Read the methods of a comparison; none means all."""
    return tuple(Variant.parse(word) for word in words or METHOD_NAMES)
