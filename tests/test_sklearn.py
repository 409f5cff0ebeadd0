"""The estimators keep scikit-learn's own promises, and are as good as its own networks on its own data."""

import pickle

import numpy as np
import pytest
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import plures
from plures.methods import METHODS
from plures.sklearn import PluresClassifier, PluresRegressor

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


@pytest.mark.parametrize("load", [datasets.load_wine, datasets.load_breast_cancer])
def test_as_good_as_the_perceptron_of_scikit_learn(load):
    X, y = load(return_X_y=True)
    ours = cross_val_score(PluresClassifier(members=2, epochs=8, learning_rate=0.01, random_state=0), X, y, cv=3)
    theirs = make_pipeline(StandardScaler(), MLPClassifier(max_iter=400, tol=1e-3, random_state=0))
    assert ours.mean() > cross_val_score(theirs, X, y, cv=3).mean() - 0.03


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_numbers_as_good_as_the_perceptron_of_scikit_learn():
    X, y = datasets.load_diabetes(return_X_y=True)
    ours = cross_val_score(PluresRegressor(members=2, epochs=8, learning_rate=0.01, random_state=0), X, y, cv=3)
    theirs = make_pipeline(
        StandardScaler(),
        TransformedTargetRegressor(MLPRegressor(max_iter=300, random_state=0), transformer=StandardScaler()),
    )
    assert ours.mean() > max(0.3, cross_val_score(theirs, X, y, cv=3).mean() - 0.03)


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
    pipeline = make_pipeline(StandardScaler(), PluresClassifier(**QUICK))
    search = GridSearchCV(pipeline, {"pluresclassifier__hidden": [(8,), (16,)]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.8
    copied = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(copied.predict_proba(X), search.predict_proba(X))


def test_a_network_of_ones_own_and_options():
    from torch import nn

    X, y = datasets.load_iris(return_X_y=True)
    made = []

    def network(inputs, outputs):
        made.append((inputs, outputs))
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

    classifier = PluresClassifier(**QUICK, network=network, options={"optimize_masks": False}).fit(X, y)
    assert made == [(4, 3)]
    assert [step.phase for step in classifier.ensemble_.plan()] == ["train", "train"]


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
