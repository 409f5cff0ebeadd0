"""The processes that make the runs of a comparison: what they share, and what becomes of them and of their runs."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from forked import start, told_to
from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.compare import compare as compare_module
from plures.lab.compare import pool as pool_module
from plures.lab.compare.jobs import Job, Variant
from plures.lab.compare.pool import OnRay, Processes
from plures.lab.compare.worker import OUTPUT
from plures.lab.recipes import Epochs
from plures.lab.runs.folder import RunFolder
from short import SHORT, SHORT_WORDS, pool_here

ENDLESS = [*SHORT_WORDS[:-1], "1000000"]

SETS_OUT = "a herd sets out"
MINE = f"""
from pathlib import Path

import plures


class Herd(plures.DeepEnsemble):
    def open(self, step):
        print("{SETS_OUT}")
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


# Neither torch nor training: a process that starts at once, and a run that is made, or never ends, as the recipe says.
STUBS = """
import signal
import sys
from types import ModuleType, SimpleNamespace

from filelock import FileLock


def train(recipe, method, run, **_):
    with FileLock(run / ".lock"):
        (run / "log.jsonl").touch()
        while recipe.epochs.train > 1000:
            signal.pause()
        for name in ("ensemble.safetensors", "metrics.json"):
            (run / name).touch()


torch, fit = ModuleType("torch"), ModuleType("plures.lab.training.fit")
torch.cuda = SimpleNamespace(empty_cache=lambda: None)
fit.train = train
sys.modules |= {"torch": torch, "plures.lab.training.fit": fit}
"""


@contextlib.contextmanager
def starting_with(program: str, folder: Path) -> Iterator[None]:
    """Let processes of a pool run a program before all else."""
    (folder / "sitecustomize.py").write_text(program)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_environment", lambda slot: {**os.environ, "PYTHONPATH": paths})
        yield


