"""The commands, each a class whose fields are its arguments and whose docstring is its help.

What is heavy is imported by the command that needs it: `--help` answers without torch.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, Suppress, UseAppendAction, arg

from plures.errors import PluresError
from plures.lab.options import METHOD_NAMES, unknown
from plures.lab.recipes import RECIPES, Recipe, get_recipe

DataDir = Annotated[Path | None, arg(metavar="DIR")]
Switch = FlagCreatePairsOff[bool]


class Command(Protocol):
    """What `main` needs of a command: the arguments are its fields, calling it gives the exit code."""

    after_interrupt: ClassVar[str]

    def __call__(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Settings(Recipe):
    """A recipe as the command line shows it: all fields but the description."""

    about: Annotated[str, Suppress] = ""


@dataclass(frozen=True)
class Train:
    """Train one ensemble into a run folder and measure it on the test images; run again to resume.

    Examples:
      plures train                                              orthogonal dropout on digits, about a minute
      plures train digits --method deep-ensemble --members 3
      plures train cifar10-cpu --data-dir data --set granularity=kernel
      plures train cifar10-cpu --data ./birds --size 32 --limit None --run runs/birds
      accelerate launch --num_processes 2 -m plures train cifar10

    Written into the run folder: config.json (everything that decides about the result, and versions), log.jsonl (a
    record per epoch), ensemble.safetensors (the trained ensemble) and metrics.json. Nothing is lost when the machine
    stops: the same command goes on after the last epoch and ends with the same bits.
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
        from plures.lab import tables
        from plures.lab.display import duration
        from plures.lab.options import method_class, takes
        from plures.lab.train import train

        usual = usual_settings(self.recipe, self.method).members
        if self.settings.members != usual and not takes(method_class(self.method), "members"):
            raise PluresError(f"{self.method} has no members to count: leave out --members {self.settings.members}")
        run = self.run or Path("runs") / f"{self.recipe}-{self.method}-seed{self.settings.seed}"
        found = train(self.settings, self.method, run, settings=self.set, data_dir=self.data_dir, trackers=self.track)
        if found and self.json:
            _print_json({"run": str(run), "test": found})
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
        from plures.lab.evaluate import evaluate, evaluate_ood, evaluate_shift
        from plures.lab.run import open_run

        run = open_run(self.run)
        data = run.data(self.data_dir)
        unfamiliar = open_data(self.ood, data_dir=self.data_dir, like=data.info) if self.ood else None
        found: dict[str, Any] = {"run": str(self.run), "test": evaluate(run.ensemble, data)}
        if self.shift:
            found["shift"] = evaluate_shift(run.ensemble, data)
        if unfamiliar:
            found["ood"] = {"data": self.ood, "scores": evaluate_ood(run.ensemble, data, unfamiliar)}
        if self.json:
            _print_json(found)
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

    Pictures are prepared as the training images were: upright, grey or colour, and where the recipe gives a size,
    brought to it and cut to the middle. A file that cannot be prepared so is named with the reason; the others are
    predicted, and the exit code is 2. Uncertainty is in nats: 0 where all members agree.
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
        from plures.lab.predict import Answer, Failure, predict_files
        from plures.lab.run import open_run

        if not self.images:
            raise PluresError("there are no images to predict: name files or folders after the run")
        results = list(predict_files(open_run(self.run), self.images, self.abstain_below))
        answers = [result for result in results if isinstance(result, Answer)]
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures:
            print(f"plures: {failure.error}", file=sys.stderr)
        if self.json:
            _print_json({"predictions": [asdict(one) for one in answers], "failed": [asdict(one) for one in failures]})
        elif answers:
            tables.show(tables.answers_table(answers))
        return 2 if failures else 0


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
            _print_json({name: one.as_json() | {"seconds": seconds.get(name)} for name, one in RECIPES.items()})
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

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Measure, showing each ratio as it is found."""
        from plures.lab.bench import suite

        found, costs = [], []
        for ratio in suite.ratios(self.quick, self.full):
            found.append(ratio)
            print(ratio, file=sys.stderr)
        for cost in () if self.quick else suite.costs():
            costs.append(cost)
            print(cost, file=sys.stderr)
        if self.out is not None:
            suite.write(self.out, found, costs)
        if self.json:
            _print_json({"machine": suite.machine(), "ratios": [asdict(one) | {"met": one.met} for one in found]})
        else:
            print(suite.markdown(found, costs))
        return 0


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "recipes": Recipes,
    "bench": Bench,
}


def usual_settings(recipe: str, method: str) -> Settings:
    """Give a recipe's numbers as they are usual for a method.

    usual_settings("cifar10", "mimo").members
    """
    if method not in METHOD_NAMES:
        raise unknown("method", method, METHOD_NAMES)
    usual = get_recipe(recipe).for_method(METHOD_NAMES[method])
    return Settings(**{one.name: getattr(usual, one.name) for one in fields(usual)})


def _measured() -> dict[str, float | None]:
    from plures.lab.cost import estimate

    seconds = {}
    for name, recipe in RECIPES.items():
        print(f"measuring {name}", file=sys.stderr)
        seconds[name] = estimate(recipe)
    return seconds


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
