"""The commands, each a class whose fields are its arguments and whose docstring is its help.

What is heavy is imported by the command that needs it: `--help` answers without torch.
"""

from typing import Any

from plures.lab.commands.machine import Bench, Recipes
from plures.lab.commands.many_runs import Compare, Report, Reproduce
from plures.lab.commands.one_run import Evaluate, Predict, Train

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
