"""The scripts that make tables for the site: what they measure on, and what they count."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cheaper
import classifiers
import evidence
import held_out
import plures
from plures.lab.compare import worker
from plures.lab.compare.jobs import Job, Variant
from plures.lab.recipes import RECIPES, Epochs, get_recipe
from plures.lab.runs.open import data_for, network_for
from plures.lab.timing.costs import Costs


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


def test_the_evidence_of_several_machines_makes_one_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    small = replace(get_recipe("digits"), width=8, limit=120, validation=40, epochs=Epochs(train=1))
    monkeypatch.setitem(RECIPES, "digits", small)
    wanted = evidence.Wanted("table1-digits", "digits", (evidence.SINGLE, Variant("mc-dropout")), (0, 1))
    monkeypatch.setattr(evidence, "WANTED", (wanted,))
    made = []

    def make(jobs: list[Job], *_: object) -> dict[Path, str]:
        for job in jobs[:3]:
            worker.make(worker.describe(job, None))
            made.append((job.variant.method, job.recipe.seed))
        if jobs[3:]:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(evidence, "make_runs", make)
    monkeypatch.setattr(evidence, "costs_of", lambda *_: Costs(size=1.0, prediction=2.0, epochs=3.0))
    with pytest.raises(KeyboardInterrupt):
        evidence.main(["--runs", str(tmp_path / "one machine")])
    evidence.main(["--runs", str(tmp_path / "another")])  # which has none of the runs, and makes the last one only
    assert made == [("deterministic", 0), ("mc-dropout", 0), ("deterministic", 1), ("mc-dropout", 1)]
    evidence.main(["--runs", str(tmp_path / "another")])
    assert len(made) == 4, "what is kept is not made again"
    single, dropout = json.loads((tmp_path / "results/table1-digits.json").read_text())["rows"]
    assert single["seeds"] == dropout["seeds"] == [0, 1]
    runs = [tmp_path / "one machine/digits/deterministic" / f"seed-{seed}/metrics.json" for seed in (0, 1)]
    accuracies = [json.loads(path.read_text())["accuracy"] for path in runs]
    assert single["metrics"]["accuracy"]["values"] == accuracies
    assert single["metrics"]["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
    assert single["costs"] == dropout["costs"] == {"size": 1.0, "prediction": 2.0, "epochs": 3.0}
    text = (tmp_path / "results/table1-digits.md").read_text()
    assert "seeds 0, 1: mean ± standard deviation" in text
    monkeypatch.setattr(evidence, "WANTED", (replace(wanted, seeds=(0, 1, 2)),))
    path = tmp_path / "results/runs/digits/mc-dropout/seed-1.json"
    path.write_text(path.read_text().replace('"width": 8', '"width": 9'))  # made with another recipe
    evidence.write("table1-digits")
    assert "fewer seeds: mc-dropout (0)" in (tmp_path / "results/table1-digits.md").read_text()


def test_rows_of_the_evidence_have_the_figures_of_the_paper_that_belong_to_them() -> None:
    known = {one.name: evidence.paper_name(one) for one in evidence.METHODS}
    assert known["deep-ensemble"] == "deep-ensemble"
    assert known["orthogonal-dropout, as published"] == "orthogonal-dropout"
    assert known["orthogonal-dropout"] == known["packed-ensemble, mean of the losses"] == ""


def test_the_tables_are_those_of_the_runs_that_were_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    kept = evidence.RESULTS
    for path in sorted((kept / "runs").glob("*/*/seed-*.json")):
        assert any(evidence.kept_path(job) == path for one in evidence.WANTED for job in one.jobs(Path())), (
            f"no table has {path}"
        )
    shutil.copytree(kept / "runs", tmp_path / "runs")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    evidence.main(["--tables", "--runs", str(tmp_path / "none")])
    made = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert "table1-cifar10-cpu" in made
    for name in made:
        assert (tmp_path / f"{name}.md").read_text() == (kept / f"{name}.md").read_text(), name


def test_runs_with_other_settings_are_no_evidence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    small = replace(get_recipe("digits"), width=8, limit=120, validation=40, epochs=Epochs(train=1))
    monkeypatch.setitem(RECIPES, "digits", small)
    variant = Variant("mc-dropout")
    (job,) = evidence.Wanted("table1-digits", "digits", (variant,)).jobs(tmp_path / "runs")
    worker.make(worker.describe(job, None))
    evidence.keep(job)
    assert evidence.kept(job) is not None
    evidence.kept_path(job).unlink()
    with pytest.raises(plures.PluresError, match="width"):
        evidence.keep(replace(job, recipe=replace(small, width=9)))
    with pytest.raises(plures.PluresError, match="made with other options than mc-dropout rate=0.3 has"):
        evidence.keep(replace(job, variant=Variant("mc-dropout", ("rate=0.3",))))
    assert not evidence.kept_path(job).exists()
    with pytest.raises(SystemExit):
        evidence.main(["--only", "tabel1"])
