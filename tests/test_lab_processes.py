"""The processes of a comparison: a run that breaks takes no other along, and who ends a comparison ends its runs."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from forked import start, told_to
from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.compare import Job, Variant
from plures.lab.compare.compare import OUTPUT, RunsDisplay, is_done, launcher_for, run_all, start_here
from plures.lab.runs.folder import RunFolder
from short import SHORT, SHORT_WORDS, make

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
    for name in ("ensemble.safetensors", "metrics.json"):
        (run / name).touch()
(run / ".lock").unlink(missing_ok=True)
"""


def job(folder: Path, name: str, method: str = "deterministic") -> Job:
    return Job(SHORT, Variant(method), folder / name / "seed-0", "digits")


class Heard(RunsDisplay):
    """A display that counts the runs in progress."""

    most = 0

    def show(self, running: Sequence[Job]) -> None:
        self.most = max(self.most, len(running))

    def ended(self, job: Job, reason: str | None) -> None:
        pass


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `python -m plures` be the stub."""
    (tmp_path / "stub/plures").mkdir(parents=True)
    (tmp_path / "stub/plures/__init__.py").touch()
    (tmp_path / "stub/plures/__main__.py").write_text(STUB)
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
    heard = Heard(len(jobs))
    assert run_all(jobs, start_here, at_once, None, heard) == {}
    assert all(map(is_done, jobs))
    assert heard.most <= at_once


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", ["endless", "children"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_a_comparison_ends_its_runs(tmp_path: Path, number: signal.Signals, name: str) -> None:
    run = RunFolder(tmp_path / name / "seed-0")
    with a_signal(number, (run.path / "ready").exists), pytest.raises((KeyboardInterrupt, SystemExit)) as end:
        run_all([job(tmp_path, name)], start_here, 1, None, Heard(1))
    assert getattr(end.value, "code", 130) == 128 + number
    with run.locked(wait=name == "children"):  # nobody is at work there any more
        pass


@pytest.mark.usefixtures("stub")
def test_a_folder_that_cannot_be_made_fails_its_own_run_only(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    taken, free = job(tmp_path, "taken"), job(tmp_path, "free")
    failures = run_all([taken, free], start_here, 2, None, Heard(1))
    assert list(failures) == [taken.run]
    assert failures[taken.run].startswith("cannot work in ")
    assert is_done(free)


@pytest.mark.usefixtures("stub")
def test_a_run_whose_process_is_killed_is_named_and_stops_no_other(tmp_path: Path) -> None:
    crashed, free = job(tmp_path, "crashed"), job(tmp_path, "free")
    failures = run_all([crashed, free], start_here, 2, None, Heard(2))
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
    code, out, err = here(*words, "--json")
    assert code == 2, "some runs failed"
    assert "3 runs: 1 done before, 2 to train" in err
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    assert rows["broken"]["failures"] == [f"seed 0: KeyError: 'the way' (see runs/digits/mine-broken/seed-0/{OUTPUT})"]
    assert len(rows["herd classifier=fixed"]["member_accuracies"][0]) == 2
    assert rows["herd classifier=fixed"]["costs"]["size"] == pytest.approx(2, rel=0.1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert here("report", "runs/digits/mine-herd-classifier=fixed", "--trust-code")[0] == 0
    assert "plures train digits --method mine:Herd" in Path("report.html").read_text()
    code, _, err = here("compare", "digits", "--methods", "mine:Flock", *SHORT_WORDS)
    assert code == 2
    assert "Flock" in err.splitlines()[-1]


def give(words: list[str], said: Path) -> None:
    """Give a command, and write down what it says."""
    with told_to(said):
        sys.exit(main(words))


def bytes_and_figures(run: Path) -> tuple[bytes, dict[str, Any]]:
    return (run / "ensemble.safetensors").read_bytes(), {**RunFolder(run).metrics(), "seconds": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
def test_ray_gives_the_same_results_and_names_what_failed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["compare", "digits", "--methods", "mine:Lost", "orthogonal-dropout", *SHORT_WORDS, "--jobs", "1"]
    ray = start(give, [*words, "--runs", str(tmp_path / "ray"), "--on", "ray"], tmp_path / "said")
    ray.join()
    said = (tmp_path / "said").read_text()
    if "Ray did not start" in said:
        pytest.skip("the machine is so busy that Ray gave up on its own processes")
    assert ray.exitcode == 2, said
    assert "the way was lost" in said
    own = job(tmp_path / "here", "run", "orthogonal-dropout")
    make(own)
    assert bytes_and_figures(tmp_path / "ray/digits/orthogonal-dropout/seed-0") == bytes_and_figures(own.run)


def test_a_ray_that_does_not_start_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nSee the logs.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    expected = r"^Ray did not start \(The current node timed out during startup\.\): try again, or leave --on ray out$"
    with pytest.raises(PluresError, match=expected), launcher_for("ray", 1):
        pass


@pytest.mark.parametrize("width", [60, 200])
def test_the_live_list_shows_the_last_line_of_each_run_however_narrow_the_terminal(tmp_path: Path, width: int) -> None:
    long = Job(SHORT, Variant("mimo", label="a name of many words " * 4), tmp_path / "long", "digits")
    long.run.mkdir()
    (long.run / OUTPUT).write_text("before\n" + "member 0 train  epoch 3/30  loss 0.123 " * 4 + "\n")
    display = RunsDisplay(2)
    display.show([long, job(tmp_path, "new")])
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(display.get_renderable())
    shown = "".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "…" not in shown
    assert shown.count("member0trainepoch3/30loss0.123") == 4
    assert "".join(long.name.split()) in shown
    assert "starting" in shown
    assert "0of2runsaredone" in shown
