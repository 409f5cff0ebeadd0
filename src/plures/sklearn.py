"""Estimators for scikit-learn, with uncertainty. They need the extra [sklearn].

from plures.sklearn import PluresClassifier

classifier = PluresClassifier(members=5).fit(X, y)
classifier.predict_proba(X_new), classifier.predict_std(X_new)
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
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
from plures.losses import GaussianNLL
from plures.methods import METHODS
from plures.methods.orthogonal_dropout.roles import roles_for

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise MissingExtraError("plures.sklearn needs scikit-learn: pip install 'plures[sklearn]'") from error

SMALLEST_BATCH, LARGEST_BATCH = 8, 200
STEPS = 16  # per epoch, if the batch size stays within these bounds
MOST_REPEATED = 20  # times the rows of a table that whole sample weights may make of it
CONSTANT = 1e-30  # a column that spreads less has nothing to scale
HELD_OUT = 0.1  # of the rows, which tell when members are at their best
FEWEST_ROWS = 300  # with fewer, all rows are trained on, for all epochs: a tenth of them tells too little
PATIENCE = 8  # epochs without a better one, after which training ends

Table = NDArray[np.float64]
MakeNetwork = Callable[[int, int], nn.Module]


class Standardised(nn.Module):
    """Run a network on standardised columns; for regression, return means and variances in the unit of the targets.

        network = Standardised(nn.Linear(10, 2), columns=10, numbers=1)
        network(rows)  # raw columns, float32 or float64

    The estimators train this network, so `ensemble_` takes raw columns. Means and scales are buffers, which a file of
    the ensemble stores. They are in float64, so that a column with a large offset loses no digits.
    """

    shift: Tensor
    scale: Tensor
    factor: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, columns: int, numbers: int = 0) -> None:
        super().__init__()
        self.network = network
        for shift, scale, count in (("shift", "scale", columns), ("offset", "factor", 2 * numbers)):
            self.register_buffer(shift, torch.zeros(count, dtype=torch.float64))
            self.register_buffer(scale, torch.ones(count, dtype=torch.float64))
        self.columns, self.numbers = columns, numbers

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [batch, classes], or means and log-variances [batch, 2 numbers]."""
        # MIMO puts several rows side by side, and their outputs, too.
        raw = torch.unflatten(rows.double(), -1, (-1, self.columns))
        inputs = ((raw - self.shift) / self.scale).flatten(-2)
        outputs: Tensor = self.network(inputs.to(next(self.network.parameters()).dtype))
        if not self.numbers:
            return outputs
        return (torch.unflatten(outputs.double(), -1, (-1, 2 * self.numbers)) * self.factor + self.offset).flatten(-2)

    def learn(self, columns: Table, weights: Table, numbers: Table | None = None) -> Tensor:
        """Set the means and scales to those of columns and of targets, and return the scale of these."""
        shift, scale = _moments(columns, weights)
        self.shift.copy_(shift)
        self.scale.copy_(scale)
        if numbers is None:
            return self.factor
        middle, width = _moments(numbers, weights)
        self.factor.copy_(torch.cat([width, torch.ones_like(width)]))  # of means, and of log-variances
        self.offset.copy_(torch.cat([middle, 2 * width.log()]))
        return width


@dataclass(frozen=True, eq=False)
class _RelativeNLL(GaussianNLL):
    """Compute the loss in units of the targets' standard deviation, in which the learning rate is chosen."""

    width: Tensor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        means, logs = outputs.chunk(2, 1)
        scaled = torch.cat([means / self.width, logs - 2 * self.width.log()], 1)
        return super().__call__(scaled, targets / self.width)


class _Rows:
    """Batches of a table; a row of weight 1.3 comes once in each reading, and a second time in three of ten."""

    def __init__(self, table: Sequence[Tensor], batches: int) -> None:
        self.inputs, self.targets, self.weights = table
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.weights)
        rows = torch.arange(count).repeat_interleave((self.weights + torch.rand(count)).floor().long())
        for chosen in rows[torch.randperm(len(rows))].tensor_split(self.batches):
            yield self.inputs[chosen], self.targets[chosen]