@pytest.fixture
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two processes that import no torch: for tests of what becomes of processes, whatever they do."""
    with starting_with(NOISE + STUBS, tmp_path_factory.mktemp("stubs")), Processes(2, None) as pool:
        yield pool


@dataclass(frozen=True)
class Trained:
    """A process that trained the same runs twice, in another order."""

    pool: Processes
    rounds: list[dict[str, tuple[bytes, dict[str, Any]]]]  # what came of each method


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    methods, rounds = ["orthogonal-dropout", "mc-dropout", "batch-ensemble"], []
    with starting_with(NOISE, tmp_path_factory.mktemp("noise")), Processes(1, None) as pool:
        for order in (methods, methods[::-1]):  # no method comes after the same one again
            jobs = {method: job(tmp_path_factory.mktemp("runs"), method, method) for method in order}
            processes = set()
            for one in jobs.values():
                assert pool.submit(one).result() is None
                assert (one.run / OUTPUT).read_text().count("epoch") >= 2
                processes |= pool._running
            assert len(processes) == 1
            rounds.append({method: bytes_and_figures(one.run) for method, one in jobs.items()})
        yield Trained(pool, rounds)


def test_a_killed_process_fails_its_own_run_only(light: Processes, tmp_path: Path) -> None:
    never = light.submit(endless(tmp_path))
    wait_for_its_first_epoch(endless(tmp_path).run, never)
    (process,) = light._running
    assert light.submit(job(tmp_path, "short")).result() is None
    process.kill()
    assert never.result() == "its process was ended by SIGKILL"


def test_a_process_that_ends_while_it_waits_fails_no_run(light: Processes, tmp_path: Path) -> None:
    for name in ("before", "also before"):
        assert light.submit(job(tmp_path, name)).result() is None
    ended = set(light._running)
    assert len(ended) == 2
    for process in ended:
        process.kill()
        process.wait()
    assert light.submit(job(tmp_path, "short")).result() is None
    assert len(light._running - ended) == 1
    assert len(ended - light._running) == 1


def test_a_process_that_crashes_after_its_run_is_made_fails_no_run(
    light: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("crash").touch()
    assert light.submit(job(tmp_path, "short")).result() is None
    assert not Path("crash").exists()


def test_code_of_the_users_own_gets_no_other_run_into_its_process(light: Processes, tmp_path: Path) -> None:
    for name in ("before", "also before"):
        assert light.submit(job(tmp_path, name)).result() is None
    before = set(light._running)
    assert light.submit(job(tmp_path, "own", "mine:Herd")).result() is None
    (ended,) = before - light._running
    assert ended.poll() is not None


def test_processes_stay_and_no_run_depends_on_those_before_it(trained: Trained) -> None:
    assert trained.rounds[0] == trained.rounds[1]


def test_a_run_that_another_process_makes_is_left_alone(trained: Trained, tmp_path: Path) -> None:
    taken = job(tmp_path, "taken")
    with RunFolder(taken.run).locked():
        (taken.run / OUTPUT).write_text("what the other says\n")
        reason = trained.pool.submit(taken).result()
    assert reason is not None
    assert "another process is working in the run folder" in reason
    assert "what the other says" in (taken.run / OUTPUT).read_text()


@pytest.mark.parametrize("begun", [False, True])
def test_leaving_the_pool_ends_its_processes(tmp_path: Path, begun: bool) -> None:
    with Processes(1, None) as pool:
        running = pool.submit(endless(tmp_path))
        while begun and not pool._running:
            wait([running], timeout=0.01)
        started = set(pool._running)
    assert running.done()
    assert all(process.poll() is not None for process in started)


@contextlib.contextmanager
def a_signal(number: signal.Signals, ready: Callable[[], bool]) -> Iterator[None]:
    """Send a signal to this process as soon as something is so."""
    over = threading.Event()

    def send() -> None:
        while not ready():
            if over.wait(0.05):
                return
        os.kill(os.getpid(), number)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        over.set()
        sending.join()


@pytest.mark.usefixtures("light")
def test_whoever_ends_a_comparison_ends_its_runs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "digits/deterministic/seed-0")
    words = ["compare", "digits", "--methods", "deterministic", "--runs", str(tmp_path), *ENDLESS]
    with a_signal(signal.SIGTERM, run.log.exists), pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 143
    with run.locked():  # nobody is at work there any more
        pass


def give(words: list[str], said: Path) -> None:
    """Give a command, and write down what it says."""
    with told_to(said):
        sys.exit(main(words))


def test_runs_end_when_their_comparison_was_killed(tmp_path: Path) -> None:
    words = ["compare", "digits", "--methods", "deterministic", "--runs", str(tmp_path), *ENDLESS]
    run = tmp_path / "digits/deterministic/seed-0"
    process = start(give, words, tmp_path / "said")
    while not (run / "log.jsonl").exists():
        process.join(0.1)
        assert process.exitcode is None, (tmp_path / "said").read_text()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
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
    code: int  # of the interrupted command
    done: dict[Path, int]  # what it left, and from when
    said: str  # by the one that went on
    results: dict[str, Any]


@pytest.fixture(scope="module")
def compared(workplace: Path) -> Compared:
    words = ["compare", "digits", "--methods", "deterministic", "mine:Herd:classifier=fixed", *SHORT_WORDS]
    words += ["--jobs", "1"]
    herd = Path("runs/digits/mine-herd-classifier=fixed/seed-0", OUTPUT)
    os.mkfifo("gate")  # the second run waits there
    # A shell lets what it starts in the background ignore interrupts, and tests may be run so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with a_signal(signal.SIGINT, lambda: herd.exists() and SETS_OUT in herd.read_text()):
            interrupted, _, _ = here(*words)
    finally:
        signal.signal(signal.SIGINT, before)
    done = made(workplace)
    Path("gate").unlink()
    Path("gate").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "_pool", pool_here)
        code, out, err = here(*words, "--json")  # is refused if the process of the second run is still at work
    assert code == 0, err
    results = json.loads(out[out.index("{") :])  # after what the herd says
    return Compared(workplace, interrupted, done, err, results)


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
    assert SETS_OUT in Path("runs/digits/mine-herd-classifier=fixed/seed-0", OUTPUT).read_text()
    assert here("report", "runs/digits", "--trust-code")[0] == 0
    html = Path("report.html").read_text()
    assert "herd classifier=fixed" in html
    assert "plures train digits --method mine:Herd" in html
    code, _, err = here("compare", "digits", "--methods", "mine:Flock", *SHORT_WORDS)
    assert code == 2
    assert "Flock" in err.splitlines()[-1]


@pytest.mark.usefixtures("workplace")
def test_ray_gives_the_same_results_and_names_what_failed(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(compare_module, "with_costs", lambda rows: rows)  # they are measured here, not by Ray
    words = ["compare", "digits", "--methods", "mine:Lost", "orthogonal-dropout", *SHORT_WORDS, "--jobs", "1"]
    ray = start(give, [*words, "--runs", str(tmp_path / "ray"), "--on", "ray"], tmp_path / "said")
    ray.join()
    said = (tmp_path / "said").read_text()
    if "Ray did not start in half a minute" in said:
        pytest.skip("the machine is so busy that Ray gave up on its own processes")
    assert ray.exitcode == 2, said
    assert "2 to make" in said
    assert "the way was lost" in said
    there = bytes_and_figures(tmp_path / "ray/digits/orthogonal-dropout/seed-0")
    assert there == trained.rounds[0]["orthogonal-dropout"]


def test_a_ray_that_does_not_start_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str | None = None, **more: Any) -> None:
        raise ConnectionError if address else Exception("The current node timed out during startup.\nSee the logs.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    with pytest.raises(PluresError, match=r"^Ray did not start in half a minute: the machine may be too busy; try"):
        OnRay(1, None)
