"""plures recipes: the recipes, and how long they take on this machine."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from plures.lab.cli.shared import Switch, print_json
from plures.lab.recipes import RECIPES


@dataclass(frozen=True)
class Recipes:
    """List the recipes, with the training time on this machine.

    Examples:
      plures recipes
      plures recipes --measure

    Times:
      --measure estimates the time of orthogonal dropout from a few steps on
      random images, without the data. This takes a few minutes. Estimates
      are stored for this machine and shown from then on.
    """

    measure: Switch = False
    """Estimate how long each recipe takes on this machine, and store the estimates."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "the estimates so far are stored"

    def __call__(self) -> int:
        """List; with --measure, measure first."""
        from plures.lab import terminal
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
            terminal.show(*terminal.recipes_list(RECIPES, seconds))
        return 0
