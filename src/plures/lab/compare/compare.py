"""Train the runs of comparisons, skip finished ones, and collect the results into rows.

Each run is a process of its own that executes `plures train`, on this machine or on a Ray cluster: one that breaks
takes no other along. What it prints is in output.txt in the run folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from plures.errors import PluresError, visible
from plures.lab.compare import Comparison, Job, unique
from plures.lab.compare.rows import Finished, Row, make_rows, with_trust
from plures.lab.method_names import method_class
from plures.lab.recipes import Epochs, Recipe
from plures.lab.runs.config import differences, train_words
from plures.lab.runs.folder import RunFolder, other_settings
from plures.lab.runs.open import data_for, ensemble_for, network_for
from plures.progress import duration

Where = Literal["here", "ray"]
# Executes `plures` with some words, writes what it prints to a file, and has one of the places for runs at a time.
Start = Callable[[Sequence[str], Path, int], "Child | Task"]

TICK = 0.2  # seconds between looks at the processes
GRACE = 10  # seconds that a process has to end before it is killed
PAUSE = 60.0  # seconds between plain lines about the runs in progress
SHOWN = 12  # runs that the list of those in progress has room for
OUTPUT = "output.txt"  # what the process of a run printed, in its run folder
# One thread per run; output as it is printed, as plain lines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}


def compare(
    comparisons: Sequence[Comparison],
    runs: Path,
    *,
    at_once: int | None = None,
    data_dir: Path | None = None,
    on: Where = "here",
    shift: bool = False,
    ood: str | None = None,
) -> list[list[Row]]:
    """Train the missing runs of comparisons and return the rows of each.

    Finished runs are not trained again, and interrupted ones are resumed. Missing data is reported before anything is
    trained. A run that fails does not stop the others: its row has the reason. With `shift` and `ood`, runs are also
    measured on corrupted and on other images; the results are kept in the run folders.
    """
    failures = make_runs(unique(job for one in comparisons for job in one.jobs(runs)), at_once, data_dir, on)
    tables = [_rows(one, runs, failures) for one in comparisons]
    if shift or ood:
        print("measuring under shift and among other data", file=sys.stderr)
        tables = [with_trust(rows, data_dir, shift=shift, ood=ood) for rows in tables]
    return tables


def make_runs(jobs: Sequence[Job], at_once: int | None, data_dir: Path | None, on: Where) -> dict[Path, str]:
    """Train the runs that are missing, and return the reasons of those that failed, by run folder."""
    if at_once is not None and at_once < 1:
        raise PluresError(f"--jobs {at_once}: at least one is needed")
    for job in jobs:
        refuse_others(job)
    missing = [job for job in jobs if not is_done(job)]
    for recipe in dict.fromkeys(replace(job.recipe, epochs=Epochs(), members=1) for job in missing):
        # Decoded here, once, before several processes need them; and missing data are reported before hours of work.
        data_for(recipe, data_dir)
    print(f"{len(jobs)} runs: {len(jobs) - len(missing)} done before, {len(missing)} to train", file=sys.stderr)
    if not missing:
        return {}
    with launcher_for(on, at_once) as (start, count), RunsDisplay(len(missing)) as display:
        return run_all(missing, start, count, data_dir, display)


def planned(comparison: Comparison, runs: Path) -> list[dict[str, Any]]:
    """Count the runs, stages and epochs of each variant; nothing is trained or measured."""
    jobs = comparison.jobs(runs)
    lines = []
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        missing = sum(not is_done(job) for job in own)
        recipe = own[0].recipe
        # The stages follow from the method and its members, so the network may be a small one.
        small = Recipe(model="resnet8", width=64, members=recipe.members)
        network = network_for(small, classes=2, channels=1, size=8)
        phases = [step.phase for step in ensemble_for(small, variant.method, variant.settings, network).plan()]
        counts = {"runs": len(own), "done": len(own) - missing, "stages": len(phases) * missing}
        epochs = sum(map(recipe.epochs.of, phases)) * missing
        lines.append({"recipe": comparison.name, "variant": variant.name, **counts, "epochs": epochs})
    return lines


def refuse_others(job: Job) -> None:
    """Raise an error if the method is unknown, or if the run folder has a run with other settings."""
    method = method_class(job.variant.method).__name__
    if not (job.run / "config.json").is_file():
        return
    before = RunFolder(job.run).config()
    # The options follow from the network.
    now = {"recipe": job.recipe.as_json(), "method": method, "options": before["options"]}
    if differing := differences({key: before[key] for key in now}, now):
        raise other_settings(job.run, differing, "choose another folder with --runs, or the old settings")


def _rows(comparison: Comparison, runs: Path, failures: Mapping[Path, str]) -> list[Row]:
    rows = []
    jobs = comparison.jobs(runs)
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        finished = tuple(Finished.read(job.run) for job in own if job.run not in failures)
        failed = tuple(f"seed {job.recipe.seed}: {failures[job.run]}" for job in own if job.run in failures)
        rows.append(Row(variant.name, finished, paper=comparison.paper.get(variant.name), failures=failed))
    if not any(row.runs for row in rows):
        raise PluresError(f"all runs of {comparison.name} failed: {next(iter(rows[0].failures), 'there is none')}")
    return make_rows(rows)


def run_all(
    jobs: Sequence[Job], start: Start, at_once: int, data_dir: Path | None, display: "RunsDisplay"
) -> dict[Path, str]:
    """Train all runs, `at_once` at a time, and return the reasons of those that failed, by run folder.

    A run that fails stops no other. If this process is interrupted or told to end, it ends its runs first.
    """
    failures: dict[Path, str] = {}
    waiting = list(reversed(jobs))
    running: dict[int, tuple[Job, Child | Task]] = {}

    def ended(job: Job, reason: str | None) -> None:
        if reason is not None:
            failures[job.run] = reason
        display.ended(job, reason)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals]
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop()
                place = min(set(range(at_once)) - running.keys())
                try:
                    running[place] = job, start(_prepared(job, data_dir), job.run / OUTPUT, place)
                except OSError as error:
                    ended(job, f"cannot work in {job.run}: {error.strerror}")
            for place, (job, process) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[place]
                    ended(job, None if is_done(job) else _reason(job, code))
            display.show([job for job, _ in running.values()])
            time.sleep(TICK if running else 0)
    finally:
        for _, process in running.values():
            process.end()
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return failures


def _prepared(job: Job, data_dir: Path | None) -> list[str]:
    """Make the folder of a run, and return the words of its command."""
    job.run.mkdir(parents=True, exist_ok=True)
    (job.run / OUTPUT).write_bytes(b"")  # what an earlier attempt printed must not be taken for this one's words
    words = train_words(job.recipe.as_json(), job.variant.method, job.variant.settings, job.run, job.recipe_name)
    return [*words, *([] if data_dir is None else ["--data-dir", str(data_dir)])]


def is_done(job: Job) -> bool:
    """Return whether a run is trained and measured."""
    return RunFolder(job.run).finished and (job.run / "metrics.json").is_file()


def _last_line(job: Job) -> str:
    """Return the last line that a run has printed; empty if there is none."""
    with contextlib.suppress(OSError):
        lines = (job.run / OUTPUT).read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def _reason(job: Job, code: int | str) -> str:
    """Return one line about the failure."""
    if isinstance(code, str):
        return code
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"its process was ended by {known.get(-code, f'signal {-code}')}"
    if code == 0:
        return f"nothing arrived in {job.run}: all machines must see the same folder"
    sentence, prefix = _last_line(job), "plures: "
    if sentence.startswith(prefix):
        return sentence.removeprefix(prefix)
    return f"{sentence or f'its process ended with code {code}'} (see {job.run / OUTPUT})"


class Child(subprocess.Popen[bytes]):
    """A process of `plures` with a process group of its own: whatever it starts ends with it."""

    def __init__(self, words: Sequence[str], output: Path, environment: Mapping[str, str], folder: str = ".") -> None:
        with output.open("ab") as file:
            super().__init__(
                [sys.executable, "-m", "plures", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                cwd=folder,
                process_group=0,
            )

    def end(self) -> None:
        """End the whole group, and wait until it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(GRACE)
                return


