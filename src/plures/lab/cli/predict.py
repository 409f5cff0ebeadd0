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

    How pictures are read:
      They are prepared as the training images were: upright, grey or colour,
      brought to their size and cut to the middle; where the training images
      needed no such change, it is reported. A file that cannot be read is named
      with the reason; the others are predicted, and the exit code is 2.
      Uncertainty is in nats: 0 where all members agree.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
    """PNG, JPEG or other pictures, or folders of them."""
    abstain_below: Annotated[float | None, arg(metavar="P")] = None
    """Give no label where the confidence lies below."""
    trust_code: Switch = False
    """Run the code that a folder of somebody else names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Predict, and show what the members think."""
        from plures.lab import tables
        from plures.lab.evaluation.predict import Answer, Failure, predict_files
        from plures.lab.runs.open import open_run

        if not self.images:
            raise PluresError("there are no images to predict: name files or folders after the run")
        run = open_run(self.run, trust_code=self.trust_code)
        results = list(predict_files(run, self.images, self.abstain_below))
        answers = [result for result in results if isinstance(result, Answer)]
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures:
            print(f"plures: {failure.error}", file=sys.stderr)
        if self.json:
            print_json({"predictions": [asdict(one) for one in answers], "failed": [asdict(one) for one in failures]})
        elif answers:
            tables.show(tables.answers_table(answers))
        return 2 if failures else 0
