"""Every engine, copied, pickled, converted, compiled and exported, gives the members' answers or refuses."""

import pytest
import torch

from attack.networks import Networks
from random_networks import wrong_answers


# `make attack` has 500 of them.
@pytest.mark.parametrize("first", [0, 5])
def test_engines_of_random_networks_are_right_or_refused(first) -> None:
    assert [wrong for seed in range(first, first + 5) for wrong in wrong_answers(seed)] == []


@pytest.mark.parametrize("first", [0, 20])
def test_engines_of_members_that_change_random_networks_are_right_or_refused(first) -> None:
    assert [wrong for seed in range(first, first + 8) for wrong in wrong_answers(seed, changes=True)] == []


@pytest.mark.parametrize(("seed", "changes"), [(100, False), (100, True)])
def test_compiled_engines_of_random_networks_are_right_or_refused(seed, changes) -> None:
    assert list(wrong_answers(seed, compiled=True, changes=changes)) == []
    torch.compiler.reset()


@pytest.mark.parametrize("seed", [105])
def test_exported_random_networks_are_right_or_refused(seed) -> None:
    assert list(wrong_answers(seed, exported=True)) == []


def test_the_attack_judges_them() -> None:
    assert [verdict.word for verdict in Networks(items=1, seed=7).judge(0)] == ["same"]
