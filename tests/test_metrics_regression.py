"""Metrics where the answer is a number, against scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from plures import PluresError, metrics


def case(seed, members=3, samples=7, outputs=2):
    rng = np.random.default_rng(seed)
    shape = (members, samples, outputs)
    return rng.normal(size=shape), rng.uniform(0.2, 2.0, size=shape), rng.normal(size=shape[1:])


cases = st.builds(case, st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))


@given(cases)
def test_likelihoods_equal_scipy(drawn):
    means, stds, targets = drawn
    assert metrics.gaussian_nll(means[0], stds[0], targets) == pytest.approx(
        -stats.norm(means[0], stds[0]).logpdf(targets).mean()
    )
    density = stats.norm(means, stds).pdf(targets).mean(0)
    assert metrics.gaussian_nll(means, stds, targets) == pytest.approx(-np.log(density).mean())


@given(cases)
def test_a_gaussian_is_never_less_likely_than_its_members_on_average(drawn):
    means, stds, targets = drawn
    each = [metrics.gaussian_nll(mean, std, targets) for mean, std in zip(means, stds, strict=True)]
    assert metrics.gaussian_nll(means, stds, targets) <= np.mean(each) + 1e-12


def test_wrong_input_gets_one_sentence():
    two, three = torch.ones(2), torch.ones(3)
    for call, message in (
        (
            lambda: metrics.gaussian_nll(two, 0 * two, two),
            "std has the entry 0: a likelihood needs standard deviations above 0.",
        ),
        (
            lambda: metrics.gaussian_nll(torch.ones(3, 2), torch.ones(3, 2), three),
            "targets of shape (3,) must have the shape of mean, (3, 2).",
        ),
        (
            lambda: metrics.gaussian_nll(two * torch.nan, two, two),
            "mean of shape (2,) contains NaN: check for a model that diverged or for broken inputs.",
        ),
    ):
        with pytest.raises(PluresError) as caught:
            call()
        assert str(caught.value) == message
