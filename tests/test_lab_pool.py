"""The processes that make the runs of a comparison: what they share, and what becomes of them and of their runs."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.compare import pool as pool_module
from plures.lab.compare.jobs import Job, Variant
from plures.lab.compare.pool import OnRay, Processes
from plures.lab.compare.worker import OUTPUT
from plures.lab.recipes import Epochs
from plures.lab.runs.folder import RunFolder
from short import SHORT, SHORT_WORDS

ENDLESS = [*SHORT_WORDS[:-1], "1000000"]

MINE = """
from pathlib import Path

import plures


class Herd(plures.DeepEnsemble):
    def open(self, step):
        print("a herd sets out")
        Path("gate").read_text()  # waits as long as it is a pipe
        return super().open(step)


class Lost(plures.Deterministic):
    def open(self, step):
        raise plures.PluresError("the way was lost")
"""


def job(folder: Path, name: str, method: str = "deterministic", **more: Any) -> Job:
    return Job(replace(SHORT, **more), Variant(method), folder / "digits" / name / "seed-0", "digits")


def endless(folder: Path) -> Job:
    return job(folder, "endless", epochs=Epochs(train=10**6))


def wait_for_its_first_epoch(run: Path, future: "Future[str | None]") -> None:
    while not RunFolder(run).log.exists():
        done, _ = wait([future], timeout=0.05)
        assert not done, future.result()


def bytes_and_figures(run: Path) -> tuple[bytes, dict[str, Any]]:
    return (run / "ensemble.safetensors").read_bytes(), {**RunFolder(run).metrics(), "seconds": 0}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with methods of the user's own, and a home for the user's key."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(sys, "path", [path for path in sys.path if path])
        yield folder
    sys.modules.pop("mine", None)


# What a process finds before it imports anything else: a line on standard output, and a crash when it tidies up.
NOISE = """
import gc
import os

os.write(1, b"a library says hello, and \\xff")
tidy = gc.collect


def collect(*given):
    if os.path.exists("crash"):
        os.remove("crash")
        os._exit(3)
    return tidy(*given)


gc.collect = collect
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two processes, where libraries print while they are imported."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "sitecustomize.py").write_text(NOISE)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch, Processes(2, None) as pool:
        patch.setattr(pool_module, "_environment", lambda slot: {**os.environ, "PYTHONPATH": paths})
        yield pool


def test_a_killed_process_fails_its_own_run_only(pool: Processes, tmp_path: Path) -> None:
    never = pool.submit(endless(tmp_path))
    wait_for_its_first_epoch(endless(tmp_path).run, never)
    (process,) = pool._running
    assert pool.submit(job(tmp_path, "short")).result() is None
    process.kill()
    assert never.result() == "its process was ended by SIGKILL"


def test_processes_stay_and_no_run_depends_on_those_before_it(pool: Processes, tmp_path: Path) -> None:
    methods = ("orthogonal-dropout", "mc-dropout", "batch-ensemble")  # which take turns in the two processes
    rounds = []
    for name in ("first", "second"):
        jobs = [job(tmp_path, f"{name}-{method}", method) for method in methods]
        assert [pool.submit(one).result() for one in jobs] == [None] * 3
        rounds.append([bytes_and_figures(one.run) for one in jobs])
        assert all((one.run / OUTPUT).read_text().count("epoch") >= 2 for one in jobs)
        assert len(pool._running) == 2
    assert rounds[0] == rounds[1]


def test_a_process_that_ends_while_it_waits_fails_no_run(pool: Processes, tmp_path: Path) -> None:
    assert pool.submit(job(tmp_path, "before")).result() is None
    ended = set(pool._running)
    for process in ended:
        process.kill()
        process.wait()
    assert pool.submit(job(tmp_path, "short")).result() is None
    assert len(pool._running - ended) == 1
    assert len(ended - pool._running) == 1


def test_a_run_that_another_process_makes_is_left_alone(pool: Processes, tmp_path: Path) -> None:
    taken = job(tmp_path, "taken")
    with RunFolder(taken.run).locked():
        (taken.run / OUTPUT).write_text("what the other says\n")
        reason = pool.submit(taken).result()
    assert reason is not None
    assert "another process is working in the run folder" in reason
    assert "what the other says" in (taken.run / OUTPUT).read_text()


def test_a_process_that_crashes_after_its_run_is_made_fails_no_run(
    pool: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("crash").touch()
    assert pool.submit(job(tmp_path, "short")).result() is None
    assert not Path("crash").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_leaving_the_pool_ends_its_processes(tmp_path: Path, begun: bool) -> None:
    with Processes(1, None) as pool:
        running = pool.submit(endless(tmp_path))
        while begun and not pool._running:
            wait([running], timeout=0.01)
        started = set(pool._running)
    assert running.done()
    assert all(process.poll() is not None for process in started)


def test_whoever_ends_a_comparison_ends_its_runs(tmp_path: Path) -> None:
    run, over = RunFolder(tmp_path / "digits/deterministic/seed-0"), threading.Event()

    def end_it() -> None:
        while not run.log.exists():
            if over.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end_it)
    ending.start()
    try:
        with pytest.raises(SystemExit) as end:
            main(["compare", "digits", "--methods", "deterministic", "--runs", str(tmp_path), *ENDLESS])
    finally:
        over.set()
        ending.join()
    assert end.value.code == 143
    with run.locked():  # nobody is at work there any more
        pass


