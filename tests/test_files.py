"""One home each: atomic writes, wording of errors, random streams."""

import doctest
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plures import checks, files, seeding
from plures.errors import PluresError


@pytest.mark.parametrize("module", [checks, files, seeding])
def test_examples_of_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    files.write(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(PluresError, match=r"cannot write .*notes.txt: No space left on device; an existing"):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError), files.replacing(path) as part:  # whatever fails: nothing is left over
        part.write_bytes(b"half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["notes.txt"]  # noqa: PTH208
    files.write(path, b"new")
    assert path.read_bytes() == b"new"


def test_longest_names_and_what_is_no_place_for_a_file(tmp_path):
    files.write(tmp_path / ("ä" * 127), b"long")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for bad in (tmp_path / "file" / "below", tmp_path / "folder", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(PluresError, match="cannot write"):
            files.write(bad, b"")
        with pytest.raises(PluresError, match="cannot write"):
            files.check_place(bad)
    files.check_place(tmp_path / "new" / "file")
    assert not (tmp_path / "new" / "file").exists()


def test_what_a_killed_process_left_beside_a_file_is_no_obstacle(tmp_path):
    (tmp_path / ".page.html.1-1.part").mkdir()
    (tmp_path / ".page.html.2-2.part").write_text("half")
    files.write(tmp_path / "page.html", b"whole")
    assert (tmp_path / "page.html").read_bytes() == b"whole"


def test_threads_that_write_one_file_leave_one_whole_version(tmp_path):
    path = tmp_path / "shared"
    versions = [bytes([number]) * 10_000 for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda contents: files.write(path, contents), versions))
    assert path.read_bytes() in versions
    assert os.listdir(tmp_path) == ["shared"]  # noqa: PTH208


def test_numbers_of_streams_never_change():
    assert seeding.permutation(8, "order", 1, 2).tolist() == [3, 1, 7, 6, 5, 4, 0, 2]
    assert sorted(seeding.permutation(1000, "order", 2**70, 0)) == list(range(1000))
    assert np.array_equal(seeding.permutation(0, "order", 0), [])
    with pytest.raises(PluresError, match="zero or more"):
        seeding.permutation(3, "order", 0, -1)
