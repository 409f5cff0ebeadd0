"""The commands, each a class whose fields are its arguments and whose docstring is its help.

What is heavy is imported by the command that needs it: `--help` answers without torch.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, Suppress, UseAppendAction, arg

from plures.errors import PluresError
from plures.lab.options import METHOD_NAMES, unknown
from plures.lab.recipes import RECIPES, Recipe, get_recipe

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.experiments.jobs import Comparison
    from plures.lab.experiments.results import Column, Row

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
        from accelerate import PartialState

        from plures.lab import tables
        from plures.lab.display import duration
        from plures.lab.options import method_class, takes
        from plures.lab.train import train

        usual = usual_settings(self.recipe, self.method).members
        if self.settings.members != usual and not takes(method_class(self.method), "members"):
            raise PluresError(f"{self.method} has no members to count: leave out --members {self.settings.members}")
        run = self.run or Path("runs") / f"{self.recipe}-{self.method}-seed{self.settings.seed}"
        found = train(self.settings, self.method, run, settings=self.set, data_dir=self.data_dir, trackers=self.track)
        PartialState().destroy_process_group()  # threads that still run when the interpreter ends abort the process
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

    after_interrupt: ClassVar[str] = "what was measured so far stands in the folder of --out"

    def __call__(self) -> int:
        """Measure, showing each ratio as it is found."""
        from plures.lab.bench import suite

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
            _print_json({"machine": suite.machine(), "ratios": [asdict(one) | {"met": one.met} for one in found]})
        else:
            print(suite.markdown(found, costs))
        return 0


@dataclass(frozen=True)
class Compare:
    """Run methods side by side on one recipe and put them into one table, with the paper's figures beside ours.

    Examples:
      plures compare digits --seeds 3
      plures compare cifar10-cpu --methods deterministic orthogonal-dropout deep-ensemble --data-dir data
      plures compare cifar10-cpu --methods orthogonal-dropout orthogonal-dropout:granularity=kernel
      plures compare digits --epochs.train 10 --runs runs/short --on ray

    Runs that are missing are made, finished ones skipped, cut ones resumed, in RUNS/RECIPE/METHOD/seed-N. The table
    goes to RUNS/RECIPE as results.md, results.csv and results.json. Each run takes one core (or one GPU), several go on
    at a time. Numbers of the recipe can be overridden as for `plures train`; methods that need longer still get longer.
    The table holds the methods of this command; `plures report RUNS/RECIPE` shows all finished runs.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """Where all numbers come from, unless given below; `plures recipes` lists them."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD[:NAME=VALUE,...]")] = ()
    """Which methods, each with its options if it needs others than usual; all if none is named."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """Run every method so many times, with the seeds 0, 1, ..."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder of all runs."""
    jobs: Annotated[int | None, arg(metavar="N")] = None
    """How many runs go on at a time; if not given, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where runs are made: here, or by the workers of a Ray cluster that sees the same folders."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    json: Switch = False
    """Print the results as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)

    after_interrupt: ClassVar[str] = "the same command goes on, and repeats no finished run"

    def __call__(self) -> int:
        """Run what is missing, and show the table."""
        from plures.lab.experiments import write
        from plures.lab.experiments.compare import compare
        from plures.lab.experiments.jobs import Comparison, variants
        from plures.lab.experiments.results import columns

        if self.seeds < 1:
            raise PluresError(f"--seeds {self.seeds}: at least one is needed")
        seeds = tuple(range(self.settings.seed, self.settings.seed + self.seeds))
        members = self.settings.members if self.settings.members != get_recipe(self.recipe).members else None
        comparison = Comparison(self.recipe, self.settings, variants(self.methods), seeds, members=members)
        folder = write.writable(self.runs / self.recipe)
        (rows,) = compare([comparison], self.runs, at_once=self.jobs, data_dir=self.data_dir, on=self.on)
        chosen = columns(rows)
        paths = write.write(folder, "results", rows, chosen, write.about(rows))
        _tell_failures(rows)
        if self.json:
            _print_json(write.document(rows, write.about(rows)))
        else:
            _show_comparison(f"{self.recipe}: {self.settings.data}, {self.settings.model}", rows, chosen, paths)
        return 2 if any(row.failures for row in rows) else 0


