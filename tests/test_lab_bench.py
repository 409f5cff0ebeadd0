"""The benchmark measures what it says, on networks small enough for a test; no time is ever asserted."""

import json
import math

import pytest
import torch

from plures.lab.bench import suite
from plures.lab.bench.inference import prediction_ratios, stacked
from plures.lab.bench.measure import Ratio, race, ratio
from plures.lab.bench.methods import MethodCost
from plures.lab.bench.size import file_ratios
from plures.lab.bench.subjects import CLASSES, Subject, finished, images
from plures.lab.bench.training import TextbookTopK, data_ratios, step_ratios
from plures.lab.models import resnet8
from plures.masks import TopK

SMALL = Subject("small", lambda: resnet8(classes=CLASSES, width=8))


def test_a_race_runs_the_baseline_around_every_rival() -> None:
    runs: list[str] = []
    rivals = {"one": lambda: runs.append("one"), "two": lambda: runs.append("two")}
    found = list(race("here", lambda: runs.append("base"), rivals, rounds=2, bars={"two": 1e9}))
    assert runs == ["base", "one", "two", *["base", "one", "base", "two", "base"] * 2]
    assert [one.name for one in found] == ["one", "two"]
    assert found[0].met is None
    assert found[1].met is True
    assert all(one.low <= one.value <= one.high for one in found)


def test_bars_may_be_lower_or_upper_bounds() -> None:
    assert ratio("a", "b", [1.0, 3.0, 2.0], bar=2.0).met
    assert ratio("a", "b", [1.0, 3.0, 2.0], bar=1.9).met is False
    assert ratio("a", "b", [11.0], bar=10.0, at_least=True).met


def test_every_part_measures_something_finite() -> None:
    found = [
        *step_ratios(SMALL, 4, "float32", rounds=1),
        *prediction_ratios(SMALL, 2, "float32", rounds=1),
        *file_ratios(SMALL, rounds=1),
        *data_ratios(rounds=1, steps=2),
    ]
    assert len(found) == 2 + 4 + 5 + 1
    assert all(math.isfinite(one.value) and one.value > 0 for one in found)


def test_the_textbook_chooses_what_we_choose() -> None:
    weight = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    ours = TopK(weight, torch.ones(30, 20, dtype=torch.bool), 120)
    assert ((TextbookTopK(weight, 120)(weight) != 0) == ours.chosen()).all()


def test_vmap_predicts_what_the_networks_predict() -> None:
    ensemble = finished(SMALL.make(), members=2)
    networks = [ensemble.checkout(member) for member in range(2)]
    with torch.no_grad():
        expected = torch.stack([network(images(3)) for network in networks])
        torch.testing.assert_close(stacked(networks)(images(3)), expected, atol=1e-4, rtol=1e-4)


def test_results_are_written_for_people_and_machines(tmp_path) -> None:
    found = [Ratio("a / b", "here", 1.02, 1.0, 1.1, bar=1.05), Ratio("c / d", "there", 2.0, 2.0, 2.0, bar=1.0)]
    suite.write(tmp_path / "out", found, [MethodCost("DeepEnsemble", 5, 5.0, 5.0, 1.0, 5.0)])
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["met"] for one in document["ratios"]] == [True, False]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| a / b | here | 1.020 | 1.000 to 1.100 | <= 1.05 met |" in text
    assert "**missed**" in text
    assert "| DeepEnsemble | 5 | 5.00 | 5.00 | 1.00 | 5.00 |" in text


@pytest.mark.parametrize("name", ["OrthogonalDropout", "DeepEnsemble"])
def test_the_cost_of_a_method_is_relative_to_the_plain_network(monkeypatch, name: str) -> None:
    from plures.lab.bench import methods

    monkeypatch.setattr(methods, "RESNET18", SMALL)
    monkeypatch.setattr(methods, "METHODS", {name: methods.METHODS[name]})
    (cost,) = methods.method_costs(batch=2, precision="float32", rounds=1)
    assert cost.members == 5
    expected = 5.0 if name == "DeepEnsemble" else 1.0
    assert cost.parameters == pytest.approx(expected, rel=0.2)
    assert abs(cost.file - expected) < 1  # the header weighs much in so small a file
