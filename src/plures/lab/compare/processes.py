"""Train runs in processes of their own: each executes `plures train`, on this machine or on a Ray cluster.

A run that breaks takes no other along. What its process prints is in output.txt in the run folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from plures.errors import PluresError, visible
from plures.lab.compare import Job
from plures.lab.runs.config import train_words
from plures.lab.runs.folder import RunFolder
from plures.lab.training.progress import duration

TICK = 0.2  # seconds between looks at the processes
GRACE = 10  # seconds that a process has to end before it is killed
PAUSE = 60.0  # seconds between plain lines about the runs in progress
SHOWN = 12  # runs that the live list has room for
OUTPUT = "output.txt"  # what the process of a run printed, in its run folder
# One thread per run; output as it is printed, as plain lines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}


class Started(Protocol):
    """A run that is being trained somewhere."""

    def poll(self) -> int | str | None:
        """Return None while it is being trained, then its exit code, or why there is none."""

    def end(self) -> None:
        """End it, and wait until it has ended."""


# Executes `plures` with some words, writes what it prints to a file, and has one of the places for runs at a time.
Start = Callable[[Sequence[str], Path, int], Started]


def run_all(
    jobs: Sequence[Job], start: Start, at_once: int, data_dir: Path | None, display: "RunsDisplay"
) -> dict[Path, str]:
    """Train all runs, `at_once` at a time, and return the reasons of those that failed, by run folder.

    A run that fails stops no other. If this process is interrupted or told to end, it ends its runs first.
    """
    failures: dict[Path, str] = {}
    waiting = list(reversed(jobs))
    running: dict[int, tuple[Job, Started]] = {}

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


def last_line(job: Job) -> str:
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
    sentence, prefix = last_line(job), "plures: "
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
        """End the whole group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(GRACE)
                return


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


def on_ray(at_once: int | None) -> tuple[Start, int]:
    """Join the Ray cluster that this machine is part of, or else a local one; return how to start runs on its workers.

    All machines must have plures installed and see the same folders. Without a number, one run is trained at a time for
    each GPU of the cluster, or for each core if it has no GPU.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise PluresError("--on ray needs Ray, which is not installed: pip install 'plures[cluster]'") from None
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:  # no cluster: make one of this machine's cores
            ray.init(num_cpus=at_once or default_jobs(), include_dashboard=False, **quiet)
    except Exception as error:  # it waits for its own processes for half a minute, then raises a plain Exception
        if "timed out" not in str(error):
            raise
        ray.shutdown()
        raise PluresError(
            "Ray did not start in half a minute: the machine may be too busy; try again, or leave --on ray out"
        ) from error
    found = ray.cluster_resources()
    gpus = int(found.get("GPU", 0))
    task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(_execute)
    data = {"PLURES_DATA": os.environ["PLURES_DATA"]} if "PLURES_DATA" in os.environ else {}

    def start(words: Sequence[str], output: Path, _place: int) -> Started:
        return _Task(ray, task.remote(words, output.absolute(), ENVIRONMENT | data, str(Path.cwd())))

    return start, at_once or gpus or int(found["CPU"])


@dataclass(frozen=True)
class _Task:
    ray: Any
    reference: Any

    def poll(self) -> int | str | None:
        done, _ = self.ray.wait([self.reference], timeout=0)
        try:
            return int(self.ray.get(self.reference)) if done else None
        except Exception as error:
            return f"its worker was lost: {type(error).__name__} {error}".strip().splitlines()[0]

    def end(self) -> None:
        self.ray.cancel(self.reference)
        self.ray.wait([self.reference], timeout=GRACE)


def _execute(words: Sequence[str], output: Path, environment: Mapping[str, str], folder: str) -> int:
    """Execute a command in a worker of Ray, where relative paths mean what they meant to the caller."""
    child = Child(words, output, environment, folder)
    try:
        return child.wait()
    finally:  # cancelling the task raises an interrupt here
        child.end()


@contextlib.contextmanager
def launcher_for(on: Literal["here", "ray"], at_once: int | None) -> Iterator[tuple[Start, int]]:
    """Open the place where runs are trained: how to start one, and how many to train at a time."""
    if on == "here":
        yield start_here, at_once or default_jobs()
        return
    start, count = on_ray(at_once)
    try:
        yield start, count
    finally:
        import_module("ray").shutdown()


def default_jobs() -> int:
    """Return how many runs to train at a time: one per GPU, or one per core."""
    if torch.accelerator.is_available():  # those that are not CUDA are one device that all would share
        return max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RunsDisplay(contextlib.AbstractContextManager["RunsDisplay"]):
    """Show how far the runs are, by the last line of each: a live list on a terminal, plain lines elsewhere."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._console = Console(stderr=True, highlight=False)
        self._running: Sequence[Job] = ()
        self._ended = 0
        self._last_line = time.monotonic()
        self._live = Live(get_renderable=self.lines, console=self._console, refresh_per_second=1, transient=True)

    def __enter__(self) -> "RunsDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._live.stop()

    def show(self, running: Sequence[Job]) -> None:
        """Show the runs in progress: on a terminal always, elsewhere once a minute."""
        self._running = running
        if not self._console.is_terminal and time.monotonic() - self._last_line >= PAUSE:
            self._last_line = time.monotonic()
            for job in running:
                self._print(f"{job.name}: {last_line(job) or 'starting'}")

    def ended(self, job: Job, reason: str | None) -> None:
        """Show the result of a run, or why it failed."""
        self._ended += 1
        result = f"failed: {reason}"
        if reason is None:
            found = RunFolder(job.run).metrics()
            took = duration(found["seconds"])
            result = f"accuracy {found['accuracy']:.1%}, NLL {found['nll']:.3f}, trained in {took}"
        self._print(f"[{self._ended}/{self._count}] {job.name}: {result}")

    def lines(self) -> RenderableType:
        """Return the live list: two lines for each run in progress, and how many are done."""
        shown = [
            Text(visible(line), style, overflow="fold")
            for job in self._running[:SHOWN]
            for line, style in ((job.name, ""), (f"  {last_line(job) or 'starting'}", "dim"))
        ]
        return Group(*shown, Text(f"{self._ended} of {self._count} runs are done"))

    def _print(self, words: str) -> None:
        self._console.print(Text(visible(words)), soft_wrap=True)
