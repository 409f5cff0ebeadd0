"""The benchmark measures what it says, on networks small enough for a test; no time is ever asserted."""

import importlib.util
import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from plures.lab.method_names import kebab
from plures.lab.models import resnet8
from plures.lab.recipes import get_recipe
from plures.lab.timing import bench, costs, estimates, owned_engine, size, speed
from plures.lab.timing.costs import MethodCost
from plures.lab.timing.harness import CLASSES, LeftOut, Ratio, Subject, finished, images, race, timed
from plures.lab.timing.size import allocator_peak, memory_ratios
from plures.lab.timing.speed import TextbookTopK, affordable_ratios, bf16_ratios, data_ratios, stacked
from plures.methods.orthogonal_dropout.masks import TopK
from plures.native import library

ROOT = Path(__file__).parent.parent
_source = importlib.util.spec_from_file_location("make_benchmark", ROOT / "docs/make/benchmark.py")
assert _source is not None
assert _source.loader is not None
pages = importlib.util.module_from_spec(_source)
_source.loader.exec_module(pages)

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


def test_a_bar_is_for_the_median() -> None:
    assert Ratio.of("a", "b", [1.0, 3.0, 2.0], bar=2.0).met
    assert Ratio.of("a", "b", [1.0, 3.0, 2.0], bar=1.9).met is False


def test_what_is_short_is_repeated_and_timed_once_per_round() -> None:
    ticks = iter(range(100))
    runs: list[int] = []
    (found,) = timed([lambda: runs.append(1)], rounds=2, clock=lambda: float(next(ticks)), shortest=4.0)
    assert len(runs) == 1 + 1 + 2 * 4, "to warm up, to see how short it is, and four times in each round"
    assert found == [0.25, 0.25]


