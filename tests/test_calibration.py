"""Calibration that travels, and promises of predictions."""

import copy
import inspect
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import plures
from plures import PluresError, metrics
from plures.calibration import ClassCalibration

CLASSES, FEATURES = 5, 6
NETWORK = "torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5))"


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: nn.Module = eval(NETWORK)
    return made


def clusters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Five clouds of points that overlap."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    return centres[labels] + 0.9 * torch.randn(count, FEATURES, generator=random), labels


def train(ensemble: plures.Ensemble, steps: int = 60) -> plures.Ensemble:
    inputs, targets = clusters(200, seed=1)
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.05)
        for _ in range(steps):  # long enough to be overconfident
            optimizer.zero_grad()
            stage(inputs, targets).backward()
            optimizer.step()
    return ensemble


TRAINED = train(plures.OrthogonalDropout(network(), members=3, optimize_masks=False))
HELD_OUT = clusters(400, seed=2)
TEST = clusters(1000, seed=3)


@pytest.fixture
def ensemble() -> plures.Ensemble:
    return copy.deepcopy(TRAINED)


# --- calibration


def test_calibration_is_the_temperature_of_the_metrics_and_helps_elsewhere(ensemble) -> None:
    before = ensemble.predict(TEST[0])
    assert ensemble.calibrate(*HELD_OUT, batch_size=64) is ensemble
    after = ensemble.predict(TEST[0])
    assert metrics.nll(after.probabilities, TEST[1]) < metrics.nll(before.probabilities, TEST[1])
    assert metrics.ece(after.probabilities, TEST[1]) < metrics.ece(before.probabilities, TEST[1])
    held_out = ensemble.predict(HELD_OUT[0], calibrated=False).probabilities
    assert ensemble.calibration.temperature == pytest.approx(metrics.temperature(held_out, HELD_OUT[1]))
    assert torch.equal(after.label, before.label)
    assert torch.equal(after.members, before.members)
    assert torch.equal(ensemble.predict(TEST[0], calibrated=False).probabilities, before.probabilities)
    assert torch.equal(ensemble.calibrate(None).predict(TEST[0]).probabilities, before.probabilities)


@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0.1, 8.0))
def test_calibration_never_worsens_the_nll_of_what_it_saw(seed, members, sharpness) -> None:
    random = torch.Generator().manual_seed(seed)
    targets = torch.cat([torch.tensor([0, 1]), torch.randint(0, 3, (18,), generator=random)])
    logits = sharpness * (torch.randn(members, 20, 3, generator=random) + nn.functional.one_hot(targets, 3))
    probabilities = logits.softmax(-1)
    found = ClassCalibration.fit(probabilities, targets)
    before, after = found.nll.tolist()
    assert before == pytest.approx(metrics.nll(probabilities.mean(0), targets))
    assert after <= before
    assert metrics.nll(found.probabilities(probabilities), targets) == pytest.approx(after)


def test_a_loader_calibrates_as_the_whole_does(ensemble) -> None:
    whole = ensemble.calibrate(*HELD_OUT).calibration
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*HELD_OUT), batch_size=64)
    parts = ensemble.calibrate(loader).calibration
    assert parts.temperature == pytest.approx(whole.temperature, rel=1e-5)
    assert len(parts.probability) == 400


def test_repr_says_that_it_is_calibrated(ensemble) -> None:
    assert "calibrated" not in repr(ensemble)
    ensemble.calibrate(*HELD_OUT)
    assert "calibrated on 400 held-out samples: temperature" in repr(ensemble)
    assert "calibrated" in repr(ensemble.predict(TEST[0]))


def answers(ensemble: plures.Ensemble, inputs: Tensor) -> list[Tensor]:
    """All that a calibrated ensemble says."""
    prediction = ensemble.predict(inputs)
    sets = [prediction.sets(0.9), prediction.sets(0.9, adaptive=True)]
    return [prediction.probabilities, prediction.abstain(risk=0.3).label, *sets]


