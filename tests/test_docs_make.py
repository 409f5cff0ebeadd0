"""The scripts that make tables for the site: what they measure on, and what they count."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cheaper
import classifiers
import held_out
import join
import plures
from plures.errors import PluresError
from plures.lab.compare import worker
from plures.lab.recipes import RECIPES, Epochs, get_recipe
from plures.lab.runs.open import data_for, network_for


def test_held_out_images_are_those_that_no_training_saw(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path))
    recipe = get_recipe("digits")
    data = data_for(recipe, None)
    found = held_out.images_for(SimpleNamespace(recipe=recipe, data=lambda _: data), None)
    assert len(found) == 1347 - 300
    assert not set(found.rows) & set(data.train.rows)
    assert set(data.validation.rows) <= set(found.rows)
    places = [list(found.rows).index(row) for row in data.validation.rows]
    assert np.array_equal(found.labels[places], data.validation.labels)
    assert found.info == data.info, "prepared as the training images were"


def test_every_schedule_has_runs_of_its_own_and_the_usual_one_those_of_compare() -> None:
    jobs = {one: cheaper.jobs_of(one, "digits-resnet", [0, 1], Path("runs")) for one in cheaper.SCHEDULES}
    folders = [job.run for own in jobs.values() for job in own]
    assert len(set(folders)) == len(folders) == 2 * len(cheaper.SCHEDULES)
    assert Path("runs/digits-resnet/orthogonal-dropout/seed-1") in folders
    parents = [job.recipe.weights for one, own in jobs.items() for job in own if one.parent]
    assert set(parents) == {f"runs/digits-resnet/deterministic/seed-{seed}" for seed in (0, 1)}


def test_training_is_counted_in_epochs_and_in_what_is_not_multiplied_by_zero(tmp_path: Path) -> None:
    usual = next(one for one in cheaper.SCHEDULES if one.name == "split, as the recipe")
    (job,) = cheaper.jobs_of(usual, "digits", [0], tmp_path)
    network = network_for(job.recipe, 10, 1, 8)
    plan = plures.OrthogonalDropout(network, job.recipe.members).plan()
    records = [
        {"stage": step.name, "phase": step.phase, "member": step.member, "epoch": epoch, "epochs": 30, "loss": 1}
        | {"train_accuracy": None, "validation_accuracy": None}
        | {"seconds": 1}
        for step in plan
        for epoch in range(1, job.recipe.epochs.of(step.phase) + 1)
    ]
    job.run.mkdir(parents=True)
    (job.run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    epochs, multiplied = cheaper.cost(usual, job, tmp_path)
    assert epochs == 5 * (30 + 3 + 30) - 3
    assert multiplied == pytest.approx(33 * (1 + 0.8 + 0.6 + 0.4) + 30 * 0.2 + 5 * 30 * 0.2)


def test_the_fixed_classifier_with_a_scale_shares_its_directions_and_no_more() -> None:
    (job, *_) = classifiers.jobs_of("digits", [0], Path("runs"))[classifiers.SCALED]
    roles = plures.roles(network_for(job.recipe, 10, 1, 8))
    named = {name: str(role) for name, role in roles.items() if ".layer." in name or "exponent" in name}
    assert sorted(named.values()) == ["private", "shared", "shared"]
    folders = [jobs[0].run for jobs in classifiers.jobs_of("digits", [0], Path("runs")).values()]
    assert all(one != other for one, other in pairwise(sorted(folders)))


def test_schedules_are_trained_measured_and_drawn(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    epochs = Epochs(pretrain=4, prune=1, finetune=1, train=2)
    small = replace(get_recipe("digits"), width=16, members=2, limit=120, validation=40, epochs=epochs)
    monkeypatch.setitem(RECIPES, "digits", small)
    kept = ("one network", "split, as the recipe", "split from one parent, a quarter", "split, a quarter, distilled")
    monkeypatch.setattr(
        cheaper, "make", lambda jobs, *_: [worker.make(worker.describe(job, None)) for job in jobs]
    )  # no processes
    for module in (cheaper, held_out):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    cheaper.main(["digits", "--runs", str(tmp_path / "runs"), "--schedules", *kept[1:]])  # a parent is trained unasked
    lines = (tmp_path / "cheaper-digits.md").read_text().splitlines()
    spent = {cells[1].strip(): float(cells[2]) for line in lines[2:6] for cells in [line.split("|")]}
    # A parent takes 2 epochs and spares the first pre-training; distilling the second member takes a third of an epoch.
    assert spent == dict(zip(kept, (2, 11, 2 + 1 + 1 + 1 + 1, 5), strict=True))
    assert "one network" in (tmp_path / "cheaper-digits.svg").read_text()


def part(name: str, figures: dict[int, float], failures: tuple[str, ...] = ()) -> dict:
    """A row of a table as `plures compare --out` writes it, with an accuracy for each seed."""
    accuracy = {"mean": None, "deviation": None, "values": list(figures.values())}
    return {
        "name": name,
        "method": "deep-ensemble",
        "seeds": list(figures),
        "metrics": {"accuracy": accuracy, "nll": {"mean": None, "deviation": None, "values": []}},
        "member_accuracies": [None for _ in figures],
        "costs": {"size": 5.0, "prediction": 5.0, "epochs": 150.0},
        "paper": None,
        "failures": list(failures),
    }


def test_tables_made_in_parts_are_joined_as_if_made_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(join, "RESULTS", tmp_path)
    parts = {"a": [part("deep", {2: 0.5, 1: 0.7}), part("other", {0: 0.8})], "b": [part("deep", {0: 0.9})]}
    for folder, rows in parts.items():
        (tmp_path / "parts" / folder).mkdir(parents=True)
        document = {"about": {"command": f"plures {folder}", "machine": "one"}, "rows": rows}
        (tmp_path / "parts" / folder / "table.json").write_text(json.dumps(document))
    join.main(["table"])
    found = json.loads((tmp_path / "table.json").read_text())
    deep, other = found["rows"]
    assert (deep["seeds"], deep["metrics"]["accuracy"]["values"]) == ([0, 1, 2], [0.9, 0.7, 0.5])
    assert deep["metrics"]["accuracy"]["mean"] == pytest.approx(0.7)
    assert deep["metrics"]["accuracy"]["deviation"] == pytest.approx(0.2)
    assert (other["seeds"], other["metrics"]["accuracy"]["deviation"]) == ([0], None)
    text = (tmp_path / "table.md").read_text()
    assert "| deep | 70.0 ± 20.0 |" in text
    assert "fewer seeds: other 0" in text
    assert "commands: plures a; plures b" in text
    with pytest.raises(PluresError, match="deep has a seed in more than one part"):
        join.joined([part("deep", {0: 0.5}), part("deep", {0: 0.5})])
    with pytest.raises(PluresError, match="other failed with seed 1: NaN"):
        join.joined([part("other", {0: 0.5}, ("seed 1: NaN",))])
