"""Three ways to use one network on embedded data, side by side: `make demo`, under five minutes on two cores.

python -m plures.lab.demo

Everything is kept in runs/demo: started again, it resumes where it stopped.
"""

import os
import shutil
import sys
from pathlib import Path

from plures.errors import PluresError

RUNS = Path("runs/demo")
RECIPE = "digits"
METHODS = ("deterministic", "orthogonal-dropout", "deep-ensemble")


def main() -> int:
    """Train the three, print the table, write the report, and return the exit code."""
    try:
        return demonstrate(RUNS)
    except PluresError as error:
        print(f"plures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plures: interrupted; the same command resumes after the last finished epoch", file=sys.stderr)
        return 130


def demonstrate(runs: Path) -> int:
    """Compare the methods of the demonstration; what is finished is only read."""
    from plures.lab import tables
    from plures.lab.compare import table as write
    from plures.lab.compare.compare import compare
    from plures.lab.compare.jobs import Comparison, variants
    from plures.lab.recipes import get_recipe
    from plures.lab.report import write_report

    comparison = Comparison(RECIPE, get_recipe(RECIPE), variants(METHODS))
    (rows,) = compare([comparison], runs)
    title = f"the network of the recipe {RECIPE}, used three ways"
    write.show(title, rows, write.columns(rows))
    if any(row.failures for row in rows):
        return 2
    folder = runs / RECIPE
    page = write_report(rows, runs / "report.html", data_dir=None, command=f"plures report {folder}")
    tables.show(f"The report: {page}")
    tables.show(f"Try next: {_plures()} evaluate {folder / METHODS[1] / 'seed-0'} --shift")
    return 0


def _plures() -> str:
    """Name the command as it can be typed here: an environment that is not activated has it beside its Python."""
    return "plures" if shutil.which("plures") else os.path.relpath(Path(sys.executable).with_name("plures"))


if __name__ == "__main__":
    sys.exit(main())
