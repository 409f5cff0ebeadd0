"""What releases are made and checked with."""

import json
import re
from pathlib import Path

import torch

import plures
from release import gpu_check

ROOT = Path(__file__).parent.parent


def test_the_version_is_one_everywhere():
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert cited == newest == plures.__version__
    table = (ROOT / "docs" / "versions.md").read_text()
    lowest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert re.search(rf"\| {lowest}[.\d]* \| lowest declared \| works \|", table), "the lowest torch was tried"


def test_every_package_has_hashes_and_the_version_that_is_tested():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    text = (ROOT / "release" / "requirements.txt").read_text()
    listed = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    assert {name: version for name, version in listed.items() if pinned.get(name, version) != version} == {}
    for block in re.split(r"\n(?=\w)", text.partition("\n")[2]):
        assert "--hash=sha256:" in block, block
    assert "://" not in text, "no host is named"


def test_without_a_gpu_its_parts_are_skipped_for_a_reason(tmp_path, capsys):
    out = tmp_path / "found.json"
    parts = ["tests of every method", "no step waits", "predictions as on the CPU"]
    assert gpu_check.main(["--device", "cpu", "--out", str(out), "--only", *parts]) == 0
    found = json.loads(out.read_text())
    assert all("finds no accelerator on this computer" in found[part]["skipped"] for part in parts)
    assert found["machine"]["device"] == "cpu"
    assert "skipped: torch" in capsys.readouterr().out


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    def broken(_: torch.device) -> dict[str, object]:
        raise RuntimeError("out of memory")

    parts = {"one": (broken, False), "two": (lambda _: {"passed": True}, False)}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path / "found.json")]) == 1
    printed = capsys.readouterr().out
    assert "one: FAILED" in printed
    assert "two: passed" in printed


def test_predictions_of_two_devices_are_compared(monkeypatch):
    monkeypatch.setattr(gpu_check, "METHODS", {"OrthogonalDropout": {"members": 2}, "PackedEnsemble": {"members": 2}})
    found = gpu_check.same_as_cpu(torch.device("cpu"))
    assert found["passed"]
    assert set(found["largest differences"].values()) == {0.0}


def test_the_step_that_must_not_wait_is_taken_for_every_stage(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(gpu_check, "METHODS", {"OrthogonalDropout": {"members": 2}})
    assert gpu_check.no_waiting(torch.device("cpu"))["passed"]
    assert modes == ["error", "default"] * 5, "two members have five stages"
