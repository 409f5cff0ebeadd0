"""plures recipes: what there is to train, and how long it takes here."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from plures.lab.cli.shared import Switch, print_json
from plures.lab.recipes import RECIPES


@dataclass(frozen=True)
class Recipes:
    """List the recipes, with the time that orthogonal dropout takes here.

    Examples:
      plures recipes
      plures recipes --measure

    Times:
      They are estimated on request, from a few steps on random images, without
      the data; that takes some minutes. Estimates are kept for this machine
      and shown from then on.
    """

    measure: Switch = False
    """Estimate how long each recipe takes on this machine, and keep the estimates."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "the estimates that were made so far are kept"

    def __call__(self) -> int:
        """List, measuring first if asked to."""
        from plures.lab import tables
        from plures.lab.timing.estimates import estimate, kept_estimate

        seconds: dict[str, float | None] = {}
        for name, recipe in RECIPES.items():
            if self.measure:
                print(f"measuring {name}", file=sys.stderr)
            found = estimate(recipe, again=True) if self.measure else kept_estimate(recipe)
            seconds[name] = None if found is None else found.seconds
        if self.json:
            print_json({name: one.as_json() | {"seconds": seconds[name]} for name, one in RECIPES.items()})
        else:
            tables.show(*tables.recipes_list(RECIPES, seconds))
        return 0
