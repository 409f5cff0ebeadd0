"""Sets, intervals and selections keep what they promise, and equal what independent packages find."""

import math

import numpy as np
import pytest
import torch
from crepes import ConformalClassifier, ConformalRegressor
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores.sets import APSConformityScore
from scipy import stats
from sklearn.base import BaseEstimator, ClassifierMixin

from plures import PluresError
from plures.guarantees import (
    adaptive_scores,
    held_out_for_coverage,
    held_out_for_risk,
    quantile,
    risk_bound,
    select,
)


def classified(seed: int, samples: int, classes: int = 6, signal: float = 1.4) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a classifier that is neither perfect nor calibrated, and the true classes."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, samples)
    logits = 1.5 * (rng.normal(size=(samples, classes)) + signal * np.eye(classes)[targets])
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True), targets


def ambiguity_scores(probabilities: np.ndarray) -> torch.Tensor:
    """What `Prediction.sets` compares by default."""
    return 1 - torch.from_numpy(probabilities)


def of_targets(scores: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
    return scores.gather(1, torch.from_numpy(targets)[:, None]).squeeze(1)


class Fixed(ClassifierMixin, BaseEstimator):
    """A classifier for MAPIE whose inputs are the probabilities."""

    def __init__(self, classes: int = 6) -> None:
        self.classes = classes

    def fit(self, inputs, targets):  # what scikit-learn asks of a classifier
        self.classes_ = np.arange(self.classes)
        self.fitted_ = True
        return self

    def predict_proba(self, inputs):
        return inputs

    def predict(self, inputs):
        return inputs.argmax(1)


# --- sets


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_least_ambiguous_sets_are_those_of_mapie(coverage: float) -> None:
    held_out, targets = classified(0, 300)
    new, _ = classified(1, 200)
    limit = quantile(of_targets(ambiguity_scores(held_out), targets), coverage)
    judge = SplitConformalClassifier(Fixed().fit(held_out, targets), coverage, conformity_score="lac", prefit=True)
    _, sets = judge.conformalize(held_out, targets).predict_set(new)
    assert np.array_equal((ambiguity_scores(new) <= limit).numpy(), sets[:, :, 0])


@pytest.mark.parametrize("scores", [ambiguity_scores, adaptive_scores])
@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_sets_of_every_score_are_those_of_crepes(scores, coverage: float) -> None:
    held_out, targets = classified(0, 300)
    new, _ = classified(1, 200)
    own = of_targets(scores(held_out), targets)
    judge = ConformalClassifier()
    judge.fit(own.numpy())
    sets = judge.predict_set(scores(new).numpy(), confidence=coverage, smoothing=False)
    assert np.array_equal((scores(new) <= quantile(own, coverage)).numpy(), np.asarray(sets).astype(bool))


def test_adaptive_scores_are_what_mapie_sums_up_to_the_class_before() -> None:
    probabilities, targets = classified(2, 100)
    up_to, _ = APSConformityScore.get_true_label_cumsum_proba(targets, probabilities, np.arange(6))
    own = up_to[:, 0] - np.take_along_axis(probabilities, targets[:, None], 1)[:, 0]
    assert of_targets(adaptive_scores(probabilities), targets).numpy() == pytest.approx(own, abs=1e-12)


@pytest.mark.parametrize("scores", [ambiguity_scores, adaptive_scores])
def test_sets_cover_as_asked_over_random_splits(scores) -> None:
    probabilities, targets = classified(3, 2000)
    every, own = scores(probabilities), of_targets(scores(probabilities), targets)
    found = []
    for split in range(20):
        held_out, new = torch.from_numpy(np.random.default_rng(split).permutation(2000)).split([500, 1500])
        sets = every[new] <= quantile(own[held_out], 0.9)
        found.append(float(sets.gather(1, torch.from_numpy(targets)[new][:, None]).double().mean()))
    # Coverage of one split is Beta(451, 50), measured on 1,500 samples: standard deviation 0.0155.
    assert abs(np.mean(found) - 0.9) < 3 * 0.0155 / math.sqrt(20)
    assert all(abs(one - 0.9) < 4 * 0.0155 for one in found)


@given(st.integers(0, 2**31), st.floats(0.5, 0.99))
def test_adaptive_sets_hold_the_most_probable_class_and_no_class_without_those_before_it(seed, coverage):
    held_out, targets = classified(seed, 120)
    scores = adaptive_scores(held_out)
    sets = scores <= quantile(of_targets(scores, targets), coverage)
    most = torch.from_numpy(held_out).argmax(1)
    assert bool(sets.gather(1, most[:, None]).all())
    by_rank = sets.gather(1, torch.from_numpy(held_out).argsort(1, descending=True))
    assert torch.equal(by_rank, by_rank.int().cummin(1).values.bool())  # no class without those more probable


# --- intervals


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_intervals_are_those_of_crepes(normalised: bool, coverage: float) -> None:
    rng = np.random.default_rng(0)
    residuals, sigmas, new, new_sigmas = rng.normal(size=200), rng.uniform(0.5, 2, 200), rng.normal(size=50), 1.5
    judge = ConformalRegressor()
    judge.fit(residuals, sigmas=sigmas if normalised else None)
    wide = np.full(50, new_sigmas) if normalised else None
    bounds = judge.predict_int(new, sigmas=wide, confidence=coverage)
    limit = float(quantile(np.abs(residuals) / (sigmas if normalised else 1), coverage))
    half = limit * (new_sigmas if normalised else 1)
    assert np.stack([new - half, new + half], 1) == pytest.approx(bounds)


def test_intervals_cover_as_asked_over_random_splits() -> None:
    rng = np.random.default_rng(1)
    noise = np.abs(rng.standard_t(3, 2000))
    found = []
    for split in range(20):
        order = np.random.default_rng(split).permutation(2000)
        found.append(float((noise[order[500:]] <= float(quantile(noise[order[:500]], 0.9))).mean()))
    assert abs(np.mean(found) - 0.9) < 3 * 0.0155 / math.sqrt(20)


def test_several_outputs_have_a_quantile_each() -> None:
    scores = torch.stack([torch.arange(1.0, 20.0), torch.arange(101.0, 120.0)], dim=1)
    assert quantile(scores, 0.9).tolist() == [18.0, 118.0]


@given(st.integers(1, 400), st.floats(0.01, 0.999))
def test_the_number_of_samples_that_a_coverage_takes_is_exact(count: int, coverage: float) -> None:
    takes = held_out_for_coverage(coverage)
    quantile(torch.rand(takes), coverage)
    if takes > 1:
        with pytest.raises(PluresError, match=f"needs at least {takes} held-out samples, but there are {takes - 1}:"):
            quantile(torch.rand(takes - 1), coverage)


# --- selection


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(1e-4, 0.5))
def test_the_risk_bound_is_that_of_scipy(answered: int, rate: float, delta: float) -> None:
    errors = round(rate * answered)
    exact = 1.0 if errors == answered else stats.beta.ppf(1 - delta, errors + 1, answered - errors)
    assert risk_bound(errors, answered, delta) == pytest.approx(exact, rel=1e-6)


