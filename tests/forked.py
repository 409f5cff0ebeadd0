"""Processes that have what this one has imported: for promises that need another process, but not a new one."""

import contextlib
import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# Where torch has devices, its gradients do not survive a fork.
CONTEXT = multiprocessing.get_context("spawn" if torch.accelerator.is_available() else "fork")


def start(target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start a process, which ends with this one at the latest."""
    process = CONTEXT.Process(target=_with_one_thread, args=(target, args), daemon=True)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # there, a warning of somebody else's code is no error; nor is forking here
        process.start()
    return process


def _with_one_thread(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # threads are not forked
    target(*args)


@contextlib.contextmanager
def told_to(path: Path) -> Any:
    """Write all that is printed by Python to a file."""
    with path.open("w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield file
