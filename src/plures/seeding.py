"""Random streams: one for each purpose, the same on every machine."""

import hashlib

import torch


def seed_of(*key: object) -> int:
    """Turn what names a purpose into a seed of 63 bits.

    torch.manual_seed(seed_of(recipe.seed, stage.name, epoch, rank))
    """
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *key: object) -> torch.Generator:
    """Make the random generator of one purpose: the same seed and key always give the same numbers.

    torch.randn(3, generator=generator(0, "member", 2))
    """
    return torch.Generator().manual_seed(seed_of(seed, *key))
