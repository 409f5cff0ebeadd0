"""The estimators keep scikit-learn's own promises, and are as good as its own networks on its own data."""

import pickle

import numpy as np
import pytest
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import plures
from plures.methods import METHODS
from plures.sklearn import PluresClassifier, PluresRegressor, Standardised

QUICK = {"members": 2, "hidden": (16,), "epochs": 2, "learning_rate": 0.05, "random_state": 0}


def checks(estimator):
    # With its own warnings, such as that of a column vector for y, scikit-learn tests itself.
    return [
        pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}")
        for estimator, check in estimator_checks_generator(estimator)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("estimator", "check"), [*checks(PluresClassifier(**QUICK)), *checks(PluresRegressor(**QUICK))]
)
def test_check_estimator(estimator, check):
    check(estimator)


def test_as_good_as_the_perceptron_of_scikit_learn():
    X, y = datasets.load_wine(return_X_y=True)
    ours = cross_val_score(PluresClassifier(members=2, epochs=8, learning_rate=0.01, random_state=0), X, y, cv=3)
    theirs = make_pipeline(StandardScaler(), MLPClassifier(max_iter=400, tol=1e-3, random_state=0))
    assert ours.mean() > cross_val_score(theirs, X, y, cv=3).mean() - 0.03


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_numbers_as_good_as_the_perceptron_of_scikit_learn():
    X, y = datasets.load_diabetes(return_X_y=True)
    ours = cross_val_score(PluresRegressor(members=2, epochs=8, learning_rate=0.01, random_state=0), X, y, cv=2)
    theirs = make_pipeline(
        StandardScaler(),
        TransformedTargetRegressor(MLPRegressor(max_iter=100, random_state=0), transformer=StandardScaler()),
    )
    assert ours.mean() > max(0.3, cross_val_score(theirs, X, y, cv=2).mean() - 0.03)


def test_standard_deviations_tell_where_the_data_are_noisy():
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (600, 1))
    y = 100 + 50 * X[:, 0] + random.normal(size=600) * np.where(X[:, 0] > 0, 20, 2)
    regressor = PluresRegressor(members=2, epochs=15, learning_rate=0.01, random_state=0).fit(X, y)
    quiet, noisy = regressor.predict_std([[-0.5], [0.5]])
    assert quiet < 10 < noisy < 40
    both = PluresRegressor(**QUICK).fit(X, np.stack([y, -y], 1))
    assert both.predict(X[:5]).shape == both.predict_std(X[:5]).shape == (5, 2)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_fits(method):
    X, y = datasets.load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    classifier = PluresClassifier(method, **{**QUICK, "hidden": (32, 32)}).fit(X, names)
    assert isinstance(classifier.ensemble_, getattr(plures, method))
    assert classifier.predict_proba(X).shape == (150, 3)
    assert set(classifier.predict(X)) <= set(names)
    std = classifier.predict_std(X)
    assert std.shape == (150, 3)
    assert (std.max() > 0) == (method != "Deterministic")


