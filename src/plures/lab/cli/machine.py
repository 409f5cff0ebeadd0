"""Commands about the machine: what recipes cost here, how fast it is."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

from plures.lab.cli.shared import Switch, print_json
from plures.lab.recipes import RECIPES


@dataclass(frozen=True)
class Recipes:
    """List the recipes and what orthogonal dropout would cost here.

    Examples:
      plures recipes
      plures recipes --no-measure

    The cost is measured from a few steps on random images, without the data; it takes a minute or two.
    """

    measure: bool = True
    """Measure what each recipe costs on this machine."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """List, measuring first if asked to."""
        from plures.lab import tables

        seconds = _measured() if self.measure else {}
        if self.json:
            print_json({name: one.as_json() | {"seconds": seconds.get(name)} for name, one in RECIPES.items()})
        else:
            tables.show(tables.recipes_table(RECIPES, seconds if self.measure else None))
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure speed and size against the alternatives, as ratios in one run.

    Examples:
      plures bench                      a ResNet18 and the cost of every method, about ten minutes on two cores
      plures bench --quick              only what has a bar
      plures bench --full               also a WideResNet28-10 and a transformer of the size of ViT-S
      plures bench --out benchmarks     also write results.json and results.md

    Two things are compared by running them in turn, so that a busy machine slows both; let it be idle all the same.
    """

    quick: Switch = False
    """Measure only what has a bar."""
    full: Switch = False
    """Measure large networks, too."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Write results.json and results.md into this folder."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "what was measured so far stands in the folder of --out"

    def __call__(self) -> int:
        """Measure, showing each ratio as it is found."""
        from plures.lab.timing import bench as suite
        from plures.lab.timing.machine import machine

        found: list[Any] = []
        costs: list[Any] = []

        def keep(kept: list[Any], each: Iterable[Any]) -> None:
            for one in each:
                kept.append(one)
                print(one, file=sys.stderr)
                if self.out is not None:  # at once: what is measured is not lost when the rest is interrupted
                    suite.write(self.out, found, costs)

        keep(found, suite.ratios(self.quick))
        keep(costs, () if self.quick else suite.costs())
        keep(found, suite.all_large_ratios() if self.full else ())
        if self.json:
            print_json({"machine": machine(), "ratios": [asdict(one) | {"met": one.met} for one in found]})
        else:
            print(suite.markdown(found, costs))
        return 0


def _measured() -> dict[str, float | None]:
    from plures.lab.timing.estimates import estimate

    seconds: dict[str, float | None] = {}
    for name, recipe in RECIPES.items():
        print(f"measuring {name}", file=sys.stderr)
        found = estimate(recipe)
        seconds[name] = None if found is None else found.seconds
    return seconds