def test_another_process_gives_the_same_bits(ensemble, tmp_path: Path) -> None:
    inputs = TEST[0][:50]
    plures.save(ensemble.calibrate(*HELD_OUT), tmp_path / "calibrated.safetensors")
    torch.save(inputs, tmp_path / "inputs.pt")
    program = f"""
import sys, torch, plures
from torch import Tensor
{inspect.getsource(answers)}
found = answers(plures.load("calibrated.safetensors", lambda: {NETWORK}), torch.load("inputs.pt"))
torch.save(found, "answers.pt")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    for ours, theirs in zip(answers(ensemble, inputs), torch.load(tmp_path / "answers.pt"), strict=True):
        assert torch.equal(ours, theirs)


def test_other_members_than_were_calibrated_are_refused(ensemble) -> None:
    two = train(plures.OrthogonalDropout(network(), members=2, optimize_masks=False), steps=2)
    two.calibration = ensemble.calibrate(*HELD_OUT).calibration
    with pytest.raises(PluresError, match="calibrated with 3 members and has 2 now: calibrate it again"):
        two.predict(TEST[0])
    two.predict(TEST[0], calibrated=False)


def test_engines_keep_the_calibration(ensemble) -> None:
    ensemble.calibrate(*HELD_OUT)
    engine = ensemble.engine("unfolded", fold=False)
    assert torch.equal(engine.predict(TEST[0]).probabilities, ensemble.predict(TEST[0]).probabilities)


# --- promises


@pytest.mark.parametrize("options", [{}, {"adaptive": True}])
def test_sets_cover_as_often_as_asked(ensemble, options) -> None:
    everything = clusters(1500, seed=4)
    found, sizes = [], []
    for split in range(20):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(split))
        held_out, new = order[:500], order[500:]
        ensemble.calibrate(everything[0][held_out], everything[1][held_out])
        sets = ensemble.predict(everything[0][new]).sets(coverage=0.9, **options)
        assert sets.dtype == torch.bool
        found.append(float(sets.gather(1, everything[1][new][:, None]).double().mean()))
        sizes.append(float(sets.sum(1).double().mean()))
    # One split: Beta(451, 50), measured on 1,000 samples. All splits share the samples, so they do not average out.
    assert abs(sum(found) / 20 - 0.9) < 0.0165
    assert all(abs(one - 0.9) < 4 * 0.0165 for one in found)
    assert sum(sizes) / 20 < CLASSES - 0.5


def test_sets_of_a_prediction_are_those_of_mapie(ensemble) -> None:
    from mapie.classification import SplitConformalClassifier  # seconds that every test process would spend
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Plain(ClassifierMixin, BaseEstimator):
        """The ensemble's uncalibrated probabilities, as scikit-learn asks for them."""

        def fit(self, inputs, targets):
            self.classes_, self.fitted_ = np.arange(CLASSES), True
            return self

        def predict_proba(self, inputs):
            return ensemble.predict(torch.from_numpy(inputs), calibrated=False).probabilities.double().numpy()

        def predict(self, inputs):
            return self.predict_proba(inputs).argmax(1)

    held_out = [part.numpy() for part in HELD_OUT]
    ensemble.calibrate(*HELD_OUT)
    for coverage in (0.8, 0.95):
        judge = SplitConformalClassifier(Plain().fit(*held_out), coverage, conformity_score="lac", prefit=True)
        _, sets = judge.conformalize(*held_out).predict_set(TEST[0].numpy())
        assert np.array_equal(ensemble.predict(TEST[0]).sets(coverage).numpy(), sets[:, :, 0])


def test_abstaining_keeps_to_the_risk(ensemble) -> None:
    everything = clusters(2000, seed=5)
    broken = answered = 0
    for split in range(20):
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(split))
        held_out, new = order[:1000], order[1000:]
        ensemble.calibrate(everything[0][held_out], everything[1][held_out])
        careful = ensemble.predict(everything[0][new]).abstain(risk=0.1, delta=0.1)
        kept = ~careful.abstained
        broken += bool((careful.label[kept] != everything[1][new][kept]).double().mean() > 0.1)
        answered += int(kept.sum())
    assert broken <= 2
    assert answered > 0.2 * 20 * 1000


def test_promises_need_held_out_data_and_enough_of_it(ensemble) -> None:
    prediction = ensemble.predict(TEST[0])
    for ask in (prediction.sets, lambda: prediction.abstain(0.1)):
        with pytest.raises(PluresError, match="needs held-out data: call ensemble.calibrate"):
            ask()
    prediction = ensemble.calibrate(*clusters(50, seed=6)).predict(TEST[0])
    with pytest.raises(PluresError, match="^coverage=0.99 needs at least 99 held-out samples, but there are 50:"):
        prediction.sets(coverage=0.99)
    with pytest.raises(PluresError, match="^risk=0.01 with delta=0.05 needs at least 528 held-out samples"):
        prediction.abstain(risk=0.01)
    for coverage in (0, 1, -0.5, math.nan):
        with pytest.raises(PluresError, match="^coverage=.*; use a number between 0 and 1$"):
            prediction.sets(coverage)
    with pytest.raises(PluresError, match="^risk=2; use a number between 0 and 1$"):
        prediction.abstain(2)


# --- bad input


def test_bad_held_out_data_get_one_sentence_and_leave_the_calibration(ensemble) -> None:
    inputs, targets = HELD_OUT
    before = ensemble.calibrate(*HELD_OUT).calibration
    for message, data in {
        "there are no held-out samples": (inputs[:0], targets[:0]),
        "all 400 held-out targets are class 2: calibrate on data of several classes": (inputs, torch.full((400,), 2)),
        "targets must lie between 0 and 4": (inputs, targets + 1),
        "400 held-out samples have 399 targets: give one for each": (inputs, targets[1:]),
        "targets must be integer class numbers": (inputs, targets.float()),
        "the only held-out target is class": (inputs[:1], targets[:1]),
        "the targets are not numbers": (inputs, ["a"] * 400),
        "Tensor has no targets: give both, or a loader": (inputs,),
        "the loader gave Tensor; expected pairs": ([inputs],),
    }.items():
        with pytest.raises(PluresError, match=message):
            ensemble.calibrate(*data)
        assert ensemble.calibration is before


def test_nobody_is_sure_after_a_few_dozen_right_answers() -> None:
    """The temperature ran into its bound: members that voted for three classes were 100 % sure together."""
    members = torch.full((3, 38, 4), 0.1).index_fill_(2, torch.tensor([0]), 0.7)
    members[:, ::2] = members[:, ::2].roll(1, 2)
    found = ClassCalibration.fit(members, torch.arange(38).remainder(2).sub(1).abs())
    assert 0.1 < found.temperature < 1
    split = torch.full((3, 1, 4), 0.1).scatter_(2, torch.tensor([0, 1, 2]).view(3, 1, 1), 0.7)
    assert float(found.probabilities(split).max()) < 0.5
