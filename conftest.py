"""What all tests share: the names that examples use without an import, and a cache of their own."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import plures
from plures.lab.models import resnet18
from plures.native import library

# The compiler would start processes of its own, each of which imports torch, for the few graphs that tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_sessionstart() -> None:
    """Skip no native test without being asked to."""
    reason = library.why_unavailable()
    if reason is not None and os.environ.get("PLURES_NATIVE") != "0":
        pytest.exit(f"{reason}; to run the other tests, set PLURES_NATIVE=0", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among modules and tests, which takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # they stay to the end
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(np=np, torch=torch, nn=nn, plures=plures, resnet18=resnet18)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither read nor write the user's cache, nor see the user's data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLURES_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PLURES_DATA", raising=False)
        yield


@pytest.fixture
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test use a cache and a working directory of its own."""
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
