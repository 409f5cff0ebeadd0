"""plures predict: the predictions of a finished run for image files."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from plures.errors import PluresError
from plures.lab.cli.shared import Switch, print_json


@dataclass(frozen=True)
class Predict:
    """Predict images: label, confidence, uncertainty, votes.

    Examples:
      plures predict runs/birds wren.jpg robin.png
      plures predict runs/birds photographs --abstain-below 0.8 --json
      plures predict runs/birds wren.jpg --coverage 0.9 --risk 0.05

    How images are read:
      They are prepared like the training images: rotated upright, converted
      to grey or colour, resized and cropped to the centre. If the training
      images did not need a change, it is reported. If a file cannot be
      read, the reason is printed, the others are predicted, and the exit code
      is 2. Uncertainty is in nats; epistemic uncertainty is 0 if all members
      agree.

    Guarantees:
      --coverage and --risk hold for images from the same distribution as the
      validation images that the run was calibrated on (conformal prediction;
      selection with bounded risk, with a probability of 95 %). If there are
      too few validation images, an error says so.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE", help_behavior_hint="(one or more)")]
    """PNG, JPEG or other image files, or folders of them."""
    abstain_below: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Abstain from a label if the confidence is lower."""
    coverage: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Print a set of classes that contains the true class with this probability."""
    risk: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Abstain so often that at most this share of the remaining labels is wrong."""
    trust_code: Switch = False
    """Import the code from outside plures that the run names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Predict, and show the votes of the members."""
        from plures.lab import terminal
        from plures.lab.evaluation.evaluate import engine_of, fastest
        from plures.lab.evaluation.predict import Failure, ImagePrediction, Wanted, predict_files
        from plures.lab.runs.open import open_run

        if not self.images:
            raise PluresError("there are no images to predict: give files or folders after the run")
        run = open_run(self.run, trust_code=self.trust_code)
        predictor = fastest(run.ensemble)
        engine, wanted = engine_of(predictor), Wanted(self.abstain_below, self.coverage, self.risk)
        results = list(predict_files(run, self.images, wanted, predictor))
        answers = [result for result in results if isinstance(result, ImagePrediction)]
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures:
            print(f"plures: {failure.error}", file=sys.stderr)
        if self.json:
            found = {"predictions": [asdict(one) for one in answers], "failed": [asdict(one) for one in failures]}
            print_json(found | {"engine": engine})
        elif answers:
            terminal.show(terminal.answers_table(answers), *([] if engine is None else [f"engine: {engine}"]))
        return 2 if failures else 0
