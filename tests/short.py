"""The smallest runs that a comparison can be made of, trained in this process."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from plures.lab.cli.main import main
from plures.lab.compare import Job
from plures.lab.compare.compare import make_runs
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


def make(*jobs: Job) -> None:
    """Train runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
        failures = make_runs(jobs)
    assert not failures, failures
