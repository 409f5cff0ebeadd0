"""Where runs are trained: in processes of this machine, or on the workers of a Ray cluster."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn, Protocol, Self, cast

import torch

from plures.errors import PluresError
from plures.lab.compare.jobs import Job
from plures.lab.compare.progress import Watch
from plures.lab.compare.worker import ANSWER, DONE, OUTPUT, Reason, describe, on_ray
from plures.lab.method_names import is_code
from plures.lab.runs.folder import RunFolder

TICK = 1.0  # seconds between looks at the progress


class Pool(Protocol):
    """What `run_all` needs: somewhere to send a job to, and how many it takes at a time."""

    at_once: int

    def submit(self, job: Job) -> "Future[Reason]": ...  # noqa: D102


def run_all(jobs: Sequence[Job], pool: Pool, watch: Watch) -> dict[Path, str]:
    """Make all runs, and return the reasons of those that failed, by run folder.

        with Processes(2, data_dir) as pool, Watch(jobs, epochs) as watch:
            failures = run_all(jobs, pool, watch)

    A run that fails stops no other.
    """
    failures = {}
    waiting = list(reversed(jobs))
    running: dict[Future[Reason], Job] = {}
    while waiting or running:
        while waiting and len(running) < pool.at_once:
            job = waiting.pop()
            watch.started(job)
            running[pool.submit(job)] = job
        done, _ = wait(running, timeout=TICK, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            reason = _reason(future)
            if reason is None and not is_done(job):
                reason = f"nothing arrived in {job.run}: all machines must see the same folder"
            if reason is not None:
                failures[job.run] = reason
            watch.ended(job, reason)
        watch.tick()
    return failures


@dataclass
class _Slot:
    """A place for one run at a time, and the process that waits there for the next one."""

    number: int
    process: "subprocess.Popen[str] | None" = None


class Processes(AbstractContextManager["Processes"]):
    """Make runs on this machine, several at a time.

        with Processes(2, data_dir) as pool:
            reason = pool.submit(job).result()

    Each run has one core, however many run at a time: so the figures do not depend on it. On a machine with CUDA each
    has one GPU, in turn. A process makes one run after the other, because starting one takes seconds. The next
    run gets a new one after a failure, and after code of the user's own, which may have changed what all share. Leaving
    the pool ends its processes.
    """

    def __init__(self, at_once: int, data_dir: Path | None) -> None:
        self.at_once = at_once
        self.data_dir = data_dir
        self._threads = ThreadPoolExecutor(at_once)
        self._lock = threading.Lock()  # of the two below: nothing may start once the pool is left
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False
        self._before: Any = None  # what SIGTERM did
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for number in range(at_once):
            self._slots.put(_Slot(number))

    def submit(self, job: Job) -> "Future[Reason]":
        """Queue a job; its result is the reason why it failed, or None."""
        return self._threads.submit(self._make, job)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Ending this process ends its runs, too.
            self._before = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(self, *reason: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        with self._lock:
            self._closed = True
            for process in self._running:
                process.terminate()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in list(self._running):  # those that waited for another job
            self._end(process)

    def _make(self, job: Job) -> Reason:
        slot = self._slots.get()
        try:
            job.run.mkdir(parents=True, exist_ok=True)
            with (job.run / OUTPUT).open("a") as file:
                if slot.process is not None and slot.process.poll() is not None:
                    self._end(slot.process)
                    slot.process = None
                slot.process = slot.process or self._start(file, slot.number)
            if slot.process is None:
                return "it was not started"
            answer = _ask(slot.process, describe(job, self.data_dir))
            own_code = is_code(job.recipe.model) or is_code(job.variant.method)
            if answer == DONE and not own_code:
                return None
            code = self._end(slot.process)
            slot.process = None
            if not answer:  # it may have crashed while it tidied up
                return None if is_done(job) else _ending(code, job.run / OUTPUT)
            reason: Reason = json.loads(answer)
            return reason
        except OSError as error:
            return f"cannot work in {job.run}: {error.strerror}"
        finally:
            self._slots.put(slot)

    def _start(self, errors: IO[str], slot: int) -> "subprocess.Popen[str] | None":
        command = [sys.executable, "-m", "plures.lab.compare.worker"]
        pipe = subprocess.PIPE
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, text=True, errors="replace", env=_environment(slot)
            )
            self._running.add(process)
            return process

    def _end(self, process: "subprocess.Popen[str]") -> int:
        """Wait for the end of a process that was told to end, or that ends by itself, and return its code."""
        with contextlib.suppress(BrokenPipeError), process:
            pass
        with self._lock:
            self._running.discard(process)
        return process.wait()


class OnRay(AbstractContextManager["OnRay"]):
    """Make runs by the workers of a Ray cluster: of the one that this machine belongs to, or else of a local one.

        with OnRay(2, data_dir) as pool:
            reason = pool.submit(job).result()

    All machines must have plures installed and see the same folders. Without a number, one run is made at a time for
    each GPU of the cluster, or for each core where it has none.
    """

    def __init__(self, at_once: int | None, data_dir: Path | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        try:
            ray: Any = import_module("ray")
        except ModuleNotFoundError:
            raise PluresError("--on ray needs Ray, which is not installed: pip install 'plures[cluster]'") from None
        self._ray = ray
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
        self.at_once = at_once or gpus or int(found["CPU"])
        self._task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(on_ray)
        self.data_dir = data_dir

    def submit(self, job: Job) -> "Future[Reason]":
        """Queue a job; its result is the reason why it failed, or None."""
        job.run.mkdir(parents=True, exist_ok=True)
        future: Future[Reason] = self._task.remote(describe(job, self.data_dir), str(job.run / OUTPUT)).future()
        return future

    def __exit__(self, *reason: object) -> None:
        self._ray.shutdown()


def default_jobs() -> int:
    """Choose how many runs to make at a time: one per GPU, or one per core."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.accelerator.is_available():  # one device that all would share
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_done(job: Job) -> bool:
    """Say whether a run is trained and measured."""
    return RunFolder(job.run).finished and (job.run / "metrics.json").is_file()


def _reason(future: "Future[Reason]") -> Reason:
    """Turn whatever went wrong into words: the other runs continue."""
    try:
        return future.result()
    except Exception as error:
        return f"its worker was lost: {type(error).__name__} {error}".strip().splitlines()[0]


def _ask(process: "subprocess.Popen[str]", description: str) -> str:
    """Give a worker a job, and wait for its answer; there is none if it ends before."""
    hears, says = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    with contextlib.suppress(BrokenPipeError):  # it ended before it heard what to do
        hears.write(description + "\n")
        hears.flush()
    return next((line.removeprefix(ANSWER).strip() for line in says if line.startswith(ANSWER)), "")


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _environment(slot: int) -> dict[str, str]:
    own = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if torch.cuda.is_available():
        visible = own.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible != [""] else [str(number) for number in range(torch.cuda.device_count())]
        own["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return own


def _ending(code: int, output: Path) -> str:
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"its process was ended by {known.get(-code, f'signal {-code}')}"
    return f"its process ended with code {code}; see {output}"
