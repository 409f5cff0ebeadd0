"""Random streams: one for each purpose, the same on every machine."""

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from plures.checks import whole_number
from plures.errors import PluresError


def seed_of(*key: object) -> int:
    """Return the seed of a purpose, 63 bits.

    >>> seed_of(0, "member", 2)
    1919692856861813824
    """
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "little") >> 1


def check_seed(seed: object) -> int:
    """Refuse what is not a seed; return it as Python's own number, which JSON can hold."""
    return whole_number("seed", seed, least=0, most=2**63 - 1)


def generator(seed: int, *key: object) -> torch.Generator:
    """Make the random generator of one purpose: the same seed and key always give the same numbers."""
    return torch.Generator().manual_seed(seed_of(seed, *key))


def permutation(count: int, purpose: str, *key: int) -> npt.NDArray[np.int64]:
    """Shuffle the numbers below `count`.

    >>> permutation(5, "order", 0, 3)
    array([4, 2, 0, 3, 1])

    It sorts the raw output of a bit generator, which numpy promises never to change, unlike its shuffling.
    """
    raw = np.random.PCG64(_sequence(purpose, key)).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64)


def derived_seed(purpose: str, *key: int) -> int:
    """Return one seed of 63 bits for several numbers, as `permutation` does: numpy's way instead of a hash.

    >>> derived_seed("augmentation", 0, 3, 1)
    717934504307426275
    """
    return int(_sequence(purpose, key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _sequence(purpose: str, key: tuple[int, ...]) -> np.random.SeedSequence:
    if min(key) < 0:
        raise PluresError(f"seed, epoch and rank must be zero or more, but {min(key)} was given")
    return np.random.SeedSequence([int.from_bytes(purpose.encode()), *key])
