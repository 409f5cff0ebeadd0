"""Commands for finished runs: evaluate, predict, export, serve, report."""

import shlex
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from plures.checks import whole_number
from plures.errors import PluresError, visible
from plures.files import check_place
from plures.lab.cli.shared import Command, DataDir, Json, RunPath, Switch, TrustCode, print_json
from plures.lab.serving import Limits


@dataclass(frozen=True)
class Evaluate(Command):
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

    run: RunPath
    shift: Switch = False
    """Also measure on corrupted images."""
    ood: Annotated[str | None, arg(metavar="NAME|FOLDER|ID", help_behavior_hint="")] = None
    """Out-of-distribution data: a name, a folder or a hub id."""
    data_dir: DataDir = None
    trust_code: TrustCode = False
    json: Json = False

    def __call__(self) -> int:
        """Measure, and show the result."""
        from plures.lab import terminal
        from plures.lab.data import open_data
        from plures.lab.evaluation import evaluate as measure
        from plures.lab.runs.open import open_run

        run = open_run(self.run, trust_code=self.trust_code)
        data = run.data(self.data_dir)
        unfamiliar = open_data(self.ood, data_dir=self.data_dir, like=data.info) if self.ood else None
        predictor = measure.fastest(run.ensemble)
        tested = measure.predictions(run.ensemble, data.test, predictor=predictor)
        found: dict[str, Any] = {"run": str(self.run), "test": measure.evaluate(run.ensemble, data, predictor, tested)}
        if self.shift:
            found["shift"] = measure.evaluate_shift(run.ensemble, data, predictor, partial(print, file=sys.stderr))
        if unfamiliar:
            some = measure.evenly(unfamiliar.test, measure.OTHER_IMAGES)
            outside, _ = measure.predictions(run.ensemble, some, predictor=predictor)
            found["ood"] = {"data": self.ood, "scores": measure.told_apart(tested[0], outside)}
        if self.json:
            print_json(found)
            return 0
        terminal.show(terminal.scores_table(f"{run.method} on {data.info.name}", found["test"]))
        if self.shift:
            terminal.show(terminal.shift_table(found["shift"]))
        if unfamiliar:
            terminal.show(terminal.ood_table(**found["ood"]))
        return 0


@dataclass(frozen=True)
class Predict(Command):
    """Predict images: label, confidence, uncertainty, votes.

    Examples:
      plures predict runs/birds wren.jpg robin.png
      plures predict runs/birds photographs --abstain-below 0.8 --json
      plures predict runs/birds wren.jpg --coverage 0.9 --risk 0.05

    How images are read:
      They are prepared like the training images: rotated upright, converted
      to grey or colour, resized and cropped to the centre. A change that the
      training images did not need is reported. If a file cannot be read, the
      reason is printed, the others are predicted, and the exit code is 2.
      Uncertainty is in nats; epistemic uncertainty is 0 if all members agree.

    Guarantees:
      --coverage and --risk hold for images from the same distribution as the
      validation images that the run was calibrated on (conformal prediction;
      selection with bounded risk, with a probability of 95 %). If there are
      too few validation images, an error says so.
    """

    run: RunPath
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE", help_behavior_hint="(one or more)")]
    """PNG, JPEG or other image files, or folders of them."""
    abstain_below: Annotated[float | None, arg(metavar="PROBABILITY", help_behavior_hint="")] = None
    """Abstain from a label if the confidence is lower."""
    coverage: Annotated[float | None, arg(metavar="PROBABILITY", help_behavior_hint="")] = None
    """Print a set of classes that contains the true class with this probability."""
    risk: Annotated[float | None, arg(metavar="PROBABILITY", help_behavior_hint="")] = None
    """Abstain so often that at most this share of the remaining labels is wrong."""
    trust_code: TrustCode = False
    json: Json = False

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


@dataclass(frozen=True)
class Export(Command):
    """Export a run to one file that runs without plures: ONNX, pt2.

    Examples:
      plures export runs/birds birds.onnx
      plures export runs/birds birds.pt2

    What the file does:
      It takes uint8 pixels [images, height, width, channels] of the size that
      the network takes, and normalises them. It returns probabilities, label,
      confidence, total, aleatoric, epistemic and members. Its metadata hold
      class names, preprocessing and provenance.
    """

    run: RunPath
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The file to write: .onnx, or .pt2 for torch.export.load."""
    trust_code: TrustCode = False

    def __call__(self) -> int:
        """Export, and print the size of the file and its calibration."""
        from plures.lab.runs.open import open_run

        check_place(self.file)
        run = open_run(self.run, trust_code=self.trust_code)
        print(f"{visible(str(self.file))}: {run.export(self.file).stat().st_size:,} bytes")
        print(run.ensemble.calibration.summary() if run.ensemble.calibration else "not calibrated")
        return 0


@dataclass(frozen=True)
class Serve(Command):
    """Serve a run over HTTP, with a page for trying it.

    Examples:
      plures serve runs/birds
      plures serve runs/birds --host 0.0.0.0 --port 8080 --queue 1000
      curl -F files=@wren.jpg http://127.0.0.1:8000/predict

    Requests and responses:
      POST /predict takes a form with image files and the options
      abstain_below, coverage and risk. It responds in the format of
      `plures predict --json`. GET / is the page, /openapi.json describes the
      API, /health and /metrics (Prometheus) are for monitoring. Images of
      simultaneous requests are predicted together. Ctrl-C or SIGTERM stops
      the server after running requests have finished.
    """

    run: RunPath
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 opens it to the network."""
    port: Annotated[int, arg(metavar="N")] = 8000
    """The port to listen on."""
    limits: Annotated[Limits, arg(name="")] = field(default_factory=Limits)
    trust_code: TrustCode = False

    after_interrupt: ClassVar[str] = "the server has stopped"

    def __call__(self) -> int:
        """Serve until interrupted."""
        whole_number("port", self.port, least=0, most=65535)
        try:
            from plures.lab.serving.app import serve
        except ModuleNotFoundError as error:
            raise PluresError(f"plures serve needs {error.name}: pip install 'plures[serve]'") from error
        from plures.lab.runs.open import open_run

        serve(open_run(self.run, trust_code=self.trust_code), self.host, self.port, self.limits)
        return 0


@dataclass(frozen=True)
class Report(Command):
    """Write one self-contained HTML page about finished runs.

    Examples:
      plures report runs/digits
      plures report runs/digits/mimo/seed-0 runs/first --out report.html

    What the page shows:
      Tables, calibration, members, uncertain images, mistakes. Folders are run
      folders, or contain them at any depth. Runs that differ only in their
      seed share one row; details show the first of them. The page works
      offline and without scripts. Metrics are read from the run folders, and the
      test images are predicted once per row.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN", help_behavior_hint="(one or more)")]
    """Run folders, or folders that contain them."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """The file to write."""
    data_dir: DataDir = None
    trust_code: TrustCode = False

    def __call__(self) -> int:
        """Write the page, and print its path."""
        from plures.lab.compare.rows import rows_of
        from plures.lab.report import write_report

        if not self.runs:
            raise PluresError("there are no runs to report on: give run folders, or folders that contain them")
        check_place(self.out, "; give another file with --out")
        rows = rows_of(self.runs)
        command = shlex.join(["plures", "report", *map(str, self.runs)])
        write_report(rows, self.out, data_dir=self.data_dir, command=command, trust_code=self.trust_code)
        print(visible(str(self.out)))
        return 0