def test_the_risk_is_kept_in_all_but_delta_of_random_splits() -> None:
    probabilities, targets = classified(4, 8000, signal=2.5)
    confidence = torch.from_numpy(probabilities.max(1))
    right = torch.from_numpy(probabilities.argmax(1) == targets)
    broken, answered = 0, []
    for split in range(100):
        held_out, new = torch.from_numpy(np.random.default_rng(split).permutation(8000)).split([2000, 6000])
        found = select(confidence[held_out], right[held_out], risk=0.1, delta=0.1)
        given_out = confidence[new] >= found.threshold
        broken += bool((~right[new][given_out]).double().mean() > 0.1)
        answered.append(float(given_out.double().mean()))
    assert broken <= 10
    assert np.mean(answered) > 0.3  # the promise is kept by answering, not by keeping silent


def test_equally_confident_samples_are_answered_together() -> None:
    confidence = torch.tensor([0.9] * 400 + [0.5] * 400)
    right = torch.tensor([True] * 400 + [False] * 400)
    found = select(confidence, right, risk=0.05)
    assert found.threshold == pytest.approx(0.9)
    assert found.answered == 0.5
    assert found.bound <= 0.05


@pytest.mark.parametrize(("risk", "delta"), [(5e-324, 0.1), (1e-300, 1e-300), (0.1, 5e-324)])
def test_the_smallest_numbers_are_refused_in_one_sentence(risk: float, delta: float) -> None:
    with pytest.raises(PluresError, match="needs at least"):
        select(torch.rand(10), torch.ones(10, dtype=torch.bool), risk, delta)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_the_number_of_samples_that_a_risk_takes_is_exact(risk: float, delta: float) -> None:
    takes = held_out_for_risk(risk, delta)
    confidence = torch.linspace(0.5, 1, takes)
    assert select(confidence, torch.ones(takes, dtype=torch.bool), risk, delta).answered == 1.0
    with pytest.raises(PluresError, match=f"needs at least {takes} held-out samples, but there are {takes - 1}:"):
        select(confidence[1:], torch.ones(takes - 1, dtype=torch.bool), risk, delta)


def test_what_cannot_be_promised_gets_one_sentence() -> None:
    wrong = torch.zeros(1000, dtype=torch.bool)
    with pytest.raises(PluresError, match="even the most confident of the 1000 held-out samples are wrong too often"):
        select(torch.rand(1000), wrong, risk=0.1)
    for coverage in (0, 1, 1.5, -0.1, math.nan, "0.9"):
        with pytest.raises(PluresError, match="^coverage=.*; use a number between 0 and 1$"):
            quantile(torch.rand(10), coverage)
    for risk in (0, 1, math.inf):
        with pytest.raises(PluresError, match="^risk=.*; use a number between 0 and 1$"):
            select(torch.rand(10), wrong[:10], risk)
