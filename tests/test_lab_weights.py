"""Training from weights that were trained before: `--weights`."""

import json
from pathlib import Path

import pytest

from plures.lab.cli.main import main
from plures.lab.runs.open import open_run

SHORT = ["--epochs.pretrain", "1", "--epochs.prune", "1", "--epochs.finetune", "1", "--epochs.train", "2"]
SHORT += ["--width", "32", "--limit", "200", "--members", "2"]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "single"
    words = ["train", "digits", "--method", "deterministic", "--run", str(folder)]
    assert main([*words, *SHORT[:-2]]) == 0
    return folder


def stages(run: Path) -> list[str]:
    return [json.loads(line)["stage"] for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_first_member_needs_no_pretraining(single: Path, tmp_path: Path) -> None:
    assert main(["train", "digits", "--weights", str(single), "--run", str(tmp_path / "split"), *SHORT]) == 0
    assert stages(tmp_path / "split")[0] == "member 0 prune"
    assert open_run(tmp_path / "split").ensemble.options()["init"] == "given"


def test_weights_that_do_not_fit_are_refused(single: Path, tmp_path: Path, capsys) -> None:
    def refused(weights: Path, *words: str) -> str:
        assert main(["train", "digits", "--weights", str(weights), "--run", str(tmp_path / "x"), *SHORT, *words]) == 2
        return capsys.readouterr().err

    assert "1.weight: [32, 64] in the file, [48, 64] in the network" in refused(single, "--width", "48")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04N.")
    for name in ("pickle.pt", "nothing"):
        assert "is not a run folder" in refused(tmp_path / name)
    assert main(["train", "digits", "--run", str(tmp_path / "many"), *SHORT]) == 0
    assert "has several networks" in refused(tmp_path / "many")
