"""plures train: one ensemble into a run folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, UseAppendAction, arg

from plures.errors import PluresError
from plures.lab.cli.shared import DataDir, Given, Settings, Switch, print_json
from plures.lab.methods import METHOD_NAMES, short_name


@dataclass(frozen=True)
class Train:
    """Train one ensemble into a run folder; run again to resume.

    Examples:
      plures train                      orthogonal dropout on digits, a minute
      plures train digits --method deep-ensemble --members 3
      plures train cifar10-cpu --data-dir data --set granularity=kernel
      accelerate launch --num_processes 2 -m plures train cifar10

    Your own pictures:
      plures train cifar10-cpu --data ./birds --size 32 --validation 0.1
        They are in birds/train/CLASS/ and birds/test/CLASS/, or in
        birds/CLASS/ alone: a fifth of each class is then held out to test on.
        The folder may also hold train.parquet and test.parquet, as on the hub.

    Your own network, a function in mynetworks.py in the working directory:
      plures train --model mynetworks:small
        It is called with classes= and channels=, with size=, width= and stem=
        if it has such arguments, and returns a torch.nn.Module.

    Your own method, a class in mymethods.py derived from plures.Ensemble:
      plures train --method mymethods:TwoHeads

    Files in the run folder:
      config.json           all that decides the result, and versions
      log.jsonl             a record per epoch
      ensemble.safetensors  the trained ensemble
      metrics.json          what was measured on the test images
        Nothing is lost when the machine stops: the same command resumes after
        the last epoch, and ends with the same bits on the same kind of
        machine.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """Where all numbers come from, unless given below; `plures recipes` lists them."""
    method: Annotated[str, arg(metavar="METHOD", help=f"{', '.join(METHOD_NAMES)}, or module:Class.")] = (
        "orthogonal-dropout"
    )
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """An option of the method; an unknown name is refused with a list of all options."""
    run: Annotated[Path | None, arg(metavar="FOLDER", aliases=["--folder"])] = None
    """The run folder; if not given, runs/RECIPE-METHOD-seedN. With torchrun say --folder: it takes --run for itself."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TRACKER")] = ()
    """A tracker to send the log to, such as tensorboard, wandb or mlflow."""
    json: Switch = False
    """Print the metrics as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)
    given: Given = ()

    after_interrupt: ClassVar[str] = "the same command resumes after the last finished epoch"

    def __call__(self) -> int:
        """Train, and show what came out."""
        from plures.lab import tables
        from plures.lab.methods import method_class, takes
        from plures.lab.training.fit import train
        from plures.lab.training.progress import duration

        if "members" in self.given and not takes(method_class(self.method), "members"):
            raise PluresError(f"{self.method} has no members to count: leave out --members {self.settings.members}")
        recipe = self.settings.recipe()
        run = self.run or Path("runs") / f"{self.recipe}-{short_name(self.method)}-seed{recipe.seed}"
        found = train(
            recipe,
            self.method,
            run,
            settings=self.set,
            recipe_name=self.recipe,
            data_dir=self.data_dir,
            trackers=self.track,
        )
        if found and self.json:
            print_json({"run": str(run), "test": found})
        elif found:
            tables.show(tables.scores_table(f"{self.method} on {recipe.data}", found))
            tables.show(f"in {run}, trained in {duration(found['seconds'])}, {found['bytes']:,} bytes")
        return 0
