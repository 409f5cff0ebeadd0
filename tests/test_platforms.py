"""What Linux has and Windows or macOS do not: files, signals, groups of processes, `fork`, text that is UTF-8."""

import errno
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import plures
from networks import images, labels, mlp
from plures.lab.cli.main import main
from plures.lab.compare.compare import Child
from plures.lab.runs.open import device_for
from plures.native import library
from short import start_in_this_process

NEITHER = {
    os: ("fork", "killpg", "getuid", "geteuid", "sched_getaffinity", "register_at_fork", "setsid"),
    signal: ("SIGHUP", "SIGKILL", "SIGALRM"),
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what Windows has not, and let it refuse what it refuses."""
    fcntl = pytest.importorskip("fcntl")
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for module, names in NEITHER.items():
        for name in names:
            monkeypatch.delattr(module, name)


@pytest.mark.usefixtures("windows")
def test_an_ensemble_is_saved_and_loaded(tmp_path: Path) -> None:
    ensemble = plures.DeepEnsemble(mlp(), 2)
    ensemble.fit([(images(), labels())], epochs=1, progress=False, checkpoint=tmp_path / "state")
    ensemble.save(tmp_path / "one.safetensors")
    loaded = plures.load(tmp_path / "one.safetensors", mlp())
    assert torch.equal(loaded(images()), ensemble(images()))
    ensemble.save(tmp_path / "one.safetensors")  # over the one that was loaded


@pytest.mark.usefixtures("windows")
def test_runs_are_compared_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_charts: None) -> None:
    monkeypatch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
    runs = str(tmp_path / "runs")
    assert main(["compare", "digits-smoke", "--methods", "deterministic", "--runs", runs]) == 0
    assert main(["report", runs, "--out", str(tmp_path / "report.html")]) == 0


@pytest.mark.usefixtures("windows")
def test_a_process_ends_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signal, "SIGKILL", 9, raising=False)  # Python's own module for processes uses it on Linux
        child = Child(["train", "digits", "--run", str(tmp_path / "run")], tmp_path / "output.txt", 0)
        child.end()
    assert child.returncode is not None


def test_there_is_no_native_library_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    library._load_once.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "win32")
            assert "supports Linux and macOS" in str(library.why_unavailable())
            ensemble = plures.OrthogonalDropout(mlp(), 2, optimize_masks=False)
            for _ in ensemble.stages():
                pass
            assert ensemble.engine().predict(images()).members.shape[0] == 2
    finally:
        library._load_once.cache_clear()


def test_text_is_utf_8_everywhere() -> None:
    for path in Path(plures.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        for call in (".read_text()", ".write_text(text)", "read_text(errors"):
            assert call not in text, f"{path}: {call} means another encoding on Windows"


def test_torch_for_gpus_on_a_computer_without_one_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")  # as pip installs it on Linux

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert device_for() == torch.device("cpu")


def stage_loss(stage: plures.Stage, loader: DataLoader) -> float:
    return sum(float(stage(x, y).detach()) for x, y in loader)


@pytest.mark.slow
def test_workers_are_spawned_as_on_windows_and_macos() -> None:
    data = TensorDataset(images(12), labels(12))
    loader = DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context="spawn")
    stage = next(iter(plures.OrthogonalDropout(mlp(), 2).stages()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = stage_loss(stage, DataLoader(data, batch_size=6))
        assert stage_loss(stage, loader) == pytest.approx(expected)