def test_pipeline_grid_search_and_copies():
    X, y = datasets.load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), PluresClassifier(**QUICK | {"epochs": 4}))
    search = GridSearchCV(pipeline, {"pluresclassifier__hidden": [(8,), (16,)]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.8
    copied = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(copied.predict_proba(X), search.predict_proba(X))


def test_the_ensemble_takes_raw_columns_in_both_precisions_and_a_file_keeps_their_scales(tmp_path):
    X, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    regressor = PluresRegressor(**QUICK).fit(X, y)
    expected = regressor.predict(X), regressor.predict_std(X)
    plures.save(regressor.ensemble_, tmp_path / "table.safetensors")
    made = Standardised(regressor._mlp(10, 2), columns=10, numbers=1)
    for ensemble in (regressor.ensemble_, plures.load(tmp_path / "table.safetensors", made)):
        for dtype in (torch.float32, torch.float64):
            answer = ensemble.regress(torch.tensor(X, dtype=dtype))
            np.testing.assert_allclose(answer.mean[:, 0], expected[0], rtol=1e-4)
            np.testing.assert_allclose(answer.std[:, 0], expected[1], rtol=1e-3)
    classifier = PluresClassifier(**QUICK).fit(X, y > 150)
    found = classifier.ensemble_.predict(torch.tensor(X).float()).probabilities
    np.testing.assert_allclose(found, classifier.predict_proba(X), atol=1e-5)


def test_large_offsets_and_small_units_cost_no_accuracy():
    X, y = datasets.load_diabetes(return_X_y=True)
    plain = PluresRegressor(**QUICK).fit(X, y)
    moved = PluresRegressor(**QUICK).fit(X + 123456789, 1e-9 * y)
    np.testing.assert_allclose(1e9 * moved.predict(X + 123456789), plain.predict(X), rtol=1e-2)
    far = PluresRegressor(**QUICK).fit(X, y + 1e9)
    np.testing.assert_allclose(far.predict(X) - 1e9, plain.predict(X), rtol=1e-2)


def test_the_ensemble_of_a_table_is_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    X, y = datasets.load_diabetes(return_X_y=True)
    regressor = PluresRegressor(**QUICK).fit(X, y)
    plures.export(regressor.ensemble_, tmp_path / "t.onnx", torch.tensor(X[:2]).float())
    session = onnxruntime.InferenceSession(tmp_path / "t.onnx")
    (mean,) = session.run(["mean"], {"inputs": X.astype(np.float32)})
    np.testing.assert_allclose(mean[:, 0], regressor.predict(X), rtol=1e-4)


def test_intervals_cover_what_they_promise_and_standard_deviations_do_not():
    X, y = datasets.load_diabetes(return_X_y=True)
    covered, assumed = [], []
    for seed in range(3):
        X_train, X_rest, y_train, y_rest = train_test_split(X, y, test_size=0.5, random_state=seed)
        X_held, X_test, y_held, y_test = train_test_split(X_rest, y_rest, test_size=0.6, random_state=seed)
        settings = {"members": 2, "epochs": 15, "learning_rate": 0.01, "random_state": seed}
        regressor = PluresRegressor(**settings).fit(X_train, y_train)
        assumed.append(np.mean(np.abs(y_test - regressor.predict(X_test)) <= 1.645 * regressor.predict_std(X_test)))
        lower, upper = regressor.calibrate(X_held, y_held).predict_interval(X_test, coverage=0.9)
        covered.append(np.mean((lower <= y_test) & (y_test <= upper)))
    assert np.mean(assumed) < 0.85
    assert 0.86 < np.mean(covered) < 0.95


def test_calibration_of_a_classifier_and_what_is_refused():
    X, y = datasets.load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    classifier = PluresClassifier(**QUICK).fit(X[::2], names[::2])
    before = classifier.predict_proba(X)
    after = classifier.calibrate(X[1::2], names[1::2]).predict_proba(X)
    assert not np.allclose(before, after)
    assert plures.metrics.nll(after[1::2], y[1::2]) < plures.metrics.nll(before[1::2], y[1::2])
    with pytest.raises(ValueError, match=r"classes that fit did not see: \['rose'\]"):
        classifier.calibrate(X, np.where(y > 0, "rose", "setosa"))
    with pytest.raises(plures.PluresError, match="call calibrate"):
        PluresRegressor(**QUICK).fit(X, y).predict_interval(X)


def test_fractions_of_sample_weights_move_the_mean():
    random = np.random.default_rng(0)
    X = random.normal(size=(200, 1))
    y = np.where(np.arange(200) < 100, 0.0, 10.0)
    settings = {**QUICK, "epochs": 10, "learning_rate": 0.02}
    weights = np.where(y > 0, 1.5, 0.5)
    found = PluresRegressor(**settings).fit(X, y, sample_weight=weights).predict(X)
    assert abs(found.mean() - 7.5) < 0.7
    assert abs(PluresRegressor(**settings).fit(X, y).predict(X).mean() - 5) < 0.7


def test_a_network_of_ones_own_and_options():
    from torch import nn

    X, y = datasets.load_iris(return_X_y=True)
    made = []

    def network(inputs, outputs):
        made.append((inputs, outputs))
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

    classifier = PluresClassifier(
        **QUICK, network=network, options={"schedule": "sequential", "optimize_masks": False}
    ).fit(X, y)
    assert made == [(4, 3)]
    assert [step.phase for step in classifier.ensemble_.plan()] == ["train", "train"]


def test_members_end_where_they_are_best_as_an_ensemble_on_held_out_rows():
    random = np.random.default_rng(0)
    X, y = random.normal(size=(700, 20)), random.integers(2, size=700)  # nothing to learn but the noise
    y[-1] = 2  # a class of one row is trained on
    classifier = PluresClassifier(members=2, epochs=15, random_state=0).fit(X[300:], y[300:])
    assert plures.metrics.nll(classifier.predict_proba(X[:300]), y[:300]) < 0.8


def test_an_estimator_is_pickled_small_and_many_members_are_warned_of(caplog):
    X, y = datasets.load_iris(return_X_y=True)
    classifier = PluresClassifier(members=5, epochs=1, random_state=0).fit(X, y)
    classifier.predict(X)
    held = sum(one.nbytes for one in classifier.ensemble_.tensors().values())
    assert len(pickle.dumps(classifier)) < held + 20_000
    assert "members takes" not in caplog.text
    PluresClassifier(**{**QUICK, "members": 100, "hidden": (100,)}).fit(X, y)
    assert "in 100 members takes" in caplog.text


def test_bad_settings_are_told_when_fitting():
    X, y = datasets.load_iris(return_X_y=True)
    for settings, words in [
        ({"method": "Magic"}, "method='Magic'; use one of"),
        ({"epochs": 0}, "epochs=0; use a whole number"),
        ({"batch_size": -1}, "batch_size=-1; use a whole number"),
        ({"learning_rate": 0}, "learning_rate=0; use a number above 0"),
        ({"options": {"magic": 1}}, "OrthogonalDropout does not take these options"),
    ]:
        with pytest.raises(plures.PluresError, match=words):
            PluresClassifier(**{**QUICK, **settings}).fit(X, y)
    with pytest.raises(ValueError, match="only one class"):
        PluresClassifier(**QUICK).fit(X, np.zeros(150))
