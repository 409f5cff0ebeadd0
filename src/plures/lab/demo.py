"""Three ways to use one network on embedded data, side by side: `make demo`, under five minutes on two cores.

python -m plures.lab.demo

Everything is kept in runs/demo: started again, it goes on where it stopped.
"""

import sys
from pathlib import Path
from typing import Any

from plures.errors import PluresError

RUNS = Path("runs/demo")
RECIPE = "digits"
METHODS = ("deterministic", "orthogonal-dropout", "deep-ensemble")


def main() -> int:
    """Train the three, print the table, and return the exit code.

    main()
    """
    from plures.lab import tables

    try:
        found = train_all(RUNS)
    except PluresError as error:
        print(f"plures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plures: interrupted; the same command goes on after the last finished epoch", file=sys.stderr)
        return 130
    tables.show(tables.comparison_table(f"the network of the recipe {RECIPE}, used three ways", found))
    tables.show(f"Size is that of the saved file. Try next: plures evaluate {RUNS / METHODS[1]} --shift")
    return 0


def train_all(runs: Path) -> dict[str, dict[str, Any]]:
    """Train the recipe with every method of the demonstration; what is finished is only read.

    train_all(Path("runs/demo"))["deep-ensemble"]["nll"]
    """
    from plures.lab.options import METHOD_NAMES
    from plures.lab.recipes import get_recipe
    from plures.lab.train import train

    found = {}
    for method in METHODS:
        print(f"{method}, into {runs / method}", file=sys.stderr)
        found[method] = train(get_recipe(RECIPE).for_method(METHOD_NAMES[method]), method, runs / method)
    return found


if __name__ == "__main__":
    sys.exit(main())
