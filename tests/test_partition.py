"""Owners partition every split tensor exactly, and survive packing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.file import digits_per_word, pack, unpack
from plures.methods.orthogonal_dropout.owners import FREE, Partition, owner_shape, sizes
from plures.seeding import generator

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@given(st.integers(0, 10_000), st.integers(2, 255))
def test_shares_add_up_and_differ_by_at_most_one(count: int, members: int) -> None:
    shares = sizes(count, members)
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(shapes, st.integers(2, 255), st.sampled_from(["weight", "kernel"]), st.integers(0, 2**40))
def test_a_random_partition_gives_every_unit_one_owner(shape, members, granularity, seed) -> None:
    units = math.prod(owner_shape(shape, granularity))
    if units < members:
        with pytest.raises(PluresError, match="cannot be split among"):
            Partition({"w": shape}, members, granularity)
        return
    partition = Partition({"w": shape}, members, granularity)
    assert partition.free("w").all()
    partition.randomise(seed)
    count = torch.stack([partition.owned("w", member) for member in range(members)]).sum(0)
    assert (count == 1).all()
    assert not partition.free("w").any()
    assert [int(partition.owned("w", member).sum()) for member in range(members)] == sizes(units, members)
    torch.broadcast_shapes(partition.owners()["w"].shape, shape)


def test_the_random_partition_follows_the_seed_and_is_not_the_same_in_every_tensor() -> None:
    def draw(seed: int) -> dict[str, torch.Tensor]:
        partition = Partition({"a": (50, 4), "b": (50, 4)}, 5)
        partition.randomise(seed)
        return partition.owners()

    assert draw(1)["a"].equal(draw(1)["a"])
    assert not draw(1)["a"].equal(draw(2)["a"])
    assert not draw(1)["a"].equal(draw(1)["b"])


@given(st.data(), st.integers(2, 256))
def test_pack_and_unpack_are_the_identity(data, base: int) -> None:
    digits = data.draw(st.lists(st.integers(0, base - 1), max_size=200))
    values = torch.tensor(digits, dtype=torch.uint8)
    words = pack(values, base)
    assert unpack(words, base, len(digits)).equal(values)
    assert words.numel() == math.ceil(len(digits) / digits_per_word(base))


@pytest.mark.parametrize("base", range(2, 257))
def test_full_words_hold_the_largest_digits(base: int) -> None:
    values = torch.full((3 * digits_per_word(base),), base - 1, dtype=torch.uint8)
    assert unpack(pack(values, base), base, values.numel()).equal(values)
    assert base ** digits_per_word(base) <= 2**64 < base ** (digits_per_word(base) + 1)


def test_packing_is_near_the_entropy() -> None:
    owners = torch.from_numpy(np.random.default_rng(0).integers(0, 5, 100_000).astype(np.uint8))
    bits = pack(owners, 5).numel() * 64 / owners.numel()
    assert bits < 1.03 * math.log2(5)


def test_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(PluresError, match="5 is not a digit of base 5"):
        pack(torch.tensor([0, 5], dtype=torch.uint8), 5)
    with pytest.raises(PluresError, match="need 1 words, not 2"):
        unpack(torch.zeros(2, dtype=torch.int64), 5, 20)
    with pytest.raises(PluresError, match="base=300"):
        pack(torch.zeros(1, dtype=torch.uint8), 300)


@pytest.mark.parametrize("members", [1, 0, 256, 300, 2.5, "5"])
def test_member_counts_out_of_range_are_refused(members) -> None:
    with pytest.raises(PluresError, match="from 2 to 255"):
        Partition({"w": (300, 300)}, members)


def test_every_write_is_checked() -> None:
    partition = Partition({"w": (4, 3)}, 3)
    first = torch.zeros(4, 3, dtype=torch.bool)
    first[:2, :2] = True
    partition.claim(0, {"w": first})
    with pytest.raises(PluresError, match="another member owns"):
        partition.claim(1, {"w": first})
    with pytest.raises(PluresError, match="its share is 4"):
        partition.claim(1, {"w": torch.zeros(4, 3, dtype=torch.bool)})
    with pytest.raises(PluresError, match="boolean mask of shape"):
        partition.claim(1, {"w": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(PluresError, match="every split tensor"):
        partition.claim(1, {})
    assert int((partition.owners()["w"] == FREE).sum()) == 8, "a refused claim must write nothing"
    with pytest.raises(PluresError, match="beyond 2"):
        partition.assign({"w": torch.full((4, 3), 7, dtype=torch.uint8)})
    with pytest.raises(PluresError, match="its share is 4"):
        partition.assign({"w": torch.zeros(4, 3, dtype=torch.uint8)})
    with pytest.raises(PluresError, match="uint8 of shape"):
        partition.assign({"w": torch.zeros(4, 3)})


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(PluresError, match="granularity='layer'"):
        Partition({"w": (4, 3)}, 2, "layer")  # type: ignore[arg-type]


def test_generators_of_different_purposes_differ() -> None:
    one, two = (torch.rand(3, generator=generator(0, key)) for key in ("a", "b"))
    assert not one.equal(two)
    assert one.equal(torch.rand(3, generator=generator(0, "a")))
