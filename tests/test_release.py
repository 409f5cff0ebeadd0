"""What releases are made and checked with."""

import json

import torch

from release import gpu_check


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
