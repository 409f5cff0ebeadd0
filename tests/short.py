"""The smallest runs that a comparison can be made of, and a launcher that trains them in this process."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from plures.lab.cli.main import main
from plures.lab.compare import Job
from plures.lab.compare.compare import RunsDisplay, Start, run_all
from plures.lab.recipes import Epochs, get_recipe

SHORT = replace(
    get_recipe("digits"),
    width=16,
    members=2,
    limit=120,
    validation=40,
    epochs=Epochs(pretrain=1, prune=1, finetune=1, train=2),
)
SHORT_WORDS = [
    *("--width", "16", "--members", "2", "--limit", "120", "--validation", "40"),
    *("--epochs.pretrain", "1", "--epochs.prune", "1", "--epochs.finetune", "1", "--epochs.train", "2"),
]
METHODS = ("deterministic", "orthogonal-dropout", "deep-ensemble")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int

    def poll(self) -> int:
        return self.code

    def end(self) -> None:
        pass


def start_in_this_process(words: Sequence[str], output: Path, _place: int = 0) -> Done:
    """Execute a command in this process, where torch is loaded already: for tests of what comes of it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(words))
    output.write_text(said.getvalue())
    return Done(code)


@contextmanager
def launcher_here(*_: object) -> Iterator[tuple[Start, int]]:
    """Take the place of the launcher that a comparison would open."""
    yield start_in_this_process, 1


def make(*jobs: Job) -> None:
    """Train runs in this process."""
    failures = run_all(jobs, start_in_this_process, 1, None, RunsDisplay(len(jobs)))
    assert not failures, failures
