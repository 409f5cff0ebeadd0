"""A run folder may come from anybody, or from a failing disk: whatever its files say, the answer is one sentence."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import plures
from plures import PluresError
from plures.lab.cli.main import main
from plures.lab.compare.rows import rows_of
from plures.lab.compare.table import columns
from plures.lab.costs import kept_costs
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import open_run

RUN = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"
ODD: list[Any] = [None, [], {}, -1, 1e308, 10**400, "x", "\x1b[31m", True, [[]], {"x": 1}]


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(RUN, tmp_path / "run")


def bent(document: Any) -> list[Any]:
    """Put each odd value, or nothing, in every place of a document in turn."""
    found = []
    for path in places(document):
        for odd in (*ODD, KeyError):
            changed = copy.deepcopy(document)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if odd is KeyError:
                del holder[path[-1]]
            else:
                holder[path[-1]] = odd
            found.append(changed)
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List where a value stands; of a list the first alone."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    return [one for key in keys for one in ((*path, key), *places(value[key], (*path, key)))]


def test_a_regression_run_of_the_last_version_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["data"] |= {"channels": 10, "size": 1, "target_mean": 152.1, "target_std": 77.0}
    (folder / "config.json").write_text(json.dumps(config))
    for words in (["evaluate"], ["predict", "wren.png"], ["report", "--out", str(folder / "report.html")]):
        assert main([words[0], str(folder), *words[1:]]) == 2
        said = capsys.readouterr().err
        assert "is a regression run" in said
        assert "plures.sklearn" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
def test_no_value_of_a_run_leads_to_a_traceback(folder: Path, name: str) -> None:
    refused = 0
    changed = bent(json.loads((folder / name).read_text()))
    for document in changed:
        (folder / name).write_text(json.dumps(document))
        try:
            assert columns(rows_of([folder]))
        except PluresError as error:
            assert str(error).isprintable()
            refused += 1
    assert refused > len(changed) / 2


@pytest.mark.parametrize("name", ["images", "members"])
@pytest.mark.parametrize("count", [0, -1])
def test_metrics_of_no_images_or_members_are_damaged(folder: Path, name: str, count: int) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | {name: count}))
    with pytest.raises(PluresError, match=r"metrics.json is damaged .*: remove it"):
        rows_of([folder])


@pytest.mark.parametrize("contents", ["[" * 100_000, "{}", "null", '{"size": "x", "prediction": 1, "epochs": 1}'])
def test_damaged_costs(folder: Path, contents: str) -> None:
    (folder / "costs.json").write_text(contents)
    with pytest.raises(PluresError, match=r"costs.json is damaged .*: remove it"):
        kept_costs(folder)


@pytest.mark.parametrize(("name", "value"), [("width", 60_000), ("model", "resnet50")])
def test_a_network_that_the_file_has_no_weights_for_is_not_built(folder: Path, monkeypatch, name, value) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["recipe"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    drawn = nn.init.kaiming_normal_

    def bounded(tensor, *args, **options):
        assert tensor.is_meta, "weights are drawn before the file was looked at"
        return drawn(tensor, *args, **options)

    monkeypatch.setattr(nn.init, "kaiming_normal_", bounded)
    with pytest.raises(PluresError, match="too few for a network|was saved from another network|this machine has"):
        open_run(folder)


def test_names_that_the_system_refuses(tmp_path) -> None:
    for use in (lambda path: plures.load(path, nn.Linear(1, 1)), open_run):
        with pytest.raises(PluresError, match="File name too long"):
            use(tmp_path / ("x" * 300))


@pytest.mark.parametrize("key", ["stage", "phase", "member", "epoch", "loss", "validation_accuracy"])
def test_a_record_that_lacks_something_is_left_out(folder: Path, key: str) -> None:
    run = RunFolder(folder)
    before = run.records()
    lacking = {name: value for name, value in before[-1].items() if name != key}
    with run.log.open("a") as log:
        log.write(json.dumps(lacking) + "\n")
    assert run.records() == before
