"""Choose rows by class: the same choice for the same seed, on every machine."""

import numpy as np
import numpy.typing as npt

from plures.errors import PluresError

Rows = npt.NDArray[np.int64]


def permutation(count: int, purpose: str, *key: int) -> Rows:
    """Shuffle the numbers below `count`.

        permutation(50_000, "order", seed, epoch)

    It sorts the raw output of a bit generator, which numpy promises never to change, unlike its shuffling.
    """
    return np.argsort(np.random.PCG64(_seeds(purpose, key)).random_raw(count), kind="stable").astype(np.int64)


def derived_seed(purpose: str, *key: int) -> int:
    """Turn several numbers into one seed of 63 bits for another generator.

    torch.Generator().manual_seed(derived_seed("augmentation", seed, epoch, rank))
    """
    return int(_seeds(purpose, key).generate_state(1, np.uint64)[0] >> np.uint64(1))


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


def _seeds(purpose: str, key: tuple[int, ...]) -> np.random.SeedSequence:
    if min(key) < 0:
        raise PluresError(f"Seed, epoch and rank must be zero or more, but {min(key)} was given.")
    return np.random.SeedSequence([int.from_bytes(purpose.encode()), *key])
