"""What evaluation measures, on ensembles whose answers are known."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import networks
import plures
from plures import PluresError, metrics
from plures.ensemble import Ensemble
from plures.lab.data import Data, DataInfo, DataSplit
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES
from plures.lab.evaluation.evaluate import (
    engine_of,
    evaluate,
    evaluate_shift,
    fastest,
    predictions,
    scores,
    told_apart,
)
from plures.native import library
from plures.stage import Stage, Step

INFO = DataInfo("stripes", ("dark", "bright"), 1, 4, 4, False, (0.5,), (0.25,))


class Brightness(Ensemble):
    """Members that call an image bright where its mean, after normalisation, lies above their threshold."""

    def __init__(self, thresholds: list[float]) -> None:
        super().__init__(nn.Linear(1, 1))
        self.register_buffer("thresholds", torch.tensor(thresholds))

    def plan(self) -> list[Step]:
        return []

    def open(self, step: Step) -> Stage:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        bright = images.mean(dim=(1, 2, 3)) - self.thresholds[:, None]
        return torch.stack([-bright, bright], dim=-1)

    def options(self) -> dict[str, object]:
        return {}


def measured(ensemble: Ensemble, own: Data) -> dict[str, Any]:
    return evaluate(ensemble, own, fastest(ensemble))


def split(name: str, images: np.ndarray, info: DataInfo = INFO) -> DataSplit:
    labels = (images.mean(axis=(1, 2, 3)) > 127.5).astype(np.int64)
    return DataSplit(name, info, images, np.arange(len(images)), labels)


def data(count: int = 600, validation: int = 100, low: int = 0, high: int = 256) -> Data:
    random = np.random.default_rng(0)
    base = random.integers(low, high, (count + validation, 1, 1, 1))
    images = np.broadcast_to(base, (count + validation, 4, 4, 1)).astype(np.uint8)
    return Data(
        INFO,
        split("train", images[:0]),
        split("validation", images[count:]),
        split("test", images[:count]),
        fingerprint="",
    )


def test_the_last_incomplete_batch_counts() -> None:
    found = measured(Brightness([0.0, 0.0]), data(count=257))
    assert found["images"] == 257
    assert found["accuracy"] == 1.0


def test_metrics_are_those_of_plures_metrics() -> None:
    own, ensemble = data(), Brightness([-0.5, 0.0, 1.0])
    members, targets = predictions(ensemble, own.test)
    found = measured(ensemble, own)
    mean = members.mean(0)
    assert found["nll"] == metrics.nll(mean, targets)
    assert found["brier"] == metrics.brier(mean, targets)
    assert found["ece"] == metrics.ece(mean, targets)
    assert found["aurc"] == metrics.aurc(mean, targets)
    assert found["agreement"] == metrics.agreement(members, targets)
    assert found["member_accuracies"] == metrics.member_accuracies(members, targets)
    assert found["mean_member_accuracy"] == pytest.approx(np.mean(found["member_accuracies"]))


def test_an_evaluation_names_the_engine_that_predicted() -> None:
    assert measured(Brightness([0.0]), data())["engine"] is None
    ensemble = plures.OrthogonalDropout(networks.mlp(), 2)
    for _ in ensemble.stages():
        pass
    assert engine_of(fastest(ensemble)) == "unfolded"
    assert engine_of(ensemble.engine("unfolded")) == "unfolded"
    if library.why_unavailable() is None:
        assert engine_of(ensemble.engine("owned")) == f"owned ({library.load().instructions})"


def test_temperature_comes_from_the_validation_images() -> None:
    own, ensemble = data(), Brightness([0.0, 0.1])
    held_out, labels = predictions(ensemble, own.validation)
    found = measured(ensemble, own)
    right = bool((held_out.mean(0).argmax(1) == labels).all())  # then labels are smoothed
    smoothing = 1 / (len(labels) + 2) if right else 0.0
    assert found["temperature"] == metrics.temperature(held_out.mean(0), labels, smoothing)
    assert found["calibrated_nll"] < found["nll"]


def test_without_validation_images_there_is_no_temperature() -> None:
    found = measured(Brightness([0.0]), data(validation=0))
    assert found["temperature"] is None
    assert found["calibrated_nll"] is None


def test_one_member_has_no_agreement_and_all_is_json() -> None:
    found = measured(Brightness([0.0]), data())
    assert found["agreement"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_data_without_test_images_are_refused() -> None:
    with pytest.raises(PluresError, match="stripes has no test images"):
        measured(Brightness([0.0]), data(count=0))


def test_images_that_are_larger_in_the_cache_are_cut_to_their_middle() -> None:
    info = DataInfo("framed", ("dark", "bright"), 1, 4, 8, True, (0.5,), (0.25,))
    images = np.zeros((3, 8, 8, 1), np.uint8)
    images[:, 2:6, 2:6] = 255
    framed = DataSplit("test", info, images, np.arange(3), np.ones(3, np.int64))
    members, targets = predictions(Brightness([0.0]), framed)
    assert scores(members, targets)["accuracy"] == 1.0


def test_shift_measures_what_each_corruption_does_and_the_same_each_time() -> None:
    own, ensemble = data(count=20), Brightness([0.0, 0.2])
    rows = evaluate_shift(ensemble, own, fastest(ensemble), print)
    assert rows == evaluate_shift(ensemble, own, fastest(ensemble), print)
    assert [(row["corruption"], row["severity"]) for row in rows] == [
        (kind, severity) for kind in KINDS for severity in SEVERITIES
    ]
    # These images are even, so that neither blur nor contrast can change them, but noise does.
    unspoiled = measured(ensemble, own)["nll"]
    noise = [row["nll"] for row in rows if row["corruption"] == "gaussian noise"]
    assert unspoiled not in noise
    assert len(set(noise)) == len(noise)
    blurred = [row["nll"] for row in rows if row["corruption"] == "motion blur"]
    assert blurred == [unspoiled] * 5


def test_unfamiliar_images_are_told_apart_by_all_three_scores() -> None:
    # Members differ only in between: images of medium brightness are what they disagree about.
    ensemble = Brightness([-0.3, 0.3])
    clear = np.concatenate([np.zeros((50, 4, 4, 1)), np.full((50, 4, 4, 1), 255)]).astype(np.uint8)
    inside, _ = predictions(ensemble, split("test", clear))
    outside, _ = predictions(ensemble, data(low=120, high=136).test)
    rows = told_apart(inside, outside)
    assert [row["score"] for row in rows] == ["1 - max p", "entropy", "mutual information"]
    assert all(row["auroc"] > 0.99 and row["aupr"] > 0.99 and row["fpr95"] < 0.05 for row in rows)
    assert not any(math.isnan(value) for row in rows for value in list(row.values())[1:])
