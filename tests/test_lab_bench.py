"""The benchmark measures what it says, on networks small enough for a test; no time is ever asserted."""

import json
import math

import pytest
import torch

from plures.lab.models import resnet8
from plures.lab.timing.bench import inference, size, suite
from plures.lab.timing.bench.inference import affordable_ratios, bf16_ratio, stacked
from plures.lab.timing.bench.measure import LeftOut, Ratio, race, ratio
from plures.lab.timing.bench.methods import MethodCost
from plures.lab.timing.bench.size import allocator_peak, memory_ratios
from plures.lab.timing.bench.subjects import CLASSES, Subject, finished, images
from plures.lab.timing.bench.training import TextbookTopK, data_ratios
from plures.methods.orthogonal_dropout.masks import TopK

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


def test_a_race_may_start_cold() -> None:
    runs: list[str] = []
    list(race("here", lambda: runs.append("base"), {"one": lambda: runs.append("one")}, rounds=1, warm_up=False))
    assert runs == ["base", "one", "base"]


def test_bars_may_be_lower_or_upper_bounds() -> None:
    assert ratio("a", "b", [1.0, 3.0, 2.0], bar=2.0).met
    assert ratio("a", "b", [1.0, 3.0, 2.0], bar=1.9).met is False
    assert ratio("a", "b", [11.0], bar=10.0, at_least=True).met


def test_every_part_measures_something_finite(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(size, "CLEAR_REFS", tmp_path / "absent")
    found = [
        *suite.large_ratios(SMALL, "float32", batches=(1, 2), rounds=1),
        *data_ratios(rounds=1, steps=2),
        bf16_ratio(SMALL, rounds=1),
        inference.side_by_side_ratio(SMALL, batch=1, rounds=1, members=2),
    ]
    steps, files, memory, predictions = 2, 5, 3, 2 * 4
    assert len(found) == steps + files + memory + predictions + 1 + 1 + 1
    assert all(isinstance(one, Ratio) and math.isfinite(one.value) and one.value > 0 for one in found)


def test_the_allocator_is_read_at_its_peak() -> None:
    before = [torch.empty(1000)]

    def work() -> None:
        first = torch.empty(2500)
        second = torch.empty(250)
        del first
        before.clear()  # no part of what the action allocated
        third = torch.empty(250)
        del second, third

    assert allocator_peak(work, torch.device("cpu")) == 4 * (2500 + 250)


def test_memory_is_counted_in_networks(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(size, "CLEAR_REFS", tmp_path / "absent")
    found = {one.name.split(" peak")[0]: one for one in memory_ratios(SMALL, rounds=1, batch=2)}
    assert list(found) == ["lean", "unfolded", "5 separate networks"]
    assert found["5 separate networks"].value == pytest.approx(5, abs=0.1)
    assert found["unfolded"].value == pytest.approx(5, abs=0.3)
    assert 1 < found["lean"].value < 2.5  # norm layers weigh much in so small a network


@pytest.mark.skipif(not size.CLEAR_REFS.exists(), reason="resident memory has a peak to reset on Linux alone")
def test_resident_memory_is_measured(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(size, "RESNET18", SMALL)
    size.save(finished(SMALL.make()), tmp_path / "ensemble")
    assert size._resident("small", "unfolded", tmp_path / "ensemble", 1) > 2**20


def test_what_would_take_too_long_is_left_out_with_the_reason(monkeypatch) -> None:
    asked = []

    def predicted(subject, batch, precision, rounds, **more):
        asked.append((batch, rounds, more["engines_only"]))
        return iter(())

    monkeypatch.setattr(inference, "prediction_ratios", predicted)
    monkeypatch.setattr(inference, "seconds", lambda action: action() or 0.04)  # 0.2 s for five
    (left_out,) = affordable_ratios(SMALL, [1, 16, 32, 128], "float32", rounds=3)
    assert asked == [(1, 3, False), (16, 3, False), (32, 1, True)]
    assert str(left_out) == (
        "prediction / 5 plain networks (small, batch 128, float32): left out, "
        "a pass of 5 plain networks would take 26 s, more than 5 s"
    )


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
    left_out = LeftOut("e / f", "elsewhere", "it is too slow")
    suite.write(tmp_path / "out", [*found, left_out], [MethodCost("DeepEnsemble", 5, 5.0, 5.0, 1.0, 5.0)])
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["met"] for one in document["ratios"]] == [True, False, None]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| a / b | here | 1.020 | 1.000 to 1.100 | <= 1.05 met |" in text
    assert "**missed**" in text
    assert "| e / f | elsewhere | | | left out: it is too slow |" in text
    assert "| DeepEnsemble | 5 | 5.00 | 5.00 | 1.00 | 5.00 |" in text


@pytest.mark.parametrize("name", ["OrthogonalDropout", "DeepEnsemble"])
def test_the_cost_of_a_method_is_relative_to_the_plain_network(monkeypatch, name: str) -> None:
    from plures.lab.timing.bench import methods

    monkeypatch.setattr(methods, "RESNET18", SMALL)
    monkeypatch.setattr(methods, "METHODS", {name: methods.METHODS[name]})
    (cost,) = methods.method_costs(batch=2, precision="float32", rounds=1)
    assert cost.members == 5
    expected = 5.0 if name == "DeepEnsemble" else 1.0
    assert cost.parameters == pytest.approx(expected, rel=0.2)
    assert abs(cost.file - expected) < 1  # the header weighs much in so small a file
