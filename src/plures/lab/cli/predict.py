"""plures predict: what a finished run says of picture files."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from plures.errors import PluresError
from plures.lab.cli.shared import Switch, print_json


@dataclass(frozen=True)
class Predict:
    """Predict pictures: label, confidence, uncertainty, votes.

    Examples:
      plures predict runs/birds wren.jpg robin.png
      plures predict runs/birds photographs --abstain-below 0.8 --json
      plures predict runs/birds wren.jpg --coverage 0.9 --risk 0.05

    How pictures are read:
      They are prepared as the training images were: upright, grey or colour,
      brought to their size and cut to the middle; where the training images
      needed no such change, it is reported. A file that cannot be read is named
      with the reason; the others are predicted, and the exit code is 2.
      Uncertainty is in nats: 0 where all members agree.

    What is promised:
      --coverage and --risk hold for pictures like the validation images that
      the run was calibrated on (conformal prediction; selection with bounded
      risk, with a probability of 95 %). Too few of them are told.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
    """PNG, JPEG or other pictures, or folders of them."""
    abstain_below: Annotated[float | None, arg(metavar="P")] = None
    """Give no label where the confidence lies below."""
    coverage: Annotated[float | None, arg(metavar="P")] = None
    """Give the set of classes that holds the true one with this probability."""
    risk: Annotated[float | None, arg(metavar="P")] = None
    """Give labels of which at most this share is wrong, and none where that cannot be promised."""
    trust_code: Switch = False
    """Run the code that a folder of somebody else names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Predict, and show what the members think."""
        from plures.lab import tables
        from plures.lab.evaluation.predict import Answer, Failure, Wanted, predict_files
        from plures.lab.runs.open import open_run

        if not self.images:
            raise PluresError("there are no images to predict: name files or folders after the run")
        run = open_run(self.run, trust_code=self.trust_code)
        run.need_pictures("plures predict")
        results = list(predict_files(run, self.images, Wanted(self.abstain_below, self.coverage, self.risk)))
        answers = [result for result in results if isinstance(result, Answer)]
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures:
            print(f"plures: {failure.error}", file=sys.stderr)
        if self.json:
            print_json({"predictions": [asdict(one) for one in answers], "failed": [asdict(one) for one in failures]})
        elif answers:
            tables.show(tables.answers_table(answers))
        return 2 if failures else 0
