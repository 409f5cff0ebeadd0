"""Compare the estimators with scikit-learn's perceptrons, for the table of docs/guide/scikit-learn.md.

python docs/make/estimators.py
"""

import re
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from plures.sklearn import PluresClassifier, PluresRegressor

PAGE = Path(__file__).parent.parent / "guide" / "scikit-learn.md"
TABLES = ("iris", "wine", "breast_cancer", "digits", "diabetes")
HEADING = "table | error of | `MLP*` | `MLP*`, scaled | plures | time of `fit` / `MLP*`"


def main() -> None:
    """Train, measure and write."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # scikit-learn's own, of networks that have not converged
    lines = [HEADING, "|".join(["---"] * 6), *map(line, TABLES)]
    made = "".join(f"| {one} |\n" for one in lines)
    marked = re.compile(r"<!-- table -->\n.*?<!-- end -->", re.DOTALL)
    PAGE.write_text(marked.sub(lambda _: f"<!-- table -->\n{made}<!-- end -->", PAGE.read_text()))


def estimators(numbers: bool, seed: int) -> list[Any]:
    """Return a perceptron on raw columns, one on standardised columns, and ours; all with their defaults."""
    if not numbers:
        plain = MLPClassifier(max_iter=1000, random_state=seed)
        return [plain, make_pipeline(StandardScaler(), plain), PluresClassifier(random_state=seed)]
    plain = MLPRegressor(max_iter=1000, random_state=seed)
    scaled = TransformedTargetRegressor(plain, transformer=StandardScaler())
    return [plain, make_pipeline(StandardScaler(), scaled), PluresRegressor(random_state=seed)]


def line(name: str) -> str:
    """Measure one table: five folds, the seed of a fold is its number."""
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    numbers = name == "diabetes"
    splits = KFold if numbers else StratifiedKFold
    errors: list[list[float]] = [[], [], []]
    ratios = []
    estimators(numbers, 0)[2].fit(X[::3], y[::3])  # the native library is loaded, and compiled if need be, once
    for fold, (train, test) in enumerate(splits(5, shuffle=True, random_state=0).split(X, y)):
        times = []
        for found, one in zip(errors, estimators(numbers, fold), strict=True):
            start = time.process_time()
            one.fit(X[train], y[train])
            times.append(time.process_time() - start)
            if numbers:
                found.append(root_mean_squared_error(y[test], one.predict(X[test])))
            else:
                found.append(log_loss(y[test], one.predict_proba(X[test]), labels=np.unique(y)))
        ratios.append(times[2] / times[0])
    digits = 1 if numbers else 3
    shown = [f"{statistics.mean(one):.{digits}f} ± {statistics.stdev(one):.{digits}f}" for one in errors]
    measure = "root mean square" if numbers else "log loss"
    row = [name.replace("_", " "), measure, *shown, f"{statistics.median(ratios):.1f}"]
    print(row)
    return " | ".join(row)


if __name__ == "__main__":
    main()
