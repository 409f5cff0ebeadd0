"""plures bench: speed and size, as ratios in one run."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

from plures.lab.cli.shared import Switch, print_json


@dataclass(frozen=True)
class Bench:
    """Measure speed and size relative to the alternatives.

    Examples:
      plures bench                    eight minutes on two cores
      plures bench --quick            only ratios that have a target
      plures bench --full             also large networks: 15 minutes
      plures bench --out benchmarks   also write results.json and results.md

    How it is measured:
      On a ResNet18, with the cost of every method; --full adds a
      WideResNet28-10 and a transformer of the size of ViT-S. The two sides of
      a ratio run alternately, so a busy machine slows both. An idle machine
      is still better.
    """

    quick: Switch = False
    """Measure only ratios that have a target."""
    full: Switch = False
    """Also measure large networks."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Write results.json and results.md into this folder."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "the measurements so far are in the folder of --out"

    def __call__(self) -> int:
        """Measure, showing each ratio as it is found."""
        from plures.files import check_place
        from plures.lab.timing import bench as suite
        from plures.lab.timing.machine import machine

        if self.out is not None:
            check_place(self.out / "results.json")
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
