"""The processes of a comparison: a run that breaks takes no other along, and who ends a comparison ends its runs."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plures.lab.cli.main import main
from plures.lab.compare import Job, Variant
from plures.lab.compare.compare import OUTPUT, is_done, make_runs
from plures.lab.runs.folder import RunFolder
from short import SHORT, SHORT_WORDS

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


class Broken(plures.Deterministic):
    def open(self, step):
        return {{}}["the way"]
"""

FIGURES = dict.fromkeys(
    [*("accuracy", "nll", "ece", "brier", "aurc", "mean_member_accuracy", "seconds"), *("images", "members", "bytes")],
    1,
)
# A program that takes the place of plures: starting it takes no time, and it does what its run folder is called.
STUB = """
import os
import signal
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

run = Path(sys.argv[sys.argv.index("--run") + 1])
others = [one for one in run.parent.parent.glob("*/*/.lock") if one.parent != run]
print(len(others), "others", flush=True)
if run.parent.name == "children":  # a child of the child holds the lock
    program = f"from filelock import FileLock; import signal; FileLock({str(run / '.lock')!r}).acquire(); "
    child = subprocess.Popen([sys.executable, "-c", program + f"open({str(run / 'ready')!r}, 'w'); signal.pause()"])
    signal.pause()
with FileLock(run / ".lock"):
    (run / "ready").touch()
    if run.parent.name == "endless":
        signal.pause()
    if run.parent.name == "crashed":
        os.kill(os.getpid(), signal.SIGKILL)
    (run / "ensemble.safetensors").touch()
    (run / "metrics.json").write_text(METRICS)
(run / ".lock").unlink(missing_ok=True)
"""


def job(folder: Path, name: str, method: str = "deterministic") -> Job:
    return Job(SHORT, Variant(method), folder / name / "seed-0", "digits")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `python -m plures` be the stub."""
    (tmp_path / "stub/plures").mkdir(parents=True)
    (tmp_path / "stub/plures/__init__.py").touch()
    (tmp_path / "stub/plures/__main__.py").write_text(
        STUB.replace("METRICS", repr(json.dumps(FIGURES | {"member_accuracies": []})))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))


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
    # A shell lets what it starts in the background ignore interrupts, and tests may be run so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        over.set()
        sending.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("at_once", [1, 3])
def test_as_many_runs_are_trained_at_a_time_as_asked_for(tmp_path: Path, at_once: int) -> None:
    jobs = [job(tmp_path, f"run{number}") for number in range(4)]
    assert make_runs(jobs, at_once) == {}
    assert all(map(is_done, jobs))
    assert max(int((one.run / OUTPUT).read_text().split()[0]) for one in jobs) < at_once


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", ["endless", "children"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_a_comparison_ends_its_runs(tmp_path: Path, number: signal.Signals, name: str) -> None:
    run = RunFolder(tmp_path / name / "seed-0")
    with a_signal(number, (run.path / "ready").exists), pytest.raises((KeyboardInterrupt, SystemExit)) as end:
        make_runs([job(tmp_path, name)], 1)
    assert getattr(end.value, "code", 130) == 128 + number
    with run.locked(wait=name == "children"):  # nobody is at work there any more
        pass


@pytest.mark.usefixtures("stub")
def test_a_folder_that_cannot_be_made_fails_its_own_run_only(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    taken, free = job(tmp_path, "taken"), job(tmp_path, "free")
    failures = make_runs([taken, free], 2)
    assert list(failures) == [taken.run]
    assert failures[taken.run].startswith("cannot work in ")
    assert is_done(free)


@pytest.mark.usefixtures("stub")
def test_a_run_whose_process_is_killed_is_named_and_stops_no_other(tmp_path: Path) -> None:
    crashed, free = job(tmp_path, "crashed"), job(tmp_path, "free")
    failures = make_runs([crashed, free], 2)
    assert failures == {crashed.run: "its process was ended by SIGKILL"}
    assert is_done(free)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with methods of the user's own."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(sys, "path", [path for path in sys.path if path])
        yield folder
    sys.modules.pop("mine", None)


def here(*words: str) -> tuple[int, str, str]:
    """Give a command in this process; returns the exit code and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["plures", *words])
        return main(list(words)), out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("workplace", "no_charts")
def test_broken_runs_are_named_interrupted_ones_resumed_and_finished_ones_kept() -> None:
    methods = ["deterministic", "mine:Herd:classifier=fixed", "mine:Broken"]
    words = ["compare", "digits", "--methods", *methods, *SHORT_WORDS, "--jobs", "2"]
    output = Path("runs/digits/mine-herd-classifier=fixed/seed-0", OUTPUT)
    first = Path("runs/digits/deterministic/seed-0/metrics.json")
    os.mkfifo("gate")  # the second run waits there
    with a_signal(signal.SIGINT, lambda: first.exists() and output.exists() and SETS_OUT in output.read_text()):
        code, _, err = here(*words)
    assert code == 130
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("ensemble.safetensors")}
    assert len(before) == 1
    Path("gate").unlink()
    Path("gate").touch()
    code, _, err = here(*words)
    assert code == 2, "some runs failed"
    assert "3 runs: 1 done before, 2 to train" in err
    rows = {row["name"]: row for row in json.loads(Path("runs/digits/results.json").read_text())["rows"]}
    assert rows["broken"]["failures"] == [f"seed 0: KeyError: 'the way' (see runs/digits/mine-broken/seed-0/{OUTPUT})"]
    assert len(rows["herd classifier=fixed"]["member_accuracies"][0]) == 2
    assert rows["herd classifier=fixed"]["costs"]["size"] == pytest.approx(2, rel=0.1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert here("report", "runs/digits/mine-herd-classifier=fixed", "--trust-code")[0] == 0
    assert "plures train digits --method mine:Herd" in Path("report.html").read_text()
    code, _, err = here("compare", "digits", "--methods", "mine:Flock", *SHORT_WORDS)
    assert code == 2
    assert "Flock" in err.splitlines()[-1]