@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share: settings, a network, an ensemble trained on rows."""

    # scikit-learn requires a constructor that only stores; `fit` checks.
    method: str = "OrthogonalDropout"
    members: int = 5
    _: KW_ONLY
    hidden: Sequence[int] = (100,)
    network: MakeNetwork | None = None
    options: Mapping[str, Any] | None = None
    epochs: int = 60
    batch_size: int | None = None
    learning_rate: float = 6e-3
    weight_decay: float = 0.1
    random_state: Any = None

    def _fit(self, X: Table, targets: NDArray[Any], weights: Table, outputs: int, numbers: int = 0) -> None:
        one_of("method", self.method, METHODS)
        whole_number("members", self.members)
        number("learning_rate", self.learning_rate, "a number above 0", above=0)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size)
        seed = int(check_random_state(self.random_state).randint(2**31))
        counted = {"MCDropout": "passes", "Deterministic": None}.get(self.method, "members")
        options = {"seed": seed, **({counted: self.members} if counted else {}), **(self.options or {})}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = self.network or self._mlp
            network = Standardised(make(X.shape[1], outputs).float(), X.shape[1], numbers)
            width = network.learn(X, weights, targets if numbers else None)
            if numbers:
                options["loss"] = _RelativeNLL(width)
            if self.method == "OrthogonalDropout" and options.setdefault("schedule", "together") == "together":
                # Means and scales are the same for all members, so they are computed with once.
                shared = dict.fromkeys(("shift", "scale", "factor", "offset"), "shared")
                options.setdefault("roles", roles_for(network, self.members) | shared)
            try:
                self.ensemble_: Ensemble = getattr(plures, self.method)(network, **options)
            except TypeError as error:
                raise PluresError(f"{self.method} does not take these options: {error}") from error
            self._train(*map(torch.from_numpy, (X, targets, weights)))
        if numbers:
            self.ensemble_.loss = GaussianNLL()

    def _train(self, *table: Tensor) -> None:
        """Train on inputs, targets and weights; of many rows, some are held out and choose the epoch."""
        held: dict[str, Any] = {}
        if len(table[0]) >= FEWEST_ROWS:
            order = _held_first(table[1])
            some, table = zip(*(one[order].tensor_split([int(HELD_OUT * len(order))]) for one in table), strict=True)
            held = {"validation": [next(iter(_Rows(some, 1)))], "patience": PATIENCE}
        size = self.batch_size or min(LARGEST_BATCH, max(SMALLEST_BATCH, math.ceil(len(table[0]) / STEPS)))
        self.ensemble_.fit(
            _Rows(table, math.ceil(len(table[0]) / size)),
            self.epochs,
            optimizer=lambda stage: torch.optim.AdamW(
                stage.parameter_groups(self.weight_decay), self.learning_rate, fused=True
            ),
            progress=False,
            **held,
        ).calibrate(None)  # the held-out rows have chosen the epoch

    def _mlp(self, inputs: int, outputs: int) -> nn.Module:
        widths = [inputs, *self.hidden]
        layers = [layer for ends in pairwise(widths) for layer in (nn.Linear(*ends), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def _exact(self, X: Any) -> tuple[Ensemble, Tensor]:
        """Return the ensemble and rows in float64: a row is answered the same whichever others stand beside it."""
        check_is_fitted(self)
        rows = torch.from_numpy(validate_data(self, X, reset=False, dtype=np.float64))
        return copy.deepcopy(self.ensemble_).double(), rows


class PluresClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classify the rows of a table with an ensemble of small networks.

        classifier = PluresClassifier(members=5, hidden=(100,)).fit(X, y)
        classifier.predict(X), classifier.predict_proba(X), classifier.predict_std(X)

    - `method`, `options`: the name of any method of plures, and its options. Those of orthogonal dropout have
      `schedule="together"`.
    - `members`: the number of members, or of passes of MC dropout.
    - `hidden`: the widths of a multilayer perceptron.
    - `network`: a function `network(inputs, outputs)` that returns another network.
    - `epochs`: the epochs of each stage, with AdamW and a cosine schedule; pruning takes a tenth of them. With 300 rows
      or more, a stage keeps the epoch in which its members were best, together, on a tenth of the rows.
    - `batch_size`: by default, an epoch has about sixteen steps, with 8 to 200 rows each.

    Columns are standardised inside the network (`Standardised`), with the mean and standard deviation that `fit` saw.
    The trained ensemble is `ensemble_`, which takes raw columns. `plures.save` stores it without pickle.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows `X` with classes `y`; a row of weight 2 counts as two rows."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, numbered = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        X, numbered, weights = _weighted(X, numbered.astype(np.int64), sample_weight)
        left, targets = np.unique(numbered, return_inverse=True)  # without the rows of weight 0
        self.classes_ = classes[left]
        if len(self.classes_) < 2:
            raise ValueError(f"y has only one class, {self.classes_[0]!r}: a classifier needs two classes or more")
        self._fit(X, targets, weights, len(self.classes_))
        return self

    def calibrate(self, X: Any, y: Any) -> Self:
        """Fit the temperature of the probabilities on held-out rows, as `Ensemble.calibrate` does."""
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, dtype=np.float64)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has classes that fit did not see: {unknown.tolist()[:5]}")
        self.ensemble_.calibrate(torch.from_numpy(X), torch.from_numpy(np.searchsorted(self.classes_, y)))
        return self

    def predict_proba(self, X: Any) -> Table:
        """Return the probability of each class, [rows, classes], in the order of `classes_`."""
        ensemble, rows = self._exact(X)
        return ensemble.predict(rows).probabilities.numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)  # first: it raises if the estimator is not fitted
        chosen: NDArray[Any] = self.classes_[best]
        return chosen

    def predict_std(self, X: Any) -> Table:
        """Return the standard deviation of the members' probabilities, [rows, classes]: their disagreement."""
        ensemble, rows = self._exact(X)
        return ensemble.predict(rows).members.std(0, correction=0).numpy()


class PluresRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Predict a number for each row of a table, with its standard deviation and an interval.

        regressor = PluresRegressor(members=5, hidden=(100,)).fit(X, y)
        regressor.predict(X), regressor.predict_std(X)
        lower, upper = regressor.calibrate(X_held_out, y_held_out).predict_interval(X, coverage=0.9)

    Each member returns a mean and a variance, trained with `plures.GaussianNLL`. Columns and targets are standardised
    inside the network, and predictions are in the original units. `y` may have several columns. The arguments are
    those of `PluresClassifier`.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows `X` with numbers `y`, [rows] or [rows, numbers]; a row of weight 2 counts as two rows."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=True)
        y = np.asarray(y, dtype=np.float64)
        self._flat = y.ndim == 1
        X, targets, weights = _weighted(X, y.reshape(len(y), -1), sample_weight)
        self._fit(X, targets, weights, 2 * targets.shape[1], targets.shape[1])
        return self

    def calibrate(self, X: Any, y: Any) -> Self:
        """Learn from held-out rows how wide intervals must be, and scale the standard deviations."""
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, dtype=np.float64, y_numeric=True, multi_output=True)
        self.ensemble_.calibrate(torch.from_numpy(X), torch.from_numpy(np.asarray(y, dtype=np.float64)))
        return self

    def predict(self, X: Any) -> Table:
        """Return the mean of the members, in the shape of `y`."""
        return self._as_given(self._regress(X).mean)

    def predict_std(self, X: Any) -> Table:
        """Return the standard deviation of the prediction: noise in the data and disagreement of the members."""
        return self._as_given(self._regress(X).std)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Table, Table]:
        """Return the lower and the upper bound between which a share `coverage` of new targets lies.

            regressor = PluresRegressor().fit(X, y).calibrate(X_held_out, y_held_out)
            lower, upper = regressor.predict_interval(X, coverage=0.9)

        This is conformal prediction: the coverage holds, however good or bad the network is, on average over new rows
        from the distribution of the held-out rows.
        """
        answer = self._regress(X)
        if answer.calibration is None:
            raise PluresError(
                "predict_interval needs held-out rows: call calibrate(X, y) with rows that fit did not see"
            )
        lower, upper = answer.interval(coverage)
        return self._as_given(lower), self._as_given(upper)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _regress(self, X: Any) -> plures.Regression:
        ensemble, rows = self._exact(X)
        return ensemble.regress(rows)

    def _as_given(self, values: Tensor) -> Table:
        return values.numpy()[:, 0] if self._flat else values.numpy()


def _weighted(X: Table, y: NDArray[Any], sample_weight: Any) -> tuple[Table, NDArray[Any], Table]:
    """Leave out rows of weight 0, repeat rows of whole weights, and scale other weights to a mean of 1.

    Rows are sorted by a mixture of their columns, so that what is learned does not depend on the order given.
    """
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    mixture = (X * np.cos(np.arange(X.shape[1]))).sum(1)
    order = np.lexsort((y.reshape(len(y), -1)[:, 0], mixture))
    order = order[weights[order] > 0]
    if not len(order):
        raise ValueError("all sample weights are zero: at least one row needs a weight above 0")
    weights = weights[order]
    if (weights % 1 == 0).all() and weights.sum() <= MOST_REPEATED * len(order):
        order = order.repeat(weights.astype(int))
        weights = np.ones(len(order))
    return X[order], y[order], weights / weights.mean()


def _held_first(targets: Tensor) -> Tensor:
    """Return a random order of the rows, with a row of every class among the last: no class is held out whole."""
    order = torch.randperm(len(targets))
    if targets.is_floating_point():
        return order
    _, first = np.unique(targets[order].numpy(), return_index=True)
    last = torch.zeros(len(order), dtype=torch.bool)
    last[torch.from_numpy(first)] = True
    return torch.cat([order[~last], order[last]])


def _moments(values: Table, weights: Table) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of columns."""
    mean = np.average(values, axis=0, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    return torch.from_numpy(mean), torch.from_numpy(np.where(spread > CONSTANT, spread, 1.0))