@dataclass(frozen=True)
class Task:
    """A run on a worker of Ray."""

    ray: Any
    reference: Any

    def poll(self) -> int | str | None:
        """Return None while it is being trained, then its exit code, or why there is none."""
        done, _ = self.ray.wait([self.reference], timeout=0)
        try:
            return int(self.ray.get(self.reference)) if done else None
        except Exception as error:
            return f"its worker was lost: {type(error).__name__} {error}".strip().splitlines()[0]

    def end(self) -> None:
        """End it, and wait until it has ended."""
        self.ray.cancel(self.reference)
        self.ray.wait([self.reference], timeout=GRACE)


def start_here(words: Sequence[str], output: Path, place: int) -> Child:
    """Start a process on this machine.

    Each run has one core, however many are trained at a time, so that the result does not depend on it. With CUDA, each
    has one GPU.
    """
    gpu = {}
    if torch.cuda.is_available():
        every = ",".join(map(str, range(torch.cuda.device_count())))
        devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")
        gpu = {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]}
    return Child(words, output, ENVIRONMENT | gpu)


@contextlib.contextmanager
def launcher_for(on: Where, at_once: int | None) -> Iterator[tuple[Start, int]]:
    """Open the place where runs are trained: how to start one, and how many to train at a time.

    Ray joins the cluster that this machine is part of, or else starts a local one. All machines must have plures
    installed and see the same folders. Without a number, there is one run for each GPU, or for each core without GPUs.
    """
    if on == "here":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Accelerators that are not CUDA are one device that all would share.
        yield start_here, at_once or (max(1, torch.cuda.device_count()) if torch.accelerator.is_available() else cores)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise PluresError("--on ray needs Ray, which is not installed: pip install 'plures[cluster]'") from None
    try:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # a plain one after half a minute, if the machine is too busy
            reason = str(error).partition("\n")[0]
            raise PluresError(f"Ray did not start ({reason}): try again, or leave --on ray out") from error
        found = ray.cluster_resources()
        gpus = int(found.get("GPU", 0))
        task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(_execute)
        data = {"PLURES_DATA": os.environ["PLURES_DATA"]} if "PLURES_DATA" in os.environ else {}

        def start(words: Sequence[str], output: Path, _place: int) -> Task:
            return Task(ray, task.remote(words, output.absolute(), ENVIRONMENT | data, str(Path.cwd())))

        yield start, at_once or gpus or int(found["CPU"])
    finally:
        ray.shutdown()


