"""Train runs in processes of their own: each executes `plures train`, on this machine or on a Ray cluster.

A run that breaks takes no other along. What its process prints is in output.txt in the run folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Protocol

import torch

from plures.errors import PluresError
from plures.lab.compare.jobs import Job
from plures.lab.compare.progress import OUTPUT, Attempt, RunsDisplay, Started
from plures.lab.runs.config import train_words
from plures.lab.runs.folder import RunFolder

TICK = 0.2  # seconds between looks at the processes
GRACE = 10  # seconds that a process has to end before it is killed


class Launcher(Protocol):
    """A place where runs are trained, a few at a time."""

    at_once: int

    def start(self, words: Sequence[str], output: Path) -> Started:
        """Execute `plures` with some words; append what it prints to a file."""


def run_all(jobs: Sequence[Job], launcher: Launcher, data_dir: Path | None, display: RunsDisplay) -> dict[Path, str]:
    """Train all runs, and return the reasons of those that failed, by run folder.

        failures = run_all(jobs, Here(at_once=2), data_dir, display)

    A run that fails stops no other. If this process is interrupted or told to end, it ends its runs first.
    """
    failures: dict[Path, str] = {}
    waiting = list(reversed(jobs))
    running: list[Attempt] = []

    def ended(job: Job, reason: str | None) -> None:
        if reason is not None:
            failures[job.run] = reason
        display.ended(job, reason)

    with _ending_on_signals():
        try:
            while waiting or running:
                while waiting and len(running) < launcher.at_once:
                    job = waiting.pop()
                    try:
                        running.append(_start(job, launcher, data_dir))
                    except OSError as error:
                        ended(job, f"cannot work in {job.run}: {error.strerror}")
                for one in list(running):
                    code = one.process.poll()
                    if code is not None:
                        running.remove(one)
                        ended(one.job, None if is_done(one.job) else _reason(one, code))
                display.show(running)
                time.sleep(TICK if running else 0)
        finally:
            for one in running:
                one.process.end()
    return failures


def is_done(job: Job) -> bool:
    """Return whether a run is trained and measured."""
    return RunFolder(job.run).finished and (job.run / "metrics.json").is_file()


class Here:
    """Train on this machine, `at_once` runs at a time.

        attempt = Here(at_once=2).start(["train", "digits", "--run", "runs/first"], Path("output.txt"))

    Each run has one core, however many are trained at a time, so that the result does not depend on it. With CUDA, each
    has one GPU.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._places: dict[int, _Child] = {}

    def start(self, words: Sequence[str], output: Path) -> Started:
        """Start a process."""
        taken = {place for place, child in self._places.items() if child.poll() is None}
        place = next(place for place in range(self.at_once) if place not in taken)
        with output.open("ab") as file:
            self._places[place] = _Child(words, file, _environment() | _gpu(place))
        return self._places[place]


class _Child:
    """A process with a process group of its own: whatever it starts ends with it."""

    def __init__(self, words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plures", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            process_group=0,
        )

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
                return


class OnRay:
    """Train on the workers of a Ray cluster: of the one that this machine is part of, or else of a local one.

        attempt = OnRay(at_once=2).start(["train", "digits", "--run", "runs/first"], Path("output.txt"))

    All machines must have plures installed and see the same folders. Without a number, one run is trained at a time for
    each GPU of the cluster, or for each core if it has no GPU.
    """

    def __init__(self, at_once: int | None) -> None:
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
        self.at_once: int = at_once or gpus or int(found["CPU"])
        self._ray = ray
        self._task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(_execute)

    def start(self, words: Sequence[str], output: Path) -> Started:
        """Queue a task that executes the command."""
        data = {"PLURES_DATA": os.environ["PLURES_DATA"]} if "PLURES_DATA" in os.environ else {}
        reference = self._task.remote(list(words), str(output), str(Path.cwd()), _environment() | data)
        return _Task(self._ray, reference)


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


def _execute(words: list[str], output: str, folder: str, environment: dict[str, str]) -> int:
    """Execute a command in a worker of Ray; cancelling the task kills the process."""
    os.chdir(folder)  # relative paths mean what they meant to the caller
    command = [sys.executable, "-m", "plures", *words]
    with Path(output).open("ab") as file:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    return done.returncode


@contextlib.contextmanager
def launcher_for(on: Literal["here", "ray"], at_once: int | None) -> Iterator[Launcher]:
    """Open the place where runs are trained."""
    if on == "here":
        yield Here(at_once or default_jobs())
        return
    there = OnRay(at_once)
    try:
        yield there
    finally:
        import_module("ray").shutdown()


def default_jobs() -> int:
    """Return how many runs to train at a time: one per GPU, or one per core."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.accelerator.is_available():  # one device that all would share
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(job: Job, launcher: Launcher, data_dir: Path | None) -> Attempt:
    job.run.mkdir(parents=True, exist_ok=True)
    output = job.run / OUTPUT
    output.touch()
    offset = output.stat().st_size
    words = train_words(job.recipe.as_json(), job.variant.method, job.variant.settings, job.run, job.recipe_name)
    where = [] if data_dir is None else ["--data-dir", str(data_dir)]
    return Attempt(job, launcher.start([*words, *where], output), offset)


def _reason(attempt: Attempt, code: int | str) -> str:
    """Return one line about the failure."""
    if isinstance(code, str):
        return code
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"its process was ended by {known.get(-code, f'signal {-code}')}"
    if code == 0:
        return f"nothing arrived in {attempt.job.run}: all machines must see the same folder"
    sentence, prefix = attempt.line, "plures: "
    if sentence.startswith(prefix):
        return sentence.removeprefix(prefix)
    return f"{sentence or f'its process ended with code {code}'} (see {attempt.job.run / OUTPUT})"


def _environment() -> dict[str, str]:
    # One thread per run; output as it is printed, as plain lines.
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}


def _gpu(place: int) -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = named if named != [""] else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]}


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Turn signals that would end this process at once into an exit that ends its runs first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
