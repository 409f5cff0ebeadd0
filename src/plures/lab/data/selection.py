"""Choose rows by class: the same choice for the same seed, on every machine."""

import numpy as np
import numpy.typing as npt

from plures.seeding import permutation

Rows = npt.NDArray[np.int64]


def stratified(labels: Rows, count: int, seed: int) -> Rows:
    """Choose `count` rows so that every class gives the same fraction, in ascending order.

    validation = stratified(labels, 5_000, seed=0)
    """
    shuffled = permutation(len(labels), "stratified", seed)
    place, size = _places(labels[shuffled])
    # The middle of a row's place on the way through its class, from 0 to 1.
    return _first(shuffled, (place + 0.5) / size, count)


def balanced(labels: Rows, count: int, seed: int) -> Rows:
    """Choose `count` rows, equally many of each class as far as the classes reach, in ascending order.

    subset = balanced(labels, 10_000, seed=0)
    """
    shuffled = permutation(len(labels), "balanced", seed)
    place, _ = _places(labels[shuffled])
    return _first(shuffled, place, count)


def _places(labels: Rows) -> tuple[Rows, Rows]:
    """Return for every row how many rows of its class stand before it, and how many there are in all."""
    grouped = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[grouped], return_index=True, return_counts=True)
    place, size = np.empty_like(labels), np.empty_like(labels)
    place[grouped] = np.arange(len(labels)) - np.repeat(starts, sizes)
    size[grouped] = np.repeat(sizes, sizes)
    return place, size


def _first(rows: Rows, keys: npt.NDArray[np.float64] | Rows, count: int) -> Rows:
    """Return the rows of the smallest keys; of equal keys the earlier row, which is a random one in a shuffled list."""
    return np.sort(rows[np.argsort(keys, kind="stable")[:count]])
