"""What the last version wrote is read by this one: files of every method, and run folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import plures
from plures.lab.cli.main import main

WRITTEN = Path(__file__).parent / "data" / "v0.1"
EXPECTED = json.loads((WRITTEN / "files" / "expected.json").read_text())


def network() -> nn.Module:
    """The network that the files were made from; its weights do not matter."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_the_last_version_predicts_as_it_did(name: str) -> None:
    ensemble = plures.load(WRITTEN / "files" / f"{name}.safetensors", network())
    inputs = torch.linspace(-1, 1, 3 * 16).reshape(3, 1, 4, 4)
    torch.testing.assert_close(ensemble.predict(inputs).members, torch.tensor(EXPECTED[name]))


def test_a_half_trained_file_of_the_last_version_goes_on() -> None:
    ensemble = plures.load(WRITTEN / "files" / "OrthogonalDropout-partial.safetensors", network())
    names = [stage.name for stage in ensemble.stages()]
    assert names == ["member 1 prune", "member 1 finetune", "member 2 pretrain", "member 2 finetune"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(WRITTEN / "runs", tmp_path / "runs")


@pytest.mark.parametrize("name", ["orthogonal-dropout", "deep-ensemble", "mc-dropout"])
def test_a_finished_run_of_the_last_version_is_measured_as_it_was(
    name: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["test"]
    expected = json.loads((runs / name / "metrics.json").read_text())
    for key in ("accuracy", "nll", "ece", "calibrated_nll"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    Image.fromarray(np.full((8, 8), 100, np.uint8)).save(runs / "one.png")
    assert main(["predict", str(runs / name), str(runs / "one.png")]) == 0


@pytest.mark.slow
def test_runs_of_the_last_version_stand_in_a_report(runs: Path) -> None:
    shutil.rmtree(runs / "orthogonal-dropout-cut")
    assert main(["report", str(runs), "--out", str(runs / "report.html")]) == 0
    page = (runs / "report.html").read_text()
    assert all(name in page for name in ("orthogonal-dropout", "deep-ensemble", "mc-dropout"))


def test_a_cut_run_of_the_last_version_goes_on(runs: Path) -> None:
    words = ["--members", "3", "--width", "8", "--limit", "200", "--validation", "50", "--epochs.pretrain", "2"]
    words += ["--epochs.prune", "1", "--epochs.finetune", "2", "--epochs.train", "2"]
    cut = runs / "orthogonal-dropout-cut"
    before = (cut / "log.jsonl").read_text().splitlines()
    assert main(["train", "digits", *words, "--run", str(cut)]) == 0
    after = (cut / "log.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert main(["evaluate", str(cut)]) == 0