def _execute(words: Sequence[str], output: Path, environment: Mapping[str, str], folder: str) -> int:
    """Execute a command in a worker of Ray, where relative paths mean what they meant to the caller."""
    child = Child(words, output, environment, folder)
    try:
        return child.wait()
    finally:  # cancelling the task raises an interrupt here
        child.end()


class RunsDisplay(Live):
    """Show how far the runs are, by the last line of each: live on a terminal, once a minute elsewhere."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: Sequence[Job] = ()
        self._ended = 0
        self._last_line = time.monotonic()
        super().__init__(console=Console(stderr=True, highlight=False), refresh_per_second=1, transient=True)

    def show(self, running: Sequence[Job]) -> None:
        """Show the runs in progress."""
        self._running = running
        if not self.console.is_terminal and time.monotonic() - self._last_line >= PAUSE:
            self._last_line = time.monotonic()
            self.console.print(self.get_renderable(), soft_wrap=True)

    def ended(self, job: Job, reason: str | None) -> None:
        """Show the result of a run, or why it failed."""
        self._ended += 1
        result = f"failed: {reason}"
        if reason is None:
            found = RunFolder(job.run).metrics()
            took = duration(found["seconds"])
            result = f"accuracy {found['accuracy']:.1%}, NLL {found['nll']:.3f}, trained in {took}"
        self.console.print(Text(visible(f"[{self._ended}/{self._count}] {job.name}: {result}")), soft_wrap=True)

    def get_renderable(self) -> RenderableType:
        """Return two lines for each run in progress, and how many are done."""
        shown = [
            Text(visible(line), style, overflow="fold")
            for job in self._running[:SHOWN]
            for line, style in ((job.name, ""), (f"  {_last_line(job) or 'starting'}", "dim"))
        ]
        return Group(*shown, Text(f"{self._ended} of {self._count} runs are done"))
