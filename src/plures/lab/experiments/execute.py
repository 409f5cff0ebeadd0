"""Where runs are made: in processes of this machine, or by the workers of a Ray cluster."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import torch

from plures.errors import PluresError
from plures.lab.experiments.jobs import Job
from plures.lab.experiments.watch import Watch
from plures.lab.experiments.worker import describe, make
from plures.lab.runfolder import RunFolder

TICK = 1.0  # seconds between looks at the progress
OUTPUT = "output.txt"  # what a run's process wrote, in its run folder


class Pool(Protocol):
    """What `run_all` needs: somewhere to send a job to, and the reason if it failed."""

    def submit(self, job: Job) -> "Future[str | None]": ...  # noqa: D102


def run_all(jobs: Sequence[Job], pool: Pool, watch: Watch) -> dict[Path, str]:
    """Make all runs, and return the reasons of those that failed, by run folder.

        with Processes(2, data_dir) as pool, Watch(jobs, epochs) as watch:
            failures = run_all(jobs, pool, watch)

    A run that fails stops no other.
    """
    failures = {}
    open_runs = {pool.submit(job): job for job in jobs}
    while open_runs:
        done, _ = wait(open_runs, timeout=TICK, return_when=FIRST_COMPLETED)
        for future in done:
            job = open_runs.pop(future)
            reason = future.result()
            if reason is None and not (job.run / "metrics.json").is_file():
                reason = f"nothing arrived in {job.run}: all machines must see the same folder"
            if reason is not None:
                failures[job.run] = reason
            watch.ended(job, reason)
        watch.tick()
    return failures


class Processes(AbstractContextManager["Processes"]):
    """Make runs on this machine, several at a time.

        with Processes(2, data_dir) as pool:
            reason = pool.submit(job).result()

    Each run has one core, however many run at a time: so the figures do not depend on it. On a machine with GPUs each
    has one of them, in turn.
    """

    def __init__(self, at_once: int, data_dir: Path | None) -> None:
        self.data_dir = data_dir
        self._threads = ThreadPoolExecutor(at_once)
        self._running: set[subprocess.Popen[str]] = set()
        self._before: Any = None  # what SIGTERM did
        self._devices: SimpleQueue[int] = SimpleQueue()
        for number in range(at_once):
            self._devices.put(number)

    def submit(self, job: Job) -> "Future[str | None]":
        """Queue a job; its result is the reason why it failed, or None."""
        return self._threads.submit(self._make, job)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Whoever ends this process means the runs, too.
            self._before = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.terminate()
        self._threads.shutdown(wait=True)

    def _make(self, job: Job) -> str | None:
        device = self._devices.get()
        try:
            job.run.mkdir(parents=True, exist_ok=True)
            output = job.run / OUTPUT
            with output.open("w") as file:
                command = [sys.executable, "-m", "plures.lab.experiments.worker"]
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True, env=_environment(device)
                )
                self._running.add(process)
                process.communicate(describe(job, self.data_dir))
                self._running.discard(process)
            return None if process.returncode == 0 else _reason(process.returncode, output)
        except OSError as error:
            return f"cannot make {job.run}: {error.strerror}"
        finally:
            self._devices.put(device)


class OnRay(AbstractContextManager["OnRay"]):
    """Make runs by the workers of a Ray cluster: of the one that this machine belongs to, or else of a local one.

        with OnRay(2, data_dir) as pool:
            reason = pool.submit(job).result()

    All machines must have plures installed and see the same folders.
    """

    def __init__(self, at_once: int, data_dir: Path | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        try:
            ray: Any = import_module("ray")
        except ModuleNotFoundError:
            raise PluresError("--on ray needs Ray, which is not installed: pip install 'plures[cluster]'") from None
        self._ray = ray
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:  # no cluster: make one of this machine's cores
            ray.init(num_cpus=at_once, include_dashboard=False, **quiet)
        needs = {"num_cpus": 1, "num_gpus": 1 if ray.cluster_resources().get("GPU") else 0}
        self._task = ray.remote(**needs, max_retries=0)(_on_worker)
        self.data_dir = data_dir

    def submit(self, job: Job) -> "Future[str | None]":
        """Queue a job; its result is the reason why it failed, or None."""
        return _caught(self._task.remote(describe(job, self.data_dir)).future())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()


def default_jobs() -> int:
    """Say how many runs go on at a time if nobody says: one per GPU, or one per core.

    Processes(default_jobs(), data_dir)
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "mps":
        return torch.accelerator.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_done(job: Job) -> bool:
    """Tell whether a run is trained and measured.

    missing = [job for job in jobs if not is_done(job)]
    """
    return RunFolder(job.run).finished and (job.run / "metrics.json").is_file()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _environment(slot: int) -> dict[str, str]:
    own = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if torch.cuda.is_available():
        visible = own.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible != [""] else [str(number) for number in range(torch.cuda.device_count())]
        own["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return own


def _reason(code: int, output: Path) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"its process ended with code {code}"


def _on_worker(description: str) -> str | None:
    """Make a run in a worker of Ray; errors become words, because their classes may not exist elsewhere."""
    torch.set_num_threads(1)
    try:
        make(description)
    except PluresError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _caught(future: "Future[str | None]") -> "Future[str | None]":
    """Turn the death of a worker, which Ray raises, into a reason like any other."""
    told: Future[str | None] = Future()

    def tell(done: "Future[str | None]") -> None:
        error = done.exception()
        told.set_result(done.result() if error is None else f"its worker was lost: {str(error).splitlines()[0]}")

    future.add_done_callback(tell)
    return told
