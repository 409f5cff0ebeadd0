"""What evaluation measures, on ensembles whose answers are known."""

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plures import PluresError, metrics
from plures.ensemble import Ensemble, Stage, Step
from plures.lab.data import Data, DataInfo, Split
from plures.lab.evaluation.evaluate import evaluate, evaluate_ood, evaluate_shift, predictions, scores
from plures.lab.evaluation.shift import CORRUPTIONS, blur, contrast, gaussian_noise

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


def split(name: str, images: np.ndarray, info: DataInfo = INFO) -> Split:
    labels = (images.mean(axis=(1, 2, 3)) > 127.5).astype(np.int64)
    return Split(name, info, images, np.arange(len(images)), labels)


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
    found = evaluate(Brightness([0.0, 0.0]), data(count=257))
    assert found["images"] == 257
    assert found["accuracy"] == 1.0


def test_metrics_are_those_of_plures_metrics() -> None:
    own, ensemble = data(), Brightness([-0.5, 0.0, 1.0])
    members, targets = predictions(ensemble, own.test)
    found = evaluate(ensemble, own)
    mean = members.mean(0)
    assert found["nll"] == metrics.nll(mean, targets)
    assert found["brier"] == metrics.brier(mean, targets)
    assert found["ece"] == metrics.ece(mean, targets)
    assert found["aurc"] == metrics.aurc(mean, targets)
    assert found["agreement"] == metrics.agreement(members, targets)
    assert found["member_accuracies"] == metrics.member_accuracies(members, targets)
    assert found["mean_member_accuracy"] == pytest.approx(np.mean(found["member_accuracies"]))


def test_temperature_comes_from_the_validation_images() -> None:
    own, ensemble = data(), Brightness([0.0, 0.1])
    held_out, labels = predictions(ensemble, own.validation)
    found = evaluate(ensemble, own)
    assert found["temperature"] == metrics.temperature(held_out.mean(0), labels)
    assert found["calibrated_nll"] < found["nll"]


def test_without_validation_images_there_is_no_temperature() -> None:
    found = evaluate(Brightness([0.0]), data(validation=0))
    assert found["temperature"] is None
    assert found["calibrated_nll"] is None


def test_one_member_has_no_agreement_and_all_is_json() -> None:
    found = evaluate(Brightness([0.0]), data())
    assert found["agreement"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_data_without_test_images_are_refused() -> None:
    with pytest.raises(PluresError, match="stripes has no test images"):
        evaluate(Brightness([0.0]), data(count=0))


def test_images_that_are_larger_in_the_cache_are_cut_to_their_middle() -> None:
    info = DataInfo("framed", ("dark", "bright"), 1, 4, 8, True, (0.5,), (0.25,))
    images = np.zeros((3, 8, 8, 1), np.uint8)
    images[:, 2:6, 2:6] = 255
    framed = Split("test", info, images, np.arange(3), np.ones(3, np.int64))
    members, targets = predictions(Brightness([0.0]), framed)
    assert scores(members, targets)["accuracy"] == 1.0


def test_shift_measures_what_each_corruption_does_and_the_same_each_time() -> None:
    own, ensemble = data(), Brightness([0.0, 0.2])
    rows = evaluate_shift(ensemble, own)
    assert rows == evaluate_shift(ensemble, own)
    names = [row["corruption"] for row in rows]
    assert names == sorted(names, key=["gaussian noise", "blur", "contrast"].index)
    assert all(names.count(name) >= 3 for name in names)
    # These images are even, so that neither blur nor contrast can change them.
    unspoiled = evaluate(ensemble, own)["nll"]
    assert {row["nll"] == unspoiled for row in rows if row["corruption"] != "gaussian noise"} == {True}
    noise = [row["nll"] for row in rows if row["corruption"] == "gaussian noise"]
    assert unspoiled not in noise
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda one: f"{one.name} {one.strength}")
def test_a_corruption_changes_images_but_not_their_kind(corruption) -> None:
    images = torch.randint(0, 256, (5, 8, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    spoiled = corruption(images)
    assert spoiled.dtype == torch.uint8
    assert spoiled.shape == images.shape
    assert not torch.equal(spoiled, images)
    assert torch.equal(corruption(images[3:], first_row=3), spoiled[3:])  # whatever the batch


def test_noise_has_the_strength_that_it_names_and_differs_between_images() -> None:
    grey = torch.full((4, 64, 64, 1), 128.0)
    noise = gaussian_noise(grey, 0.1, 0) - grey
    assert float(noise.std()) == pytest.approx(25.5, rel=0.05)
    assert not torch.equal(noise[0], noise[1])


def test_blur_keeps_even_areas_and_flattens_edges() -> None:
    even = torch.full((1, 8, 8, 1), 100.0)
    assert torch.allclose(blur(even, 2.0, 0), even)
    edge = torch.zeros(1, 32, 32, 1)
    edge[:, :, 16:] = 255
    steps = blur(edge, 1.0, 0).diff(dim=2).amax()
    assert 60 < float(steps) < 140


def test_contrast_keeps_the_mean_colour_of_each_image() -> None:
    images = torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(0)).float()
    fainter = contrast(images, 0.6, 0)
    assert torch.allclose(fainter.mean(dim=(1, 2)), images.mean(dim=(1, 2)), atol=1e-3)
    assert float(fainter.std()) < float(images.std())


def test_unfamiliar_images_are_told_apart_by_all_three_scores() -> None:
    # Members differ only in between: images of medium brightness are what they disagree about.
    ensemble = Brightness([-0.3, 0.3])
    clear = np.concatenate([np.zeros((50, 4, 4, 1)), np.full((50, 4, 4, 1), 255)]).astype(np.uint8)
    own = Data(INFO, split("train", clear[:0]), split("validation", clear), split("test", clear), "")
    other = data(low=120, high=136)
    rows = evaluate_ood(ensemble, own, other)
    assert [row["score"] for row in rows] == ["1 - max p", "entropy", "mutual information"]
    assert all(row["auroc"] > 0.99 and row["aupr"] > 0.99 and row["fpr95"] < 0.05 for row in rows)
    assert not any(math.isnan(value) for row in rows for value in list(row.values())[1:])