def test_every_part_measures_something_finite(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(size, "CLEAR_REFS", tmp_path / "absent")
    found = [
        *bench.large_ratios(SMALL, "float32", batches=(1, 2), rounds=1),
        *data_ratios(rounds=1, steps=2),
        *bf16_ratios(SMALL, 2, rounds=1),
    ]
    steps, files, memory, predictions = 3, 5, 3, 2 * 4
    assert len(found) == steps + files + memory + predictions + 1 + 2
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


@pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
def test_memory_of_the_owned_engine_is_its_weights_and_scratch(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(owned_engine, "held", lambda network: 1000)
    monkeypatch.setattr(owned_engine, "owned_memory", lambda subject, granularity, rounds: [1300, 1500, 1400])
    ratio = owned_engine.memory_ratio(SMALL, "kernel", bar=1.3)
    assert (ratio.value, ratio.low, ratio.high, ratio.met) == (1.4, 1.3, 1.5, False)
    assert "less the tensors of that batch" in ratio.setting
    monkeypatch.setattr(size, "CLEAR_REFS", tmp_path / "absent")
    (elsewhere,) = size.owned_memory(SMALL, "kernel", rounds=1)
    assert 1 < elsewhere / size.held(SMALL.make()) < 2  # norm layers weigh much in so small a network


@pytest.mark.skipif(not size.CLEAR_REFS.exists(), reason="resident memory has a peak to reset on Linux alone")
@pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
def test_what_an_engine_holds_is_seen_in_resident_memory(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(size, "RESNET18", SMALL)
    size.save(finished(SMALL.make(), granularity="kernel"), tmp_path / "ensemble")
    held = 64 * 2**20
    monkeypatch.setitem(size.MAKERS, "owned", lambda subject, path: Ballast(held))
    (grown,) = size._owned_growth("small", tmp_path / "ensemble", batch=8, rounds=1)
    assert grown == pytest.approx(held, rel=0.1), "its tensors and its scratch; the 16 MB of activations do not count"


class Ballast(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(size // 2 // 4))
        self.scratch = size // 2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        activations = torch.ones(16 * 2**20 // 4)
        scratch = bytearray(self.scratch)  # not of torch's allocator
        scratch[::4096] = b"1" * len(scratch[::4096])
        return inputs + activations[0]


def test_what_would_take_too_long_is_left_out_with_the_reason(monkeypatch) -> None:
    asked = []

    def predicted(subject, batch, precision, rounds, **more):
        asked.append((batch, rounds, more["engines_only"]))
        return iter(())

    monkeypatch.setattr(speed, "prediction_ratios", predicted)
    monkeypatch.setattr(speed.harness, "timed", lambda actions, rounds: [[0.05, 0.04]])  # 0.2 s for five
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
        expected = torch.stack([network(images(3)[0]) for network in networks])
        torch.testing.assert_close(stacked(networks)(images(3)[0]), expected, atol=1e-4, rtol=1e-4)


def test_results_are_written_for_people_and_machines(tmp_path) -> None:
    found = [Ratio("a / b", "here", 1.02, 1.0, 1.1, bar=1.05), Ratio("c / d", "there", 2.0, 2.0, 2.0, bar=1.0)]
    left_out = LeftOut("e / f", "elsewhere", "it is too slow")
    bench.write(tmp_path / "out", [*found, left_out], [MethodCost("DeepEnsemble", 5, 5.0, 5.0, 1.0, 5.0)])
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["met"] for one in document["ratios"]] == [True, False, None]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| a / b | here | 1.020 | 1.000 to 1.100 | <= 1.05 met |" in text
    assert "**missed**" in text
    assert "| e / f | elsewhere | | | left out: it is too slow |" in text
    assert "| DeepEnsemble | 5 | 5.00 | 5.00 | 1.00 | 5.00 |" in text


def test_readme_and_engines_say_what_the_benchmark_found() -> None:
    document = json.loads((ROOT / "benchmarks/results.json").read_text())
    for name in ("README.md", "docs/engines.md"):
        text = (ROOT / name).read_text()
        assert pages.included(text, document) == text, "run docs/make/benchmark.py"


def test_the_figures_of_the_owned_engine_are_put_between_the_marks() -> None:
    setting = "ResNet18, batch {}, kernel granularity, float32, avx2, 2 threads"
    found = [
        Ratio(pages.FIVE, setting.format(batch), value, 1.2, 1.9, bar=1.5)
        for batch, value in ((1, 1.81), (16, 1.449), (128, 1.5))
    ]
    document = {
        "machine": {"processor": "P", "instructions": "AVX2", "threads": 2, "torch": "2"},
        "ratios": [asdict(one) | {"met": one.met} for one in found],
    }
    readme = pages.included((ROOT / "README.md").read_text(), document)
    assert "cost 1.4 to 1.8 networks**, not 5, to predict (avx2, 2 threads, batches of 1 to 128;" in readme
    engines = pages.included((ROOT / "docs/engines.md").read_text(), document)
    assert f"| {pages.FIVE} | {setting.format(1)} | 1.81 | 1.20 to 1.90 | <= 1.5 **missed** |" in engines
    assert pages.included(engines, document) == engines


@pytest.mark.parametrize("name", ["OrthogonalDropout", "DeepEnsemble"])
def test_the_cost_of_a_method_is_relative_to_the_plain_network(monkeypatch, name: str) -> None:
    monkeypatch.setattr(costs.harness, "RESNET18", SMALL)
    monkeypatch.setattr(costs, "METHOD_NAMES", {kebab(name): name})
    (cost,) = costs.method_costs(batch=2, precision="float32", rounds=1)
    assert cost.members == 5
    expected = 5.0 if name == "DeepEnsemble" else 1.0
    assert cost.parameters == pytest.approx(expected, rel=0.2)
    assert abs(cost.file - expected) < 1  # the header weighs much in so small a file


def test_an_estimate_is_made_once_and_listed_without_measuring(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path))
    recipe = get_recipe("digits")
    assert estimates.kept_estimate(recipe) is None
    first = estimates.estimate(recipe)
    assert first is not None
    assert first.epochs == 5 * (30 + 30) + 4 * 3
    assert first.seconds > 0
    monkeypatch.setattr(estimates, "_measure", lambda *_: pytest.fail("measured again"))
    assert estimates.estimate(replace(recipe, seed=7)) == first
    assert estimates.kept_estimate(recipe) == first
    assert estimates.kept_estimate(recipe, "deep-ensemble") is None
    assert estimates.kept_estimate(replace(recipe, width=8)) is None
    monkeypatch.setattr(estimates, "processor", lambda: "another one")
    assert estimates.kept_estimate(recipe) is None


def test_an_estimate_that_cannot_be_kept_or_read_is_made_all_the_same(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "estimates.json").write_text("[broken")
    found = estimates.Estimate(epochs=1, seconds=2.0, bytes=3)
    monkeypatch.setattr(estimates, "_measure", lambda *_: found)
    for cache in (tmp_path / "file", tmp_path):
        monkeypatch.setenv("PLURES_CACHE", str(cache))
        assert estimates.estimate(get_recipe("digits")) == found
    assert estimates.kept_estimate(get_recipe("digits")) == found
    assert estimates.estimate(replace(get_recipe("digits"), data="mine")) is None


def test_a_busy_machine_does_not_make_an_estimate_longer(monkeypatch) -> None:
    """Other processes take 1,000 s of the clock on the wall at every step, and one step in two is slow by itself."""
    wall, work = itertools.count(0.0, 1000.0), itertools.cycle([1e-3, 5.0])
    worked = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: worked[0])

    class Stage(nn.Module):
        engine = None

        def parameter_groups(self, weight_decay: float) -> list[nn.Parameter]:
            return [self.weight]

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            worked[0] += next(work)
            return self.weight.sum()

    recipe = replace(get_recipe("digits"), batch_size=16)
    assert estimates.seconds_per_step(Stage(), recipe, channels=1, size=8) == pytest.approx(1e-3)


def test_kept_estimates_are_read_without_torch() -> None:
    code = "import sys; from plures.lab.timing.estimates import kept_estimate; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
