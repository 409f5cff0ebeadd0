"""A short version of `make attack`: the same files, threads and inputs, fewer of them."""

import pytest

from attack.commands import Input, attack_with_inputs, judge
from attack.files import attack_with_files
from attack.threads import attack_with_threads
from plures.lab.cli.main import commands


@pytest.mark.parametrize("kind", ["damaged", "malicious"])
def test_bad_files_are_refused_or_do_no_harm(kind) -> None:
    tally = attack_with_files(kind, 100)
    assert not tally.bad
    assert tally.counts["refused"] > 50


def test_threads_get_the_bits_of_a_single_one(tmp_path) -> None:
    assert {name: wrong for name, _, wrong in attack_with_threads(4, tmp_path) if wrong} == {}


def test_bad_inputs_end_with_one_sentence() -> None:
    found = list(attack_with_inputs(24, names=("train", "compare", "serve", "export", "recipes", "bench")))
    found += attack_with_inputs(6, names=("evaluate", "predict", "reproduce"))
    found += attack_with_inputs(2, names=("report",))  # a page takes a while
    assert {one.command: one.bad for one in found} == {name: [] for name in commands()}
    assert all(one.counts["refused"] for one in found)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist(port) -> None:
    verdict, told = judge(Input(["serve", "nothing", f"--port={port}"]))
    assert (verdict, told) == ("refused", f"plures: port={port}; use a whole number, from 0 to 65535\n")
