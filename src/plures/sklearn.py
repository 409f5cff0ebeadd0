"""Estimators for scikit-learn, with uncertainty. They need the extra [sklearn].

from plures.sklearn import PluresClassifier

classifier = PluresClassifier(members=5).fit(X, y)
classifier.predict_proba(X_new), classifier.predict_std(X_new)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import plures
from plures.checks import number, one_of, whole_number
from plures.ensemble import Ensemble
from plures.errors import MissingExtraError, PluresError
from plures.methods import METHODS
from plures.stage import Stage

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise MissingExtraError("plures.sklearn needs scikit-learn: pip install 'plures[sklearn]'") from error

STEPS = 16  # per epoch, where the batch size is chosen by the number of rows
LARGEST_BATCH = 200
PRUNE_SHARE = 0.1  # of the epochs, as in the paper: 20 for 200

Table = NDArray[np.float64]
MakeNetwork = Callable[[int, int], nn.Module]


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share: standardised columns, a network, an ensemble trained on rows."""

    def __init__(
        self,
        method: str = "OrthogonalDropout",
        members: int = 5,
        *,
        hidden: Sequence[int] = (100,),
        network: MakeNetwork | None = None,
        options: Mapping[str, Any] | None = None,
        epochs: int = 60,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        # Only stored, as scikit-learn wants it: `fit` looks at them.
        self.method = method
        self.members = members
        self.hidden = hidden
        self.network = network
        self.options = options
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.random_state = random_state

    def _fit(self, X: Table, targets: Tensor, outputs: int, **loss: Any) -> None:
        self._check_settings()
        self._shift, spread = X.mean(0), X.std(0)
        self._scale = np.where(spread > 0, spread, 1.0)
        seed = int(check_random_state(self.random_state).randint(2**31))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = self.network or self._mlp
            # float64: rows are answered the same whichever others stand beside them.
            network = make(X.shape[1], outputs).double()
            self.ensemble_ = self._ensemble(network, seed, loss)
            for stage in self.ensemble_.stages():
                self._train(stage, self._inputs(X), targets)

    def _ensemble(self, network: nn.Module, seed: int, loss: Mapping[str, Any]) -> Ensemble:
        counted = {} if self.method == "Deterministic" else {"members": self.members}
        if self.method == "MCDropout":
            counted = {"passes": self.members}
        options = {**counted, "seed": seed, **(self.options or {}), **loss}
        try:
            made: Ensemble = getattr(plures, self.method)(network, **options)
        except TypeError as error:
            raise PluresError(f"{self.method} does not take these options: {error}") from error
        return made

    def _train(self, stage: Stage, inputs: Tensor, targets: Tensor) -> None:
        rows = len(inputs)
        size = self.batch_size or min(LARGEST_BATCH, max(8, math.ceil(rows / STEPS)))
        epochs = max(1, round(self.epochs * PRUNE_SHARE)) if stage.phase == "prune" else self.epochs
        optimizer = torch.optim.AdamW(stage.parameter_groups(self.weight_decay), lr=self.learning_rate)
        steps = epochs * math.ceil(rows / size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(rows), size):
                optimizer.zero_grad()
                stage(inputs[chosen], targets[chosen]).backward()
                optimizer.step()
                schedule.step()

    def _mlp(self, inputs: int, outputs: int) -> nn.Module:
        widths = [inputs, *self.hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def _inputs(self, X: Table) -> Tensor:
        return torch.from_numpy((X - self._shift) / self._scale)

    def _new_rows(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._inputs(validate_data(self, X, reset=False, dtype=np.float64))

    def _check_settings(self) -> None:
        one_of("method", self.method, METHODS)
        whole_number("epochs", self.epochs)
        number("learning_rate", self.learning_rate, "a number above 0", above=0)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size)


class PluresClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classify the rows of a table with an ensemble of small networks.

        classifier = PluresClassifier(members=5, hidden=(100,)).fit(X, y)
        classifier.predict(X), classifier.predict_proba(X), classifier.predict_std(X)

    - `method`, `options`: the name of any method of plures, and its options.
    - `members`: the number of members, or of passes of MC dropout.
    - `hidden`: the widths of a multilayer perceptron.
    - `network`: a function `network(inputs, outputs)` that returns another network.
    - `epochs`: the epochs of each stage, with AdamW and a cosine schedule; pruning takes a tenth of them.
    - `batch_size`: by default, an epoch has about sixteen steps.

    Columns are standardised with the mean and standard deviation that `fit` saw. The trained ensemble is `ensemble_`:
    `plures.save(classifier.ensemble_, path)` stores it without pickle.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows `X` with classes `y`."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, targets = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has only one class, {self.classes_[0]!r}: a classifier needs two classes or more")
        self._fit(X, torch.from_numpy(targets.astype(np.int64)), len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> Table:
        """Return the probability of each class, [rows, classes], in the order of `classes_`."""
        mean: Table = self._members(X).mean(0)
        return mean

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)  # first: it says whether the estimator is fitted
        chosen: NDArray[Any] = self.classes_[best]
        return chosen

    def predict_std(self, X: Any) -> Table:
        """Return the standard deviation of the members' probabilities, [rows, classes]: their disagreement."""
        spread: Table = self._members(X).std(0)
        return spread

    def _members(self, X: Any) -> Table:
        rows = self._new_rows(X)
        with torch.no_grad():
            members: Table = self.ensemble_(rows).softmax(-1).numpy()
        return members


class PluresRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Predict a number for each row of a table, with its standard deviation.

        regressor = PluresRegressor(members=5, hidden=(100,)).fit(X, y)
        regressor.predict(X), regressor.predict_std(X)

    Each member returns a mean and a variance, trained with `plures.GaussianNLL`. Targets are standardised in training,
    and predictions are in the original units. `y` may have several columns. The arguments are those of
    `PluresClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows `X` with numbers `y`, [rows] or [rows, numbers]."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=True)
        y = np.asarray(y, dtype=np.float64)
        self._flat = y.ndim == 1
        targets = y.reshape(len(y), -1)
        spread = targets.std(0)
        self._middle, self._width = targets.mean(0), np.where(spread > 0, spread, 1.0)
        scaled = torch.from_numpy((targets - self._middle) / self._width)
        self._fit(X, scaled, 2 * targets.shape[1], loss=plures.GaussianNLL())
        return self

    def predict(self, X: Any) -> Table:
        """Return the mean of the members, in the shape of `y`."""
        return self._as_given(self._regress(X).mean.numpy() * self._width + self._middle)

    def predict_std(self, X: Any) -> Table:
        """Return the standard deviation of the prediction: noise in the data and disagreement of the members."""
        return self._as_given(self._regress(X).std.numpy() * self._width)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _regress(self, X: Any) -> plures.Regression:
        rows = self._new_rows(X)
        return self.ensemble_.regress(rows)

    def _as_given(self, values: Table) -> Table:
        return values[:, 0] if self._flat else values
