"""The commands, each a class whose fields are its arguments and whose docstring is its help.

What is heavy is imported by the command that needs it: `--help` answers without torch.
"""

from typing import Any

from plures.lab.cli.machine import Bench, Recipes
from plures.lab.cli.many_runs import Compare, Report, Reproduce
from plures.lab.cli.one_run import Evaluate, Predict, Train

COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "compare": Compare,
    "reproduce": Reproduce,
    "report": Report,
    "recipes": Recipes,
    "bench": Bench,
}
