"""Commands that train one ensemble, and list what can be trained."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, UseAppendAction, arg

from plures.errors import PluresError
from plures.lab.cli.shared import Command, DataDir, Given
from plures.lab.method_names import METHOD_NAMES, method_class, short_name, takes
from plures.lab.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class Train(Command):
    """Train one ensemble into a run folder; run again to resume.

    Examples:
      plures train                      orthogonal dropout on digits, one minute
      plures train digits --method deep-ensemble --members 3
      plures train cifar10-cpu --data-dir data --set granularity=weight

    Your own images:
      plures train --data ./birds
        The images are in birds/train/CLASS/ and birds/test/CLASS/, or only in
        birds/CLASS/: then a fifth of each class is held out for testing.
        The folder may also hold train.parquet and test.parquet, as on the
        Hugging Face hub. Without a RECIPE, it is images: 64 pixels, all
        members trained in one stage, more epochs if there are few images.

    Your own network, a function in mynetworks.py in the working directory:
      plures train --model mynetworks:small
        The function is called with classes= and channels=, and with size=,
        width= and stem= if it has these arguments. It returns a
        torch.nn.Module.

    Your own method, a class in mymethods.py derived from plures.Ensemble:
      plures train --method mymethods:TwoHeads

    Files in the run folder:
      config.json           all settings that affect the result, and versions
      log.jsonl             a record per epoch
      ensemble.safetensors  the trained ensemble
      metrics.json          metrics on the test images
      costs.json            size and times relative to one network
        If the run is interrupted, the same command resumes it after the last
        finished epoch. On the same machine the result has the same bits.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """The recipe: it sets the defaults of all options below. `plures recipes` lists them."""
    method: Annotated[str, arg(metavar="METHOD", help=f"{', '.join(METHOD_NAMES)}, or module:Class.")] = (
        "orthogonal-dropout"
    )
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """An option of the method. For an unknown name, the error lists all options."""
    run: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The run folder; by default, runs/RECIPE-METHOD-seedN."""
    data_dir: DataDir = None
    settings: Annotated[Recipe, arg(name="")] = field(default_factory=Recipe)
    given: Given = ()

    after_interrupt: ClassVar[str] = "the same command resumes after the last finished epoch"

    def __call__(self) -> int:
        """Train, and show the result."""
        from plures.lab import terminal
        from plures.lab.training.train import train
        from plures.progress import duration

        if "members" in self.given and not takes(method_class(self.method), "members"):
            raise PluresError(f"{self.method} has no option members: leave out --members {self.settings.members}")
        recipe = self.settings
        run = self.run or Path("runs") / f"{self.recipe}-{short_name(self.method)}-seed{recipe.seed}"
        words: dict[str, Any] = {"settings": self.set, "recipe_name": self.recipe, "given": self.given}
        found = train(recipe, self.method, run, data_dir=self.data_dir, **words)
        terminal.show(terminal.scores_table(f"{self.method} on {recipe.data}", found))
        terminal.show(f"in {run}, trained in {duration(found['seconds'])}, {found['bytes']:,} bytes")
        return 0


@dataclass(frozen=True)
class Recipes(Command):
    """List the recipes: data, network and epochs of each.

    Examples:
      plures recipes
      plures train cifar10-cpu --help    all settings of one
    """

    def __call__(self) -> int:
        """List the recipes."""
        from plures.lab import terminal

        terminal.show(terminal.recipes_table(RECIPES))
        return 0
