"""Train the runs of comparisons, skip finished ones, and collect the results into rows.

Each run is a process of its own that executes `plures train`: one that fails does not stop the others. What it prints
is in output.txt in the run folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plures.checks import whole_number
from plures.errors import PluresError, visible
from plures.lab.compare import Comparison, Job, unique
from plures.lab.compare.rows import Finished, Row, make_rows
from plures.lab.costs import machine, plain_step
from plures.lab.data import steps
from plures.lab.method_names import method_class
from plures.lab.recipes import Epochs, Recipe
from plures.lab.runs.config import differences, train_words
from plures.lab.runs.folder import RunFolder, other_settings
from plures.lab.runs.open import data_for, device_for, ensemble_for, network_for
from plures.progress import duration

TICK = 0.2  # seconds between looks at the processes
GRACE = 10  # seconds that a process has to end before it is killed
OUTPUT = "output.txt"  # what the process of a run printed, in its run folder
# One thread per run, so that the result does not depend on how many are trained at a time; output as plain lines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": ""}
ENVIRONMENT |= {"PYTHONIOENCODING": "utf-8"}


class Child(subprocess.Popen[bytes]):
    """A process of `plures` with a process group of its own: whatever it starts ends with it.

    With CUDA, each place for runs has one GPU.
    """

    def __init__(self, words: Sequence[str], output: Path, place: int) -> None:
        gpu = {}
        if torch.cuda.is_available():
            every = ",".join(map(str, range(torch.cuda.device_count())))
            devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")
            gpu = {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]}
        with output.open("ab") as file:
            super().__init__(
                [sys.executable, "-m", "plures", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | gpu,
                process_group=0,
            )

    def end(self) -> None:
        """End the whole group, and wait until it has ended; on Windows, which has no groups, the process alone."""
        for name, end in (("SIGTERM", self.terminate), ("SIGKILL", self.kill)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, getattr(signal, name)) if hasattr(os, "killpg") else end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(GRACE)
                return


def compare(
    comparisons: Sequence[Comparison], runs: Path, *, at_once: int | None = None, data_dir: Path | None = None
) -> list[list[Row]]:
    """Train the missing runs of comparisons and return the rows of each.

    Finished runs are not trained again, and interrupted ones are resumed. Missing data is reported before anything is
    trained. A run that fails does not stop the others: its row has the reason.
    """
    failures = make_runs(unique(job for one in comparisons for job in one.jobs(runs)), at_once, data_dir)
    return [_rows(one, runs, failures) for one in comparisons]


def make_runs(jobs: Sequence[Job], at_once: int | None = None, data_dir: Path | None = None) -> dict[Path, str]:
    """Train the runs that are missing, and return the reasons of those that failed, by run folder.

    Without a number, one run is trained at a time for each GPU, or for each core without GPUs.
    """
    if at_once is not None:
        whole_number("--jobs", at_once)
    for job in jobs:
        refuse_others(job)
    missing = [job for job in jobs if not is_done(job)]
    for recipe in dict.fromkeys(replace(job.recipe, epochs=Epochs(), members=1) for job in missing):
        # Decoded here, once, before several processes need them; and missing data are reported before hours of work.
        data_for(recipe, data_dir)
    print(f"{len(jobs)} runs: {len(jobs) - len(missing)} done before, {len(missing)} to train", file=sys.stderr)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Accelerators that are not CUDA are one device that all would share.
    usual = max(1, torch.cuda.device_count()) if torch.accelerator.is_available() else cores
    return _train(missing, at_once or usual, data_dir)


def planned(comparisons: Sequence[Comparison], runs: Path) -> list[dict[str, Any]]:
    """Count the runs, stages and epochs of each variant, those of shared runs once; nothing is trained or measured."""
    lines, seen = [], set[Path]()
    for comparison in comparisons:
        jobs = [job for job in comparison.jobs(runs) if job.run not in seen]
        seen.update(job.run for job in jobs)
        for variant in comparison.variants:
            if not (own := [job for job in jobs if job.variant == variant]):
                continue
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


def costs_before(comparisons: Sequence[Comparison], runs: Path, data_dir: Path | None) -> Iterator[str]:
    """Yield a line for each recipe: what is left to train, its network, and the time by a measured step."""
    lines, device = planned(comparisons, runs), device_for()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["processor"]
    for recipe_name, recipe in {one.name: one.recipe for one in comparisons}.items():
        own = [line for line in lines if line["recipe"] == recipe_name]
        left, epochs = (sum(line[key] for line in own) for key in ("runs", "epochs"))
        left -= sum(line["done"] for line in own)
        if not left:
            continue
        data = data_for(recipe, data_dir)
        network = network_for(recipe, len(data.info.classes), data.info.channels, data.info.size)
        seconds = plain_step(network, data.info, recipe, device)
        count = epochs * steps(data.train, recipe.batch_size, drop_last=len(data.train) >= recipe.batch_size)
        weights = sum(parameter.numel() for parameter in network.parameters())
        yield (
            f"{recipe_name}: {left} runs, {epochs:,} epochs, {count:,} steps of {recipe.batch_size} images; "
            f"{recipe.model} has {weights:,} weights, and a plain step took {seconds:.2g} s on {name}: "
            f"about {duration(count * seconds)} one after the other"
        )


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


def _train(jobs: Sequence[Job], at_once: int, data_dir: Path | None) -> dict[Path, str]:
    """Train runs, `at_once` at a time. If this process is interrupted or told to end, it ends its runs first."""
    failures: dict[Path, str] = {}
    waiting = list(reversed(jobs))
    running: dict[int, tuple[Job, Child]] = {}
    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals]

    def ended(job: Job, reason: str | None) -> None:
        if reason is None:
            found = RunFolder(job.run).metrics()
            took = duration(found["seconds"])
            result = f"accuracy {found['accuracy']:.1%}, NLL {found['nll']:.3f}, trained in {took}"
        else:
            failures[job.run] = reason
            result = f"failed: {reason}"
        done = len(jobs) - len(waiting) - len(running)
        tell(f"[{done}/{len(jobs)}] {job.name}: {result}")

    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop()
                place = min(set(range(at_once)) - running.keys())
                try:
                    running[place] = job, Child(_prepared(job, data_dir), job.run / OUTPUT, place)
                    tell(f"{job.name}: training; its progress is in {job.run / OUTPUT}")
                except OSError as error:
                    ended(job, f"cannot work in {job.run}: {error.strerror}")
            for place, (job, process) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[place]
                    ended(job, None if is_done(job) else _reason(job, code))
            time.sleep(TICK if running else 0)
    finally:
        for _, process in running.values():
            process.end()
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return failures


def tell(line: str) -> None:
    """Print a line about the progress."""
    print(visible(line), file=sys.stderr, flush=True)


def _prepared(job: Job, data_dir: Path | None) -> list[str]:
    """Make the folder of a run, and return the words of its command."""
    job.run.mkdir(parents=True, exist_ok=True)
    (job.run / OUTPUT).write_bytes(b"")  # what an earlier attempt printed must not be taken for this one's words
    words = train_words(job.recipe.as_json(), job.variant.method, job.variant.settings, job.run, job.recipe_name)
    return [*words, *([] if data_dir is None else ["--data-dir", str(data_dir)])]


def is_done(job: Job) -> bool:
    """Return whether a run is trained and measured."""
    folder = RunFolder(job.run)
    return folder.finished and folder.measured.is_file()


def _reason(job: Job, code: int) -> str:
    """Return one line about the failure: the last one that the run has printed."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    printed = ""
    with contextlib.suppress(OSError):
        printed = (job.run / OUTPUT).read_text("utf-8", errors="replace").strip()
    line, prefix = printed.rpartition("\n")[2], "plures: "
    if line.startswith(prefix):
        return line.removeprefix(prefix)
    return f"{line or f'its process ended with code {code}'} (see {job.run / OUTPUT})"
