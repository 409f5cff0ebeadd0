import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

from plures import metrics
from plures.errors import PluresError

ON_TARGETS = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.aurc, metrics.temperature]


def random_case(seed, samples, classes, sharpness=2.0, members=None):
    """Probabilities of float64 and targets that they predict better than chance."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, samples)
    shape = (samples, classes) if members is None else (members, samples, classes)
    logits = sharpness * (rng.normal(size=shape) + np.eye(classes)[targets])
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True), targets


cases = st.builds(
    random_case,
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 60),
    classes=st.integers(2, 12),
    sharpness=st.floats(0.1, 4.0),
)
# A handful of values, so that ties are the rule.
scores = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, math.pi]), min_size=1, max_size=40).map(np.array)
confidences = st.lists(st.tuples(st.sampled_from([0.5, 0.6, 0.8, 0.9, 1.0]), st.booleans()), min_size=1, max_size=25)


# --- against scikit-learn, torchmetrics and plain loops


@given(cases)
def test_accuracy_nll_and_brier_equal_scikit_learn_and_numpy(case):
    probabilities, targets = case
    classes = range(probabilities.shape[1])
    one_hot = np.eye(len(classes))[targets]
    assert metrics.accuracy(*case) == pytest.approx(accuracy_score(targets, probabilities.argmax(1)))
    assert metrics.nll(*case) == pytest.approx(log_loss(targets, probabilities, labels=classes))
    assert metrics.brier(*case) == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean())


@given(cases, st.sampled_from([1, 2, 10, 15, 100]))
def test_ece_equals_torchmetrics(case, bins):
    with warnings.catch_warnings():  # some versions warn about optional packages while they are imported
        warnings.simplefilter("ignore")
        from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities, targets = torch.tensor(case[0]), torch.tensor(case[1])
    # They round to float32 and give a bin its lower edge, where we give it its upper: stay away from the edges.
    places = probabilities.amax(1) * bins
    assume(((places - places.round()).abs() > 1e-4).all())
    theirs = multiclass_calibration_error(probabilities, targets, probabilities.shape[1], n_bins=bins, norm="l1")
    assert metrics.ece(probabilities, targets, bins) == pytest.approx(float(theirs), abs=1e-6)


@given(scores, scores)
def test_ood_equals_scikit_learn_and_a_loop_over_thresholds(inside, outside):
    found = metrics.ood(inside, outside)
    truth, both = np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.r_[inside, outside]
    assert found.auroc == pytest.approx(roc_auc_score(truth, both))
    assert found.aupr == pytest.approx(average_precision_score(truth, both))
    rates = [(inside >= t).mean() for t in np.unique(both) if (outside >= t).sum() / len(outside) >= 0.95]
    assert found.fpr95 == pytest.approx(min(rates))


def test_ood_on_many_distinct_scores():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(0, 1, 3000), rng.normal(1, 1, 2000)
    found = metrics.ood(inside, outside)
    truth, both = np.r_[np.zeros(3000), np.ones(2000)], np.r_[inside, outside]
    assert found.auroc == pytest.approx(roc_auc_score(truth, both), rel=1e-12)
    assert found.aupr == pytest.approx(average_precision_score(truth, both), rel=1e-12)
    assert found.fpr95 == np.mean(inside >= np.sort(outside)[100])  # the 101st lowest lets 1900 of 2000 through


def test_fpr95_needs_95_percent_and_not_more():
    outside = torch.arange(20.0)  # the 19 highest are exactly 95 %
    assert metrics.ood(torch.tensor([0.5, 1.0, 1.5, -1.0]), outside).fpr95 == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_aurc_equals_a_plain_loop(seed):
    probabilities, targets = random_case(seed, samples=80, classes=5)
    most_confident_first = np.argsort(-probabilities.max(1))
    wrong = (probabilities.argmax(1) != targets)[most_confident_first]
    expected = np.mean([wrong[:i].mean() for i in range(1, 81)])
    assert metrics.aurc(probabilities, targets) == pytest.approx(expected, rel=1e-12)


@given(confidences, st.randoms(use_true_random=False))
def test_aurc_with_ties_is_the_loop_over_mean_errors_in_any_order(samples, random):
    def measured(pairs):
        # Class 0 always wins, so a sample is right exactly if its target is 0.
        return metrics.aurc(np.array([[p, 1 - p] for p, _ in pairs]), np.array([int(wrong) for _, wrong in pairs]))

    mean_error = {p: np.mean([wrong for q, wrong in samples if q == p]) for p, _ in samples}
    errors = [mean_error[p] for p, _ in sorted(samples, reverse=True)]
    assert measured(samples) == pytest.approx(np.mean([np.mean(errors[:i]) for i in range(1, len(errors) + 1)]))
    shuffled = random.sample(samples, len(samples))
    assert measured(shuffled) == measured(samples)


@given(cases, st.integers(0, 2**32 - 1))
def test_order_of_samples_has_no_effect(case, seed):
    probabilities, targets = case
    order = np.random.default_rng(seed).permutation(len(targets))
    for metric in ON_TARGETS:
        assert metric(probabilities[order], targets[order]) == pytest.approx(metric(*case), rel=1e-6, abs=1e-9)


# --- calibration


def test_calibration_table_by_hand():
    probabilities = torch.tensor([[0.7, 0.3], [0.8, 0.2], [0.1, 0.9], [0.45, 0.55]], dtype=torch.float64)
    table = metrics.calibration_table(probabilities, torch.tensor([0, 1, 1, 0]), bins=4)
    assert table.count.tolist() == [0, 0, 2, 2]
    assert table.confidence.tolist() == pytest.approx([0, 0, 0.625, 0.85])
    assert table.accuracy.tolist() == [0, 0, 0.5, 0.5]
    # (2 * |0.5 - 0.625| + 2 * |0.5 - 0.85|) / 4
    assert metrics.ece(probabilities, torch.tensor([0, 1, 1, 0]), bins=4) == pytest.approx(0.2375)


def test_a_bin_includes_its_upper_edge_and_not_its_lower():
    probabilities = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    table = metrics.calibration_table(probabilities, torch.tensor([0, 0, 0]), bins=4)
    assert table.count.tolist() == [0, 1, 1, 1]


def test_confidence_of_one_shares_the_last_bin():
    probabilities = torch.tensor([[1.0, 0.0], [0.98, 0.02]], dtype=torch.float64)
    # One of two is right at a mean confidence of 0.99.
    assert metrics.ece(probabilities, torch.tensor([0, 1])) == pytest.approx(0.49)


def test_confidence_rounded_above_one_falls_into_the_last_bin():
    assert metrics.calibration_table(torch.tensor([[1.0004, 0.0]]), torch.tensor([0])).count.tolist() == [0] * 14 + [1]


def test_results_with_tensors_cannot_be_changed():
    table = metrics.calibration_table(*random_case(0, 5, 3))
    with pytest.raises(AttributeError):
        table.count = torch.zeros(15)


# --- members


def right_and_wrong(rows):
    """Members that are right (1) or wrong (0) as the rows say, and the targets: class 0 throughout."""
    right = torch.tensor(rows, dtype=torch.float64)
    return torch.stack([0.2 + 0.6 * right, 0.8 - 0.6 * right], dim=-1), torch.zeros(right.shape[1], dtype=torch.int64)


def test_agreement_by_hand():
    # Right on each sample: 3, 2, 0, 2 of L = 3, so (1/3)(0 + 2 + 0 + 2) = 4/3. Mean accuracy p = 7/12, so
    # N (L - 1) p (1 - p) = 4 * 2 * 35/144 = 35/18. kappa = 1 - (4/3)(18/35) = 11/35.
    members, targets = right_and_wrong([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]])
    assert metrics.agreement(members, targets) == pytest.approx(11 / 35)
    assert metrics.member_accuracies(members, targets) == [0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 1], [1, 1]], 1.0),  # everything right
        ([[0, 0], [0, 0]], 1.0),  # everything wrong
        ([[1, 0], [1, 0]], 1.0),  # fail together
        ([[1, 0], [0, 1]], -1.0),  # never fail together
        ([[1, 1, 0, 0], [1, 0, 1, 0]], 0.0),  # fail independently
    ],
)
def test_agreement_at_its_landmarks(rows, expected):
    assert metrics.agreement(*right_and_wrong(rows)) == pytest.approx(expected)


@pytest.mark.parametrize("rows", [[[1, 0]], [[1, 1]]])
def test_agreement_of_one_member_is_nan(rows):
    assert math.isnan(metrics.agreement(*right_and_wrong(rows)))


@pytest.mark.parametrize("seed", range(3))
def test_member_figures_equal_those_of_each_member_alone(seed):
    members, targets = random_case(seed, samples=50, classes=4, members=6)
    assert metrics.member_accuracies(members, targets) == [metrics.accuracy(one, targets) for one in members]


# --- uncertainty


def test_the_uncertainty_of_one_member_is_its_entropy():
    members = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]])
    torch.testing.assert_close(metrics.uncertainty(members).total, math.log(2) * torch.tensor([0.0, 1.0, 1.5]))


def test_entropy_is_not_negative_for_a_row_slightly_above_one():
    assert metrics.uncertainty(torch.tensor([[[1.0005, 0.0]]])).total == 0


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.1, 30), st.sampled_from([torch.float32, torch.float64])
)
def test_uncertainty_splits_into_two_parts_that_are_not_negative(seed, size, sharpness, dtype):
    members = torch.tensor(random_case(seed, 20, 4, sharpness, size)[0], dtype=dtype)
    found = metrics.uncertainty(members)
    assert {found.total.dtype, found.aleatoric.dtype, found.epistemic.dtype} == {dtype}
    assert found.total.shape == found.aleatoric.shape == found.epistemic.shape == (20,)
    assert (found.epistemic >= 0).all()
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.total, torch.special.entr(members.mean(0)).sum(-1))
    # Mutual information, written the other way: how far the members are from their mean.
    gaps = torch.xlogy(members, members / members.mean(0)).nan_to_num(0).sum(-1).mean(0)
    torch.testing.assert_close(found.epistemic, gaps, rtol=0, atol=1e-5)


def test_one_member_knows_no_epistemic_uncertainty():
    members = torch.tensor(random_case(0, 30, 5, members=1)[0])
    assert (metrics.uncertainty(members).epistemic == 0).all()


def test_members_that_are_sure_of_different_classes_are_all_epistemic():
    found = metrics.uncertainty(torch.eye(4)[:, None])
    assert found.aleatoric.item() == 0
    assert found.total.item() == found.epistemic.item() == pytest.approx(math.log(4))


# --- temperature


@pytest.mark.parametrize("true", [0.3, 1.0, 2.5, 20.0])
def test_temperature_recovers_the_one_that_was_hidden(true):
    rng = np.random.default_rng(0)
    probabilities, _ = random_case(1, samples=20_000, classes=3, sharpness=1.0)
    targets = np.array((probabilities.cumsum(1) > rng.random((20_000, 1))).argmax(1))  # drawn from them: calibrated
    hidden = metrics.tempered(probabilities, 1 / true)
    assert metrics.temperature(hidden, targets) == pytest.approx(true, rel=0.05)


@given(cases)
def test_no_other_temperature_has_a_lower_nll(case):
    best = metrics.temperature(*case)
    reached = metrics.nll(metrics.tempered(case[0], best), case[1])
    for other in np.geomspace(0.01, 100, 41):
        assert reached <= metrics.nll(metrics.tempered(case[0], other), case[1]) + 1e-6


def test_temperature_mends_probabilities_of_exactly_zero():
    certain = torch.tensor([[1.0, 0.0]] * 4)
    targets = torch.tensor([0, 0, 0, 1])
    best = metrics.temperature(certain, targets)
    # One of four is wrong, so the best that a constant can say is 3/4.
    torch.testing.assert_close(metrics.tempered(certain, best)[0], torch.tensor([0.75, 0.25]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("rows", "targets", "expected"),
    [
        ([[0.9, 0.1], [0.8, 0.2]], [0, 0], 0.01),  # all right: as sure as allowed
        ([[0.9, 0.1], [0.8, 0.2]], [1, 1], 100.0),  # all wrong: as unsure as allowed
        ([[0.5, 0.5], [0.5, 0.5]], [0, 1], 1.0),  # every temperature is the same
        ([[1.0], [1.0]], [0, 0], 1.0),
    ],
)
def test_temperature_at_its_ends(rows, targets, expected):
    assert metrics.temperature(torch.tensor(rows), torch.tensor(targets)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tempered_powers_and_renormalises(dtype):
    probabilities = torch.tensor(random_case(0, 7, 4, members=2)[0], dtype=dtype)
    torch.testing.assert_close(metrics.tempered(probabilities, 1.0), probabilities)
    squared = probabilities**2
    torch.testing.assert_close(metrics.tempered(probabilities, 0.5), squared / squared.sum(-1, keepdim=True))
    torch.testing.assert_close(metrics.tempered(probabilities, 1e30), torch.full_like(probabilities, 0.25))


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, 1e-50])
def test_tempered_refuses_a_temperature_that_means_nothing(temperature):
    with pytest.raises(PluresError, match=r"^temperature must be positive and finite, got "):
        metrics.tempered(torch.tensor([[0.5, 0.5]]), temperature)


# --- edges


def test_all_right_and_certain():
    case = torch.eye(3), torch.arange(3)
    assert [metric(*case) for metric in ON_TARGETS[:5]] == [1, 0, 0, 0, 0]
    assert math.copysign(1, metrics.nll(*case)) == 1


def test_all_wrong_and_certain():
    case = torch.eye(3), torch.tensor([1, 2, 0])
    clamp = -math.log(torch.finfo(torch.float32).tiny)
    assert [metric(*case) for metric in ON_TARGETS[:5]] == [0, pytest.approx(clamp), 2, 1, 1]


def test_one_class():
    case = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    assert [metric(*case) for metric in ON_TARGETS] == [1, 0, 0, 0, 0, 1]
    assert metrics.uncertainty(case[0][None]).total.tolist() == [0, 0, 0, 0]


def test_one_sample():
    case = torch.tensor([[0.25, 0.75]]), torch.tensor([0])
    expected = [0, math.log(4), 1.125, 0.75, 1, 100]
    assert [metric(*case) for metric in ON_TARGETS] == pytest.approx(expected, rel=1e-5)
    assert metrics.ood(torch.tensor([0.0]), torch.tensor([0.0])) == metrics.OutOfDistribution(0.5, 0.5, 1.0)


def test_equal_probabilities_count_as_the_first_class():
    assert metrics.accuracy(torch.full((3, 3), 1 / 3), torch.tensor([0, 1, 2])) == pytest.approx(1 / 3)


def test_infinite_scores_are_scores():
    assert metrics.ood(torch.tensor([-math.inf, 0.0]), torch.tensor([1.0, math.inf])).auroc == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_half_precision_gives_nearly_the_same(dtype, classes):
    members, targets = random_case(0, samples=200, classes=classes, members=3)
    half, targets = torch.tensor(members).to(dtype), torch.tensor(targets)
    for metric in [metrics.accuracy, metrics.nll, metrics.brier, metrics.aurc]:
        assert metric(half[0], targets) == pytest.approx(metric(members[0], targets), abs=0.02)
    assert len(metrics.member_accuracies(half, targets)) == 3
    split = metrics.uncertainty(half)
    assert split.total.dtype == split.epistemic.dtype == metrics.tempered(half, 2.0).dtype == torch.float32
    torch.testing.assert_close(split.total.double(), metrics.uncertainty(members).total, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("metric", ON_TARGETS)
def test_tensors_and_arrays_of_any_layout_give_the_same_float(metric):
    probabilities, targets = random_case(3, samples=30, classes=4)
    expected = metric(probabilities, targets)
    assert isinstance(expected, float)
    read_only = probabilities.copy()
    read_only.flags.writeable = False
    trained = torch.tensor(probabilities, requires_grad=True)
    assert metric(torch.tensor(probabilities), targets.astype(np.uint8)) == expected
    assert metric(read_only, torch.tensor(targets, dtype=torch.int16)) == expected
    assert metric(np.asfortranarray(probabilities), targets[::-1].copy()[::-1]) == expected
    assert metric(probabilities.astype(">f8"), targets.astype(">i4")) == expected
    assert metric(trained, targets) == expected


@pytest.mark.parametrize("metric", ON_TARGETS)
def test_input_is_left_alone(metric):
    probabilities, targets = (torch.tensor(part) for part in random_case(3, samples=30, classes=4))
    before = probabilities.clone(), targets.clone()
    metric(probabilities, targets)
    assert torch.equal(probabilities, before[0])
    assert torch.equal(targets, before[1])


# --- errors

GOOD, LABELS = torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1])
LOGITS = "softmax first? these look like logits."
WRONG_PAIRS = {
    "rank": (GOOD[0], LABELS, "probabilities must have shape [samples, classes], got (2,)."),
    "members": (GOOD[None], LABELS, "probabilities must have shape [samples, classes], got (1, 2, 2)."),
    "targets rank": (GOOD, LABELS[:, None], "targets must have shape [samples], got (2, 1)."),
    "lengths": (
        GOOD,
        torch.tensor([0, 1, 1]),
        "targets of shape (3,) must have one entry for each sample of probabilities of shape (2, 2).",
    ),
    "too high": (
        GOOD,
        torch.tensor([0, 2]),
        "targets must lie between 0 and 1 for probabilities of shape (2, 2), got 2.",
    ),
    "too low": (
        GOOD,
        torch.tensor([-1, 1]),
        "targets must lie between 0 and 1 for probabilities of shape (2, 2), got -1.",
    ),
    "float": (GOOD, LABELS.float(), "targets must be integer class numbers, got torch.float32 of shape (2,)."),
    "bool": (GOOD, LABELS.bool(), "targets must be integer class numbers, got torch.bool of shape (2,)."),
    "no samples": (
        GOOD[:0],
        LABELS[:0],
        "probabilities of shape (0, 2) is empty: at least one entry on every axis is needed.",
    ),
    "no targets": (GOOD, LABELS[:0], "targets of shape (0,) is empty: at least one entry on every axis is needed."),
    "nan": (
        GOOD * torch.tensor([1.0, math.nan]),
        LABELS,
        "probabilities of shape (2, 2) contains NaN: check for a model that diverged or for broken inputs.",
    ),
    "sum": (3 * GOOD, LABELS, f"probabilities of shape (2, 2) has a row that sums to 3, not 1: {LOGITS}"),
    "infinite": (
        GOOD * torch.tensor([1.0, math.inf]),
        LABELS,
        f"probabilities of shape (2, 2) has a row that sums to inf, not 1: {LOGITS}",
    ),
    "negative": (
        torch.tensor([[1.5, -0.5], [0.3, 0.7]]),
        LABELS,
        f"probabilities of shape (2, 2) has the negative entry -0.5: {LOGITS}",
    ),
    "complex": (
        GOOD.to(torch.complex64),
        LABELS,
        "probabilities of shape (2, 2) must contain real numbers, got torch.complex64.",
    ),
    "list": (GOOD.tolist(), LABELS, "probabilities must be a torch tensor or a numpy array, got list."),
    "words": (GOOD, np.array(["cat", "dog"]), "targets must contain numbers, got a numpy array of <U3."),
}


@pytest.mark.parametrize("metric", [*ON_TARGETS, metrics.calibration_table])
@pytest.mark.parametrize(("probabilities", "targets", "message"), WRONG_PAIRS.values(), ids=WRONG_PAIRS.keys())
def test_wrong_input_gets_one_sentence(metric, probabilities, targets, message):
    with pytest.raises(PluresError) as caught:
        metric(probabilities, targets)
    assert str(caught.value) == message


MEMBERS = torch.stack([GOOD, GOOD])
WRONG_CALLS = {
    "agreement": (
        lambda: metrics.agreement(GOOD, LABELS),
        "members must have shape [members, samples, classes], got (2, 2).",
    ),
    "member_accuracies": (
        lambda: metrics.member_accuracies(MEMBERS, LABELS[:1]),
        "targets of shape (1,) must have one entry for each sample of members of shape (2, 2, 2).",
    ),
    "uncertainty": (
        lambda: metrics.uncertainty(MEMBERS - 1),
        f"members of shape (2, 2, 2) has the negative entry -0.9: {LOGITS}",
    ),
    "scalar": (
        lambda: metrics.tempered(torch.tensor(1.0), 1.0),
        "probabilities must have shape [..., classes], got ().",
    ),
    "tempered": (
        lambda: metrics.tempered(torch.ones(2, 0), 1.0),
        "probabilities of shape (2, 0) is empty: at least one entry on every axis is needed.",
    ),
    "inside": (
        lambda: metrics.ood(GOOD, GOOD[0]),
        "inside_scores must have shape [samples], got (2, 2).",
    ),
    "outside": (
        lambda: metrics.ood(GOOD[0], torch.tensor([math.nan])),
        "outside_scores of shape (1,) contains NaN: check for a model that diverged or for broken inputs.",
    ),
    "no bins": (lambda: metrics.ece(GOOD, LABELS, bins=0), "bins=0; use a whole number, 1 or more"),
    "half a bin": (lambda: metrics.ece(GOOD, LABELS, bins=1.5), "bins=1.5; use a whole number, 1 or more"),
}


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_wrong_call_gets_one_sentence(call, message):
    with pytest.raises(PluresError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(("gap", "accepted"), [(9e-4, True), (-9e-4, True), (1.1e-3, False), (-1.1e-3, False)])
def test_rows_may_miss_one_by_a_thousandth(gap, accepted):
    probabilities = torch.tensor([[0.5, 0.5 + gap]], dtype=torch.float64)
    if accepted:
        metrics.accuracy(probabilities, torch.tensor([1]))
    else:
        with pytest.raises(PluresError, match="softmax first"):
            metrics.accuracy(probabilities, torch.tensor([1]))


# --- dense answers


def test_dense_answers_count_every_labelled_place_as_a_sample():
    flat, targets = random_case(3, samples=24, classes=5, members=3)
    members = torch.from_numpy(flat).reshape(3, 2, 3, 4, 5).movedim(-1, 2)  # [members, samples, classes, rows, columns]
    places = torch.from_numpy(targets).reshape(2, 3, 4)
    for metric in ON_TARGETS:
        assert metric(members.mean(0), places) == pytest.approx(metric(flat.mean(0), targets), rel=1e-12)
    assert metrics.agreement(members, places) == pytest.approx(metrics.agreement(flat, targets))
    assert torch.allclose(metrics.uncertainty(members).epistemic.flatten(), metrics.uncertainty(flat).epistemic)


def test_places_that_nobody_labelled_are_left_out():
    probabilities, targets = random_case(4, samples=12, classes=3)
    dense, places = torch.from_numpy(probabilities).reshape(2, 6, 3).movedim(-1, 1), torch.from_numpy(targets).clone()
    places[::3] = -100
    kept = places != -100
    assert metrics.nll(dense, places.reshape(2, 6)) == pytest.approx(metrics.nll(probabilities[kept], targets[kept]))
    with pytest.raises(PluresError, match="at least one label is needed"):
        metrics.nll(dense, torch.full((2, 6), -100))


def test_dense_targets_of_another_shape_get_one_sentence():
    dense = torch.full((2, 3, 4, 4), 1 / 3)
    with pytest.raises(PluresError) as caught:
        metrics.accuracy(dense, torch.zeros(2, 4, 5, dtype=torch.long))
    shapes = "probabilities of shape (2, 3, 4, 4)"
    assert str(caught.value) == f"targets of shape (2, 4, 5) must have one entry for each place of {shapes}."


def test_the_risk_coverage_curve_is_the_error_of_the_most_confident():
    probabilities, targets = random_case(5, samples=50, classes=4)
    risk = metrics.risk_coverage(probabilities, targets)
    order = np.argsort(-probabilities.max(1))
    wrong = (probabilities.argmax(1) != targets)[order]
    expected = [wrong[: count + 1].mean() for count in range(50)]
    assert risk.tolist() == pytest.approx(expected)
