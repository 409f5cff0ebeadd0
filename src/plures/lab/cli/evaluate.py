"""plures evaluate: measure a finished run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from plures.lab.cli.shared import DataDir, Switch, print_json


@dataclass(frozen=True)
class Evaluate:
    """Measure a finished run: accuracy, calibration, diversity, shift.

    Examples:
      plures evaluate runs/digits-orthogonal-dropout-seed0 --shift
      plures evaluate runs/first --data-dir data --ood svhn --json

    What is measured:
      Metrics are computed on the test images. The temperature for the
      calibrated NLL is fitted on the validation images. --shift corrupts up to
      1,000 test images by noise, blur, weather and compression, the same way
      each time. --ood converts other data (up to 10,000 images) to the size and
      colours of the run, and measures how well uncertainty separates it from
      the test images. The command writes no files.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    shift: Switch = False
    """Also measure on corrupted images."""
    ood: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="")] = None
    """Out-of-distribution data: a name, a folder or a hub id."""
    data_dir: DataDir = None
    """The folder of data sets; by default, the environment variable PLURES_DATA."""
    trust_code: Switch = False
    """Import the code from outside plures that the run names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Measure, and show the result."""
        from plures.lab import terminal
        from plures.lab.data import open_data
        from plures.lab.evaluation.evaluate import evaluate, evaluate_ood, evaluate_shift
        from plures.lab.runs.open import open_run

        run = open_run(self.run, trust_code=self.trust_code)
        data = run.data(self.data_dir)
        unfamiliar = open_data(self.ood, data_dir=self.data_dir, like=data.info) if self.ood else None
        found: dict[str, Any] = {"run": str(self.run), "test": evaluate(run.ensemble, data)}
        if self.shift:
            found["shift"] = evaluate_shift(run.ensemble, data, lambda words: print(words, file=sys.stderr))
        if unfamiliar:
            found["ood"] = {"data": self.ood, "scores": evaluate_ood(run.ensemble, data, unfamiliar)}
        if self.json:
            print_json(found)
            return 0
        terminal.show(terminal.scores_table(f"{run.method} on {data.info.name}", found["test"]))
        if self.shift:
            terminal.show(terminal.shift_table(found["shift"]))
        if unfamiliar:
            terminal.show(terminal.ood_table(**found["ood"]))
        return 0
