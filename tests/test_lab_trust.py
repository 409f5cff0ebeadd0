"""Runs are calibrated, promise, and are measured away from home: as a user asks for it."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plures import metrics
from plures.calibration import ClassCalibration
from plures.lab.cli.main import main
from plures.lab.evaluation.evaluate import evenly, predictions, told_apart
from plures.lab.runs.open import open_run
from trust_measured import at_home, kept_trust, measured_trust
from trust_promises import promises

ROOT = Path(__file__).parent.parent
SMALL = ["--epochs.train", "4", "--epochs.pretrain", "2", "--epochs.prune", "1", "--epochs.finetune", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """One network and a split one, trained for a moment on digits."""
    folder = tmp_path_factory.mktemp("runs")
    for method, more in (("deterministic", []), ("orthogonal-dropout", ["--members", "2"])):
        words = ["train", "digits", "--method", method, "--run", str(folder / method), *more, *SMALL]
        assert main(words) == 0
    return folder


def test_training_calibrates_on_the_validation_images_and_reports_both_numbers(runs: Path) -> None:
    run = open_run(runs / "orthogonal-dropout")
    found = json.loads((runs / "orthogonal-dropout" / "metrics.json").read_text())
    data = run.data(None)
    calibration = run.ensemble.calibration
    assert calibration.temperature == pytest.approx(found["temperature"])
    assert len(calibration.probability) == len(data.validation)
    before, after = calibration.nll.tolist()
    assert after <= before
    members, targets = predictions(run.ensemble, data.test)
    calibrated = calibration.probabilities(members)
    assert metrics.nll(calibrated, targets) == pytest.approx(found["calibrated_nll"])
    assert metrics.ece(calibrated, targets) == pytest.approx(found["calibrated_ece"])
    assert found["nll"] == pytest.approx(metrics.nll(members.mean(0), targets))


def test_predict_promises(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "a.png")
    words = ["predict", str(runs / "deterministic"), str(tmp_path / "a.png"), "--coverage", "0.9"]
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["predictions"]
    assert set(answer["classes"]) <= set(map(str, range(10)))
    assert main(words) == 0
    assert "one of" in capsys.readouterr().out
    assert main([*words, "--risk", "0.5"]) == 0
    assert main([*words, "--risk", "0.0001"]) == 2
    assert "needs at least" in capsys.readouterr().err
    assert main([*words[:3], "--coverage", "2"]) == 2
    assert "coverage=2.0; use a number between 0 and 1" in capsys.readouterr().err


def test_trust_is_measured_once_and_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs / "orthogonal-dropout"
    monkeypatch.setattr("plures.lab.evaluation.evaluate.SHIFT_IMAGES", 20)
    told: list[str] = []
    found = measured_trust(folder, None, "digits", told.append)
    assert found["shift"]["images"] == 20
    assert [words for words in told if words.startswith("under shift, 11 of 11: jpeg on 20 images")]
    assert len(found["shift"]["rows"]) == 55
    assert [one["severity"] for one in found["shift"]["by_severity"]] == [1, 2, 3, 4, 5]
    assert found["ood"]["scores"][0]["auroc"] == pytest.approx(0.5)  # the same images cannot be told apart
    assert kept_trust(folder) == json.loads(json.dumps(found))
    with monkeypatch.context() as patch:
        patch.setattr("trust_measured.open_run", lambda *a: pytest.fail("measured again"))
        assert measured_trust(folder, None, "digits", told.append) == kept_trust(folder)
    # Figures of two strengths of fog would stand in one table.
    monkeypatch.setattr("trust_measured.CONSTANTS", "of another fog")
    monkeypatch.setattr("plures.lab.evaluation.evaluate.SHIFT_IMAGES", 10)
    assert measured_trust(folder, None, "digits", told.append)["shift"]["images"] == 10


def test_the_page_of_trust_is_made_of_runs(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plures.lab.evaluation.evaluate.SHIFT_IMAGES", 20)
    source = importlib.util.spec_from_file_location("make_trust", ROOT / "docs/make/trust.py")
    made = importlib.util.module_from_spec(source)
    source.loader.exec_module(made)
    made.main([str(runs), "--ood", "digits", "--out", str(tmp_path / "trust.md")])
    page = (tmp_path / "trust.md").read_text()
    assert "{" not in page
    assert page.count("| orthogonal-dropout") >= page.count("| deterministic |") >= 5
    single = next(
        line for line in page.split("## Out-of-distribution")[1].splitlines() if line.startswith("| deterministic")
    )
    assert single.split("|")[4].strip() == "-"  # a single network disagrees with nobody
    assert "python docs/make/trust.py runs/digits" in page
    assert str(runs) not in page
    pictures = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert pictures == [f"trust-{name}.svg" for name in ("risk-coverage", "shift")]
    for name in pictures:
        assert f"results/{name}" in page


def test_what_is_measured_at_home_is_what_the_metrics_say() -> None:
    random = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (300,), generator=random)
    logits = torch.randn(3, 300, 4, generator=random) + 2 * torch.nn.functional.one_hot(targets, 4)
    members = logits.softmax(-1)
    calibration = ClassCalibration.fit(members, targets)
    found = at_home(members, targets) | promises(calibration, members, targets)
    assert found["home"]["nll"] == metrics.nll(members.mean(0), targets)
    assert found["risk_coverage"]["risk"][-1] == pytest.approx(1 - found["home"]["accuracy"])
    assert found["calibrated"]["nll"] <= found["home"]["nll"]
    assert all(one["covered"] >= 0.9 for one in found["sets"])
    for one in found["bounded"]:
        kept = calibration.selection(one["risk"], delta=0.05).threshold <= members.mean(0).amax(1).double()
        assert one["answered"] == pytest.approx(float(kept.double().mean()))
        assert one["wrong"] <= one["risk"]
    apart = told_apart(members, torch.full((3, 50, 4), 0.25))
    assert [one["score"] for one in apart][-1] == "mutual information"
    alone = told_apart(members[:1], torch.full((1, 50, 4), 0.25))
    assert [one["score"] for one in alone] == ["1 - max p", "entropy"]


def test_sentences_follow_from_the_figures() -> None:
    import trust_sentences as say

    def found(nll: float, covered: float, wrong: float) -> dict:
        return {
            "home": {"nll": 1.0, "members": 5, "images": 10_000},
            "calibrated": {"nll": nll, "held_out": 1000, "accuracy": 0.7},
            "sets": [{"asked": 0.9, "covered": covered}],
            "bounded": [{"risk": 0.1, "wrong": wrong}],
        }

    good, bad = found(0.9, 0.9, 0.05), found(1.2, 0.8, 0.2)
    assert say.calibration({"a": good}).endswith("it lowers the NLL of all methods.")
    assert "lowers the NLL of a, and raises the NLL of b by up to 0.200" in say.calibration({"a": good, "b": bad})
    assert "None of them falls short" in say.coverage({"a": good})
    assert "1 of 2 fall short" in say.coverage({"a": good, "b": bad})
    assert say.bounds({"a": good}) == "On the test images every bound holds."
    assert "1 of 2 bounds are exceeded, by b." in say.bounds({"a": good, "b": bad})


def test_some_images_of_a_split_are_taken_evenly(runs: Path) -> None:
    test = open_run(runs / "deterministic").data(None).test
    some = evenly(test, 50)
    assert len(some) == 50
    assert set(some.rows.tolist()) <= set(test.rows.tolist())
    assert some.rows[0] == test.rows[0]
    assert some.rows[-1] == test.rows[-1]
    assert evenly(test, 10**6) is test
