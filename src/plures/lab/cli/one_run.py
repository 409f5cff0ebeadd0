"""Commands for one run: train, evaluate, predict."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, UseAppendAction, arg

from plures.errors import PluresError
from plures.lab.cli.shared import DataDir, Settings, Switch, print_json, usual_settings
from plures.lab.methods import METHOD_NAMES


@dataclass(frozen=True)
class Train:
    """Train one ensemble into a run folder and measure it on the test images; run again to resume.

    Examples:
      plures train                                              orthogonal dropout on digits, about a minute
      plures train digits --method deep-ensemble --members 3
      plures train cifar10-cpu --data-dir data --set granularity=kernel
      plures train cifar10-cpu --data ./birds --size 32 --validation 0.1 --run runs/birds
      accelerate launch --num_processes 2 -m plures train cifar10

    Written into the run folder: config.json (everything that decides about the result, and versions), log.jsonl (a
    record per epoch), ensemble.safetensors (the trained ensemble) and metrics.json. Nothing is lost when the machine
    stops: the same command goes on after the last epoch and ends with the same bits.

    A folder of your own, such as ./birds above, holds pictures in train/CLASS/ and test/CLASS/, or in CLASS/ alone: a
    fifth of each class is then held out to test on. It may also hold train.parquet and test.parquet, as on the hub.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """Where all numbers come from, unless given below; `plures recipes` lists them."""
    method: Annotated[str, arg(metavar="METHOD", help=f"One of {', '.join(METHOD_NAMES)}.")] = "orthogonal-dropout"
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """An option of the method; an unknown name is answered with all that the method has."""
    run: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """The run folder; if not given, runs/RECIPE-METHOD-seedN."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TRACKER")] = ()
    """A tracker to send the log to, such as tensorboard, wandb or mlflow."""
    json: Switch = False
    """Print the metrics as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)

    after_interrupt: ClassVar[str] = "the same command goes on after the last finished epoch"

    def __call__(self) -> int:
        """Train, and show what came out."""
        from accelerate import PartialState

        from plures.lab import tables
        from plures.lab.methods import method_class, takes
        from plures.lab.training.progress import duration
        from plures.lab.training.train import train

        usual = usual_settings(self.recipe, self.method).members
        if self.settings.members != usual and not takes(method_class(self.method), "members"):
            raise PluresError(f"{self.method} has no members to count: leave out --members {self.settings.members}")
        run = self.run or Path("runs") / f"{self.recipe}-{self.method}-seed{self.settings.seed}"
        found = train(self.settings, self.method, run, settings=self.set, data_dir=self.data_dir, trackers=self.track)
        PartialState().destroy_process_group()  # threads that still run when the interpreter ends abort the process
        if found and self.json:
            print_json({"run": str(run), "test": found})
        elif found:
            tables.show(tables.scores_table(f"{self.method} on {self.settings.data}", found))
            tables.show(f"in {run}, trained in {duration(found['seconds'])}, {found['bytes']:,} bytes")
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Measure a finished run: accuracy, calibration, diversity; away from home with --shift and --ood.

    Examples:
      plures evaluate runs/digits-orthogonal-dropout-seed0 --shift
      plures evaluate runs/cifar10-cpu-deep-ensemble-seed0 --data-dir data --ood svhn --json

    The test images are measured; the temperature of the calibrated NLL is fitted on the validation images. --shift
    spoils the test images by noise, blur and lost contrast, the same way each time. --ood brings other data to the size
    and colours of the run and asks whether uncertainty tells them from the run's own. Nothing is written.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    shift: Switch = False
    """Measure under corruptions, too."""
    ood: Annotated[str | None, arg(metavar="DATA")] = None
    """Other data, to be recognised as unfamiliar: a name, a folder or a hub id."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Measure, and show what came out."""
        from plures.lab import tables
        from plures.lab.data import open_data
        from plures.lab.evaluation.evaluate import evaluate, evaluate_ood, evaluate_shift
        from plures.lab.runs.open import open_run

        run = open_run(self.run)
        data = run.data(self.data_dir)
        unfamiliar = open_data(self.ood, data_dir=self.data_dir, like=data.info) if self.ood else None
        found: dict[str, Any] = {"run": str(self.run), "test": evaluate(run.ensemble, data)}
        if self.shift:
            found["shift"] = evaluate_shift(run.ensemble, data)
        if unfamiliar:
            found["ood"] = {"data": self.ood, "scores": evaluate_ood(run.ensemble, data, unfamiliar)}
        if self.json:
            print_json(found)
            return 0
        tables.show(tables.scores_table(f"{run.method} on {data.info.name}", found["test"]))
        if self.shift:
            tables.show(tables.shift_table(found["shift"]))
        if unfamiliar:
            tables.show(tables.ood_table(**found["ood"]))
        return 0


@dataclass(frozen=True)
class Predict:
    """Predict pictures: label, confidence, epistemic uncertainty, and what each member thinks.

    Examples:
      plures predict runs/birds wren.jpg robin.png
      plures predict runs/birds photographs --abstain-below 0.8 --json

    Pictures are prepared as the training images were: upright, grey or colour, brought to their size and cut to the
    middle; where the training images needed no such change, it is told. A file that cannot be read is named with the
    reason; the others are predicted, and the exit code is 2. Uncertainty is in nats: 0 where all members agree.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
    """PNG, JPEG or other pictures, or folders of them."""
    abstain_below: Annotated[float | None, arg(metavar="P")] = None
    """Give no label where the confidence lies below."""
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
        results = list(predict_files(open_run(self.run), self.images, self.abstain_below))
        answers = [result for result in results if isinstance(result, Answer)]
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures:
            print(f"plures: {failure.error}", file=sys.stderr)
        if self.json:
            print_json({"predictions": [asdict(one) for one in answers], "failed": [asdict(one) for one in failures]})
        elif answers:
            tables.show(tables.answers_table(answers))
        return 2 if failures else 0