def test_runs_end_when_their_comparison_was_killed(tmp_path: Path) -> None:
    words = ["compare", "digits", "--methods", "deterministic", *ENDLESS]
    run = tmp_path / "runs/digits/deterministic/seed-0"
    process = subprocess.Popen([sys.executable, "-m", "plures", *words], cwd=tmp_path)
    while not (run / "log.jsonl").exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"ended with {process.wait(timeout=0.1)}")
    process.kill()
    process.wait()
    lock, before = FileLock(run / ".lock"), len((run / "log.jsonl").read_bytes().splitlines())
    while not lock.is_locked:  # its process is at work: it may be slow to hear of it, but not to train on
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0.05)
        assert len((run / "log.jsonl").read_bytes().splitlines()) < before + 5000
    lock.release()


@dataclass(frozen=True)
class Compared:
    """A comparison that was interrupted after its first run, and then finished."""

    folder: Path
    code: int  # of the first process
    done: dict[Path, int]  # what it left, and from when
    said: str  # by the one that went on
    results: dict[str, Any]


@pytest.fixture(scope="module")
def compared(workplace: Path) -> Compared:
    words = ["compare", "digits", "--methods", "deterministic", "mine:Herd:classifier=fixed", *SHORT_WORDS]
    words += ["--jobs", "1"]
    # A shell lets what it starts in the background ignore interrupts, and tests may be run so.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    os.mkfifo("gate")  # the second run waits there
    command = [sys.executable, "-m", "plures", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listening) as process:
        assert process.stderr is not None
        while "[1/2]" not in (line := process.stderr.readline()):
            assert line, "ended before the first run was made"
        process.send_signal(signal.SIGINT)
        process.communicate()
    done = made(workplace)
    Path("gate").unlink()
    Path("gate").touch()
    code, out, err = here(*words, "--json")
    assert code == 0, err
    results = json.loads(out[out.index("{") :])  # after what the herd says while its costs are measured
    return Compared(workplace, process.returncode, done, err, results)


def here(*words: str) -> tuple[int, str, str]:
    """Give a command in this process, where torch is loaded already; returns the exit code and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["plures", *words])
        return main(list(words)), out.getvalue(), err.getvalue()


def made(folder: Path) -> dict[Path, int]:
    """The finished runs, and what would change if they were made again."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("ensemble.safetensors")}


def test_an_interrupted_comparison_repeats_no_finished_run(compared: Compared) -> None:
    assert compared.code == 130
    assert len(compared.done) == 1
    assert "1 done before, 1 to make" in compared.said
    now = made(compared.folder)
    assert len(now) == 2
    assert {path: now[path] for path in compared.done} == compared.done


def test_a_method_of_another_package_joins_a_comparison_and_its_report(compared: Compared) -> None:
    row = compared.results["rows"][1]
    assert row["name"] == "herd classifier=fixed"
    assert len(row["member_accuracies"][0]) == 2
    assert row["costs"]["size"] == pytest.approx(2, rel=0.1)
    assert "a herd sets out" in Path("runs/digits/mine-herd-classifier=fixed/seed-0", OUTPUT).read_text()
    assert here("report", "runs/digits")[0] == 0
    html = Path("report.html").read_text()
    assert "herd classifier=fixed" in html
    assert "plures train digits --method mine:Herd" in html
    code, _, err = here("compare", "digits", "--methods", "mine:Flock", *SHORT_WORDS)
    assert code == 2
    assert "Flock" in err.splitlines()[-1]


def test_ray_gives_the_same_results_and_names_what_failed(pool: Processes, workplace: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ours = job(tmp_path, "here", "orthogonal-dropout")
    assert pool.submit(ours).result() is None
    words = ["compare", "digits", "--methods", "mine:Lost", "orthogonal-dropout", *SHORT_WORDS, "--jobs", "1"]
    there = [sys.executable, "-m", "plures", *words, "--runs", str(tmp_path / "ray"), "--on", "ray"]
    ray = subprocess.run(there, capture_output=True, text=True)
    if "Ray did not start in half a minute" in ray.stderr:
        pytest.skip("the machine is so busy that Ray gave up on its own processes")
    assert ray.returncode == 2
    assert "2 to make" in ray.stderr
    assert "the way was lost" in ray.stderr
    assert bytes_and_figures(tmp_path / "ray/digits/orthogonal-dropout/seed-0") == bytes_and_figures(ours.run)


def test_a_ray_that_does_not_start_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str | None = None, **more: Any) -> None:
        raise ConnectionError if address else Exception("The current node timed out during startup.\nSee the logs.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    with pytest.raises(PluresError, match=r"^Ray did not start in half a minute: the machine may be too busy; try"):
        OnRay(1, None)
