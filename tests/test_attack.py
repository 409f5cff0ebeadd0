"""A short version of `make attack`: fewer of the same files, threads and inputs, judged in this process."""

from pathlib import Path

import pytest

from attack.commands import Commands, Input, furnish, judge, train_one, workshop
from attack.driver import Results, Tally, run
from attack.files import Files
from attack.folders import Folders
from attack.subjects import SUBJECTS, save_all
from attack.threads import Threads
from attack.trouble import Trouble
from plures.lab.cli.main import commands

pytestmark = pytest.mark.slow


def judged(part, items: int) -> Tally:
    """Judge some items in this process."""
    tally = Tally()
    for index in range(items):
        tally.count(part.name, index, part.judge(index))
    return tally


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    train_one(folder)
    return folder


def test_bad_files_are_refused_or_do_no_harm(tmp_path) -> None:
    save_all(tmp_path)
    items = len(SUBJECTS)  # each of them once
    for kind in ("damaged", "malicious"):
        tally = judged(Files(kind, items, tmp_path, own=tmp_path), items)
        assert tally.bad == []
        assert tally.counts.total() == items
        assert tally.counts["refused"] > items // 2


def test_threads_get_the_bits_of_a_single_one() -> None:
    part = Threads(2)
    assert judged(part, part.items).bad == []


@pytest.mark.usefixtures("no_charts")
def test_bad_inputs_end_with_one_sentence(tmp_path, template) -> None:
    fewer = {"evaluate": 4, "predict": 4, "reproduce": 4, "report": 4}
    furnish(tmp_path, template)
    with workshop(tmp_path):
        parts = [Commands(name, fewer.get(name, 8), template, shop=tmp_path) for name in commands()]
        found = {part.command: judged(part, part.items) for part in parts}
    assert {name: tally.bad for name, tally in found.items()} == {name: [] for name in commands()}
    assert all(tally.counts["refused"] for tally in found.values())


def test_bad_run_folders_are_refused_with_one_sentence(tmp_path, template) -> None:
    furnish(tmp_path, template)
    with workshop(tmp_path):
        assert judged(Folders("", 24, template, shop=tmp_path), 24).bad == []


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist(port) -> None:
    verdict, told = judge(Input(["serve", "nothing", f"--port={port}"]))
    assert (verdict, told) == ("refused", f"plures: port={port}; use a whole number, from 0 to 65535\n")


def test_what_dies_hangs_or_is_wrong_is_counted_and_a_stopped_attack_goes_on(tmp_path) -> None:
    kept = tmp_path / "results.json"
    results = Results(kept, {"seed": 0})
    assert run([Trouble()], results, preloaded=[]) == 3
    assert results.of("trouble").counts == {"refused": 3, "died": 1, "hang": 1, "silent": 1}
    again = Results(kept, {"seed": 0})
    assert run([Trouble(items=9)], again, preloaded=[]) == 3  # six were judged before
    assert again.of("trouble").counts == {"refused": 6, "died": 1, "hang": 1, "silent": 1}
    with pytest.raises(SystemExit, match="another attack"):
        Results(kept, {"seed": 1})
