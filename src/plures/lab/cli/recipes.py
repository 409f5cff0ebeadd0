"""plures recipes: the settings of experiments by name."""

from dataclasses import dataclass
from typing import ClassVar

from plures.lab.cli.shared import Switch, print_json
from plures.lab.recipes import RECIPES


@dataclass(frozen=True)
class Recipes:
    """List the recipes: data, network and epochs of each.

    Examples:
      plures recipes
      plures recipes --json    with all settings
    """

    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """List the recipes."""
        from plures.lab import terminal

        if self.json:
            print_json({name: one.as_json() for name, one in RECIPES.items()})
        else:
            terminal.show(terminal.recipes_table(RECIPES))
        return 0