@dataclass(frozen=True)
class Reproduce:
    """Make a table or figure of the paper: at full scale for GPUs, or at one that two cores finish.

    Examples:
      plures reproduce table3 --scale digits
      plures reproduce table1 --scale cpu --data-dir data --recipes cifar10-cpu
      plures reproduce table1 --scale paper --dry-run       what it would take here, without running it
      plures reproduce figure2 --scale digits

    table1: all methods on four data sets; table2: the same with wide ResNets; table3: what each part contributes;
    figure1: the accuracy of each member; figure2: quality against the number of members; figure3: the same with MIMO.
    Runs live in RUNS/RECIPE/METHOD/seed-N: tables and figures share them, and `plures compare` does, too. Tables are
    written to OUT as Markdown, CSV and JSON, figures as PDF, PNG and SVG.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """table1, table2, table3, figure1, figure2 or figure3."""
    scale: Literal["paper", "cpu", "digits"] = "digits"
    """The paper's settings, small versions for two cores, or embedded digits."""
    recipes: Annotated[tuple[str, ...], arg(metavar="RECIPE")] = ()
    """Only these of the recipes that the scale has."""
    seeds: Annotated[int | None, arg(metavar="N")] = None
    """Run every method so many times; if not given, 3 at the scale paper, 1 at cpu, 2 at digits."""
    dry_run: Switch = False
    """Only print the plan: runs, epochs, estimated time here, disk."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder of all runs."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where tables and figures are written."""
    jobs: Annotated[int | None, arg(metavar="N")] = None
    """How many runs go on at a time; if not given, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where runs are made: here, or by the workers of a Ray cluster that sees the same folders."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    json: Switch = False
    """Print the results as JSON."""

    after_interrupt: ClassVar[str] = "the same command goes on, and repeats no finished run"

    def __call__(self) -> int:
        """Run what is missing, and write the table or draw the figure."""
        from plures.lab.experiments.reproduce import TARGETS

        if self.target not in TARGETS:
            raise unknown("table or figure", self.target, TARGETS)
        comparisons = TARGETS[self.target].comparisons(self.scale, self.seeds, self.recipes)
        return self._plan(comparisons) if self.dry_run else self._make(comparisons)

    def _plan(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab import tables
        from plures.lab.experiments.execute import default_jobs
        from plures.lab.experiments.plan import plan_table, planned

        lines = []
        for comparison in comparisons:
            print(f"measuring {comparison.name}", file=sys.stderr)
            lines += list(planned(comparison, self.runs))
        at_once = self.jobs or default_jobs()
        if self.json:
            _print_json({"target": self.target, "scale": self.scale, "plan": [asdict(line) for line in lines]})
        else:
            tables.show(plan_table(f"{self.target} at the scale {self.scale}", lines, at_once))
        return 0

    def _make(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab.experiments import write
        from plures.lab.experiments.compare import compare
        from plures.lab.experiments.draw import draw
        from plures.lab.experiments.reproduce import TARGETS

        folder = write.writable(self.out)
        found = compare(comparisons, self.runs, at_once=self.jobs, data_dir=self.data_dir, on=self.on)
        target = TARGETS[self.target]
        documents = {}
        for comparison, rows in zip(comparisons, found, strict=True):
            chosen = target.columns(rows)
            about = write.about(rows) | target.notes
            paths = write.write(folder, f"{self.target}-{comparison.name}", rows, chosen, about)
            documents[comparison.name] = write.document(rows, about)
            _tell_failures(rows)
            if not self.json:
                _show_comparison(f"{self.target}, {comparison.name}", rows, chosen, paths)
        if self.json:
            _print_json({"target": self.target, "scale": self.scale, "tables": documents})
        if self.target.startswith("figure"):
            pairs = list(zip(comparisons, found, strict=True))
            drawn = draw(self.target, pairs, self.out / f"{self.target}-{self.scale}", self.data_dir)
            print(f"drawn: {', '.join(map(str, drawn))}", file=sys.stderr)
        return 2 if any(row.failures for rows in found for row in rows) else 0


@dataclass(frozen=True)
class Report:
    """Make one self-contained HTML page of finished runs: tables, calibration, members, doubtful images, mistakes.

    Examples:
      plures report runs/digits
      plures report runs/cifar10-cpu/deep-ensemble/seed-0 runs/cifar10-cpu/orthogonal-dropout/seed-0 --out report.html

    Folders are run folders or hold them at any depth. Runs that differ in their seed only are one row; details show
    the first of them. The page needs no network and no script, and can be sent to anybody.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """Run folders, or folders that hold them."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """Where the page is written."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Write the page, and say where."""
        from plures.lab.experiments.costs import with_costs
        from plures.lab.experiments.results import rows_of
        from plures.lab.report import write_report

        if not self.runs:
            raise PluresError("there are no runs to report on: name run folders, or folders that hold them")
        with_costs(rows_of(self.runs))
        words = " ".join(shlex.quote(str(run)) for run in self.runs)
        print(write_report(self.runs, self.out, data_dir=self.data_dir, command=f"plures report {words}"))
        return 0


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "compare": Compare,
    "reproduce": Reproduce,
    "report": Report,
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


def _show_comparison(title: str, rows: "Sequence[Row]", columns: "Sequence[Column]", paths: Sequence[Path]) -> None:
    """Show a table with its legend and where it was written."""
    from plures.lab import tables
    from plures.lab.experiments import write

    tables.show(write.table(title, rows, columns), write.legend(rows), f"written: {', '.join(map(str, paths))}")


def _tell_failures(rows: "Sequence[Row]") -> None:
    for row in rows:
        for failure in row.failures:
            print(f"plures: {row.name} failed with {failure}", file=sys.stderr)


def _measured() -> dict[str, float | None]:
    from plures.lab.cost import estimate

    seconds: dict[str, float | None] = {}
    for name, recipe in RECIPES.items():
        print(f"measuring {name}", file=sys.stderr)
        found = estimate(recipe)
        seconds[name] = None if found is None else found.seconds
    return seconds


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
