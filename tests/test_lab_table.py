"""Regression in the laboratory: the embedded table, from its rows to a comparison."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes
from sklearn.metrics import root_mean_squared_error
from sklearn.preprocessing import StandardScaler

import plures
from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.data import open_data
from plures.lab.data.numbers import share_out
from plures.lab.runs.open import open_run
from short import pool_here

SHORT = [
    *("--members", "2", "--epochs.pretrain", "2", "--epochs.prune", "1", "--epochs.finetune", "2"),
    *("--epochs.train", "2"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "diabetes", "--run", str(folder / "split"), *SHORT]) == 0
    words = ["compare", "diabetes", "--methods", "deterministic", "deep-ensemble"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plures.lab.compare.compare._pool", pool_here)
        assert main([*words, "--runs", str(folder), *SHORT]) == 0
    return folder


@given(count=st.integers(5, 500), validation=st.sampled_from([0, 0.1, 0.5, 1, 3]), seed=st.integers(0, 9))
def test_parts_share_out_all_rows_and_the_test_rows_never_change(count: int, validation: float, seed: int) -> None:
    parts = share_out(count, None, validation, seed)
    everything = np.concatenate(list(parts.values()))
    assert sorted(everything.tolist()) == list(range(count))
    assert np.array_equal(parts["test"], share_out(count, None, 0, 0)["test"])


def test_rows_are_standardised_by_the_training_rows_alone() -> None:
    data = open_data("diabetes", validation=0.2, seed=1)
    columns, values = load_diabetes(return_X_y=True)
    scaler, target = StandardScaler().fit(columns[data.train.rows]), StandardScaler()
    target.fit(values[data.train.rows][:, None])
    own = data.normalise(torch.from_numpy(data.test.images)).flatten(1).numpy()
    np.testing.assert_allclose(own, scaler.transform(columns[data.test.rows]), atol=1e-5)
    np.testing.assert_allclose(data.test.labels, target.transform(values[data.test.rows][:, None]), atol=1e-5)
    assert data.fingerprint != open_data("diabetes", validation=0.2, seed=2).fingerprint


def test_a_run_of_numbers_is_measured_as_its_ensemble_answers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(runs / "split"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["test"]
    run = open_run(runs / "split")
    test = run.data(None).test
    answer = run.ensemble.regress(run.info.normalise(torch.from_numpy(test.images)))
    assert found["rmse"] == pytest.approx(root_mean_squared_error(test.labels, answer.mean.numpy()), rel=1e-5)
    lower, upper = answer.interval(0.9)
    assert found["interval_coverage"] == plures.metrics.interval_coverage(lower, upper, torch.from_numpy(test.labels))
    assert found["calibrated_nll"] == pytest.approx(
        plures.metrics.gaussian_nll(answer.mean, answer.std, torch.from_numpy(test.labels)), rel=1e-5
    )
    assert isinstance(run.ensemble.loss, plures.GaussianNLL)


def test_numbers_are_compared_by_their_own_columns(runs: Path) -> None:
    table = (runs / "diabetes" / "results.md").read_text()
    assert "RMSE" in table
    assert "CRPS" in table
    assert "accuracy" not in table


def test_a_run_of_numbers_is_shared_with_a_card_of_its_own(runs: Path, tmp_path: Path, monkeypatch) -> None:
    plures.push_to_hub(runs / "split", tmp_path / "diabetes")
    card = (tmp_path / "diabetes/README.md").read_text()
    measured = json.loads((runs / "split/metrics.json").read_text())
    assert f"| root mean squared error | {measured['rmse']:.4f} |" in card
    assert "test rows of diabetes" in card
    for word in ("Classifying", "pixels", "picture"):
        assert word not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"inputs": torch.randn(3, 10, 1, 1)}
    exec(code, names)
    assert torch.equal(names["prediction"].mean, open_run(runs / "split").ensemble.regress(names["inputs"]).mean)


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "split", "wren.png"],
        ["evaluate", "split", "--shift"],
        ["export", "split", "split.onnx"],
        ["serve", "split"],
        ["report", "split", "--out", "report.html"],
    ],
)
def test_what_is_for_pictures_says_so(runs: Path, words: list[str], capsys, monkeypatch) -> None:
    monkeypatch.chdir(runs)
    assert main(words) == 2
    assert "predicts numbers from a table" in capsys.readouterr().err


def test_a_table_has_no_size_and_too_many_held_out_rows_are_refused() -> None:
    with pytest.raises(PluresError, match="is a table of numbers"):
        open_data("diabetes", size=8)
    with pytest.raises(PluresError, match="cannot be held out from 354 training rows"):
        open_data("diabetes", validation=354)
