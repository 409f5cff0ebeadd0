"""The benchmarks measure what they say, on networks small enough for a test; no time is ever asserted."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import __main__ as benchmarks
from benchmarks import pages, size, speed
from benchmarks.harness import CLASSES, LITE, PERCEPTRON, Ratio, Subject, race
from plures.lab.costs import timed
from plures.lab.method_names import kebab
from plures.lab.models import resnet8
from plures.methods.orthogonal_dropout.masks import TopK
from plures.native import library

ROOT = Path(__file__).parent.parent
SMALL = Subject("small", lambda: resnet8(classes=CLASSES, width=8))


def test_what_is_short_is_repeated_and_timed_once_per_round() -> None:
    ticks = iter(range(100))
    runs: list[int] = []
    (found,) = timed([lambda: runs.append(1)], rounds=2, clock=lambda: float(next(ticks)), shortest=4.0)
    assert len(runs) == 1 + 1 + 2 * 4, "to warm up, to see how short it is, and four times in each round"
    assert found == [0.25, 0.25]


def test_a_race_runs_the_baseline_around_every_rival() -> None:
    runs: list[str] = []
    rivals = {"one": lambda: runs.append("one"), "two": lambda: runs.append("two")}
    found = list(race("here", lambda: runs.append("base"), rivals, rounds=2, bars={"two": 1e9}))
    assert runs == ["base", "one", "two", *["base", "one", "base", "two", "base"] * 2]
    assert [one.name for one in found] == ["one", "two"]
    assert found[0].met is None
    assert found[1].met is True
    assert all(one.low <= one.value <= one.high for one in found)


def test_a_target_is_for_the_median() -> None:
    assert Ratio.of("a", "b", [1.0, 3.0, 2.0], bar=2.0).met
    assert Ratio.of("a", "b", [1.0, 3.0, 2.0], bar=1.9).met is False


def test_every_part_measures_something_finite() -> None:
    found = [
        *speed.step_ratios(SMALL, 4, rounds=1),
        *size.file_ratios(SMALL, rounds=1),
        *speed.prediction_ratios(SMALL, 2, rounds=1),
        *speed.data_ratios(rounds=1, steps=2),
        *speed.bf16_ratios(SMALL, 2, rounds=1),
    ]
    steps, files, predictions, data, bf16 = 3, 4, 2, 1, 2
    assert len(found) == steps + files + predictions + data + bf16
    assert all(math.isfinite(one.value) and one.value > 0 for one in found)


@pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
def test_the_owned_engine_is_compared_with_one_plain_network(monkeypatch) -> None:
    monkeypatch.setattr(speed, "LONG_ENOUGH", 0.0)
    peers = (speed.FIVE_NETWORKS, speed.UNFOLDED, speed.PACKED, speed.BATCH)
    owned, *others, half = speed.owned_ratios(SMALL, "kernel", 2, 1, bar=1e9, on_threads=1, peers=peers, bf16=True)
    (growth,) = speed.growth_ratios(SMALL, batch=2, rounds=1)
    assert all(0 < one.value < 1e9 for one in (owned, *others, half, growth))
    assert owned.met
    assert owned.name == pages.FIVE
    assert [one.name for one in others] == [f"{name} / one plain network" for name in peers]
    assert half.name == f"{pages.FIVE} in bf16"
    assert owned.setting.endswith("1 thread")


def test_training_together_is_compared_with_a_plain_step() -> None:
    (ratio,) = speed.together_ratios(PERCEPTRON, batch=16, rounds=1, bar=1e9)
    assert 0 < ratio.value < 1e9
    assert ratio.setting.endswith("1 thread")


def test_the_rebuilt_depthwise_network_has_its_published_size() -> None:
    assert sum(one.numel() for one in LITE.make().parameters()) == pytest.approx(3.4e6, rel=0.02)


def test_the_allocator_is_read_at_its_peak() -> None:
    before = [torch.empty(1000)]

    def work() -> None:
        first = torch.empty(2500)
        second = torch.empty(250)
        del first
        before.clear()  # the action did not allocate it
        third = torch.empty(250)
        del second, third

    assert size.allocator_peak(work) == 4 * (2500 + 250)


@pytest.mark.skipif(not size.CLEAR_REFS.exists(), reason="only Linux can reset the peak of resident memory")
def test_resident_memory_counts_tensors_and_scratch_but_no_activations() -> None:
    held = 64 * 2**20
    (grown,) = size.resident_growth(lambda: Ballast(held), batch=8, rounds=1)
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


def test_the_textbook_chooses_what_we_choose() -> None:
    weight = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    ours = TopK(weight, torch.ones(30, 20, dtype=torch.bool), 120)
    assert ((speed.TextbookTopK(weight, 120)(weight) != 0) == ours.chosen()).all()


@pytest.mark.parametrize("name", ["OrthogonalDropout", "DeepEnsemble"])
def test_the_cost_of_a_method_is_relative_to_the_plain_network(monkeypatch, name: str) -> None:
    monkeypatch.setattr(speed, "METHOD_NAMES", {kebab(name): name})
    (cost,) = speed.method_costs(batch=2, rounds=1, subject=SMALL)
    assert cost.members == 5
    expected = 5.0 if name == "DeepEnsemble" else 1.0
    assert cost.parameters == pytest.approx(expected, rel=0.2)
    assert abs(cost.file - expected) < 1  # the header weighs much in so small a file


def test_each_part_is_announced_before_it_is_measured(monkeypatch, capsys, tmp_path) -> None:
    ratio = Ratio("a / b", "here", 1.02, 1.0, 1.1, bar=1.05)

    def measure() -> list[Ratio]:
        assert "[1/1, 0:00] steps ..." in capsys.readouterr().err
        return [ratio]

    monkeypatch.setattr(benchmarks, "with_targets", lambda: [("steps", measure)])
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick"])
    monkeypatch.chdir(tmp_path)
    benchmarks.main()
    assert "a / b (here): 1.02, 1 to 1.1; target 1.05" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_results_are_written_for_people_and_machines(tmp_path) -> None:
    found = [Ratio("a / b", "here", 1.02, 1.0, 1.1, bar=1.05), Ratio("c / d", "there", 2.0, 2.0, 2.0, bar=1.0)]
    benchmarks.write(tmp_path, [*found, speed.MethodCost("DeepEnsemble", 5, 5.0, 5.0, 1.0, 5.0)])
    document = json.loads((tmp_path / "results.json").read_text())
    assert [one["met"] for one in document["ratios"]] == [True, False]
    text = (tmp_path / "results.md").read_text()
    assert "| a / b | here | 1.02 (1.00 to 1.10) | <= 1.05 met |" in text
    assert "**missed**" in text
    assert "| DeepEnsemble | 5 | 5.00 | 5.00 | 1.00 | 5.00 |" in text


def test_results_of_other_instructions_are_kept_beside(tmp_path, monkeypatch) -> None:
    for instructions, value in (("AVX2", 1.5), ("AVX512", 1.2), ("AVX2", 1.4)):
        about = {"instructions": instructions, "processor": "P", "threads": 2, "torch": "2", "plures": "1"}
        monkeypatch.setattr(benchmarks, "machine", lambda about=about: about)
        benchmarks.write(tmp_path, [Ratio("a / b", "here", value, value, value)])
    text = (tmp_path / "results.md").read_text()
    assert "| measure | setting | AVX2 | AVX512 | target |" in text
    assert "| a / b | here | 1.40 (1.40 to 1.40) | 1.20 (1.20 to 1.20) |" in text


def test_readme_and_engines_say_what_the_benchmark_found() -> None:
    document = json.loads((ROOT / "benchmarks/results.json").read_text())
    for name in ("README.md", "docs/engines.md"):
        text = (ROOT / name).read_text()
        assert pages.included(text, document) == text, "run python -m benchmarks.pages"


def test_the_figures_of_the_owned_engine_are_put_between_the_marks() -> None:
    setting = "ResNet18, batch {}, kernel granularity, float32, 2 threads"
    found = [
        Ratio(pages.FIVE, setting.format(batch), value, 1.2, 1.9, bar=1.5)
        for batch, value in ((1, 1.81), (16, 1.449), (128, 1.5))
    ]
    document = {
        "machine": {"processor": "P", "instructions": "AVX2", "threads": 2, "torch": "2"},
        "ratios": [asdict(one) | {"met": one.met} for one in found],
    }
    readme = pages.included((ROOT / "README.md").read_text(), document)
    assert "in **1.4 to 1.8 times the time of one** (AVX2, 2 threads, batches of 1 to 128;" in readme
    engines = pages.included((ROOT / "docs/engines.md").read_text(), document)
    assert f"| {pages.FIVE} | {setting.format(1)} | 1.81 | 1.20 to 1.90 | <= 1.5 **missed** |" in engines
    assert pages.included(engines, document) == engines
