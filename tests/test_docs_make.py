"""The scripts that make tables for the site: what they measure on, and what they count."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import classifiers
import evidence
import plures
import short
import store
import tables
from plures.lab.compare import Job, Variant
from plures.lab.costs import Costs
from plures.lab.recipes import RECIPES, Epochs, get_recipe
from plures.lab.runs.open import data_for, ensemble_for, network_for
from plures.methods.building import GONE


def test_held_out_images_are_those_that_no_training_saw(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path))
    recipe = get_recipe("digits")
    data = data_for(recipe, None)
    found = store.held_out_images(SimpleNamespace(recipe=recipe, data=lambda _: data), None)
    assert len(found) == 1347 - 300
    assert not set(found.rows) & set(data.train.rows)
    assert set(data.validation.rows) <= set(found.rows)
    places = [list(found.rows).index(row) for row in data.validation.rows]
    assert np.array_equal(found.labels[places], data.validation.labels)
    assert found.info == data.info, "prepared as the training images were"


def test_the_fixed_classifier_with_a_scale_shares_its_directions_and_no_more() -> None:
    (job, *_) = classifiers.jobs_of("digits", [0], Path("runs"))[classifiers.SCALED]
    roles = plures.roles(network_for(job.recipe, 10, 1, 8))
    named = {name: str(role) for name, role in roles.items() if ".layer." in name or "exponent" in name}
    assert sorted(named.values()) == ["private", "shared", "shared"]
    folders = [jobs[0].run for jobs in classifiers.jobs_of("digits", [0], Path("runs")).values()]
    assert all(one != other for one, other in pairwise(sorted(folders)))


FORMS = [("digits", "private"), ("digits-resnet", "private"), ("cifar10-cpu", "private"), ("cifar100-cpu", "split")]


@pytest.mark.parametrize(("recipe", "form"), FORMS)
def test_the_form_of_the_classifier_that_is_the_default_has_its_runs(recipe: str, form: str) -> None:
    (job, *_) = classifiers.jobs_of(recipe, [0], Path("runs"))[form]
    assert job.run == Path("runs") / recipe / "orthogonal-dropout/seed-0"
    classes, channels, size = (100 if "100" in recipe else 10), (1 if "digits" in recipe else 3), 8
    roles = plures.roles(network_for(job.recipe, classes, channels, size))
    last = [name for name in roles if name.endswith(".weight")][-1]
    assert str(roles[last]) == form


def keep_in(folder: Path, monkeypatch) -> None:
    """Keep figures and tables in a folder instead of that of the site."""
    monkeypatch.setattr(store, "RESULTS", folder)
    monkeypatch.setenv("PYTHONPATH", "")


def test_the_evidence_of_several_machines_makes_one_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    keep_in(tmp_path / "results", monkeypatch)
    small = replace(get_recipe("digits"), width=8, limit=120, validation=40, epochs=Epochs(train=1))
    monkeypatch.setitem(RECIPES, "digits", small)
    wanted = evidence.Wanted("table1-digits", "digits", (evidence.SINGLE, Variant("mc-dropout")), (0, 1))
    monkeypatch.setattr(evidence, "WANTED", (wanted,))
    made = []

    def make(jobs: list[Job], *_: object) -> dict[Path, str]:
        for job in jobs[:3]:
            short.make(job)
            made.append((job.variant.method, job.recipe.seed))
        if jobs[3:]:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(evidence, "make_runs", make)
    monkeypatch.setattr(store.costs, "kept_costs", lambda _: Costs(size=1.0, prediction=2.0, epochs=3.0))
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


def test_the_tables_are_those_of_the_runs_that_were_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    results = store.RESULTS
    wanted = {store.path_of(job) for one in evidence.WANTED for job in one.jobs(Path())}
    for path in sorted((results / "runs").glob("*/*/seed-*.json")):
        assert path in wanted, f"no table has {path}"
    shutil.copytree(results / "runs", tmp_path / "results/runs")
    keep_in(tmp_path / "results", monkeypatch)
    evidence.main(["--tables", "--runs", str(tmp_path / "none")])
    made = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    names = {one.table for one in evidence.WANTED}
    assert made == {name for name in names if (results / f"{name}.md").is_file()}, "a table of runs that count no more"
    assert (tmp_path / "results/figure1-cpu.svg").is_file()
    for path in (path for name in made for path in (tmp_path / "results").glob(f"{name}.*") if path.suffix != ".svg"):
        assert path.read_text() == (results / path.name).read_text(), path.name
    assert names <= {found[1] for page in tables.pages() for found in tables.PLACE.finditer(page.read_text())}


CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "tiny-imagenet-20": 20, "cub200-30": 30}


def test_runs_that_were_kept_have_the_options_that_their_methods_have_today() -> None:
    """A default that follows from the network does not show in the words that a run was made with."""
    today: dict[tuple[str, Variant], dict[str, object]] = {}
    checked = 0
    for job in evidence.unique(job for one in evidence.WANTED for job in one.jobs(Path("runs"))):
        kept = store.read(job, "held_out") or store.read(job, "metrics")
        if kept is None:
            continue
        recipe, data, key = job.recipe, job.recipe.data, (job.recipe_name, job.variant)
        if key not in today:
            network = network_for(recipe, CLASSES[data], 1 if data == "digits" else 3, 8 if data == "digits" else 32)
            today[key] = ensemble_for(recipe, job.variant.method, job.variant.settings, network).options()
        told = [(name, value) for name, value in kept["options"].items() if (name, value) not in GONE]
        assert not [name for name, value in told if today[key][name] != value], store.path_of(job)
        checked += 1
    assert checked > 50


def test_all_runs_compute_alike_whatever_the_processor_has() -> None:
    jobs = [job for one in evidence.WANTED for job in one.jobs(Path())]
    assert {job.recipe.precision for job in jobs} == {"no"}


def test_a_table_is_named_as_a_whole_or_by_its_beginning() -> None:
    def tables_of(*names: str) -> set[str]:
        return {one.table for one in evidence.chosen(names)}

    assert tables_of("classifiers-digits") == {"classifiers-digits"}
    assert tables_of("classifiers-dig") == {"classifiers-digits", "classifiers-digits-resnet"}
    assert tables_of("") == {one.table for one in evidence.WANTED}


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch) -> evidence.Wanted:
    """Three seeds of a small run that are wanted, none of which was kept."""
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    keep_in(tmp_path / "results", monkeypatch)
    small = replace(get_recipe("digits"), width=8, limit=120, validation=40, epochs=Epochs(train=1))
    monkeypatch.setitem(RECIPES, "digits", small)
    wanted = evidence.Wanted("table1-digits", "digits", (Variant("mc-dropout"),), (0, 1, 2))
    monkeypatch.setattr(evidence, "WANTED", (wanted,))
    return wanted


def test_runs_with_other_settings_are_no_evidence(tmp_path: Path, wanted: evidence.Wanted) -> None:
    job = wanted.jobs(tmp_path / "runs")[0]
    short.make(job)
    store.keep(job, None)
    assert store.read(job, "metrics") is not None
    path = store.path_of(job)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"options": kept["options"] | {"passes": 9}}))
    assert store.read(job, "metrics") is None, "the method had another default when it was made"
    del kept["recipe"]["clip"]
    path.write_text(json.dumps(kept))
    assert store.read(job, "metrics") is not None, "a setting that is new, and None, changes nothing"
    path.unlink()
    with pytest.raises(plures.PluresError, match="width"):
        store.keep(replace(job, recipe=replace(job.recipe, width=9)), None)
    with pytest.raises(plures.PluresError, match="made with other options than mc-dropout rate=0.3 has"):
        store.keep(replace(job, variant=Variant("mc-dropout", ("rate=0.3",))), None)
    assert not path.exists()
    with pytest.raises(SystemExit):
        evidence.main(["--only", "tabel1"])


def test_a_bad_folder_among_the_runs_costs_none_of_the_others(tmp_path: Path, wanted: evidence.Wanted) -> None:
    jobs = wanted.jobs(tmp_path / "runs")
    for job in jobs:
        short.make(job)
    config = jobs[1].run / "config.json"
    config.write_text(config.read_text().replace('"width": 8', '"width": 9'))
    with pytest.raises(SystemExit, match="recipe.width was 9 and is 8"):
        evidence.main(["--tables", "--runs", str(tmp_path / "runs")])
    table = tmp_path / "results/table1-digits.json"
    assert json.loads(table.read_text())["rows"][0]["seeds"] == [0, 2]


@pytest.mark.usefixtures("wanted")
def test_some_of_the_runs_are_chosen_by_their_folders(tmp_path: Path, monkeypatch) -> None:
    made: list[str] = []

    def make(jobs: list[Job], *_: object) -> dict[Path, str]:
        made.extend(job.run.name for job in jobs)
        return {}

    monkeypatch.setattr(evidence, "make_runs", make)
    for words in (["--folder", "dropout/seed-1", "seed-2"], ["--folder", "seed-9"], ["--folder", tmp_path.name], []):
        evidence.main(["--runs", str(tmp_path / "runs"), *words])
        made.append("|")
    assert "".join(made) == "seed-1seed-2|||seed-0seed-1seed-2|"


def test_what_was_kept_stays_until_it_counts_no_more(tmp_path: Path, wanted: evidence.Wanted, monkeypatch) -> None:
    job = wanted.jobs(tmp_path / "runs")[0]
    short.make(job)
    store.keep(job, None)
    path = store.path_of(job)
    kept = json.loads(path.read_text())
    kept["metrics"]["nll"] = 7.0
    del kept["held_out"]  # as in figures from before they were measured there
    path.write_text(json.dumps(kept))
    store.keep(job, None)  # made again, perhaps on another machine
    again = json.loads(path.read_text())
    assert again["metrics"]["nll"] == 7.0
    assert again["held_out"]["images"] > 0
    evidence.main(["--tables", "--runs", str(tmp_path / "none")])
    table = tmp_path / "results/table1-digits.md"
    assert "7.000" in table.read_text()
    monkeypatch.setitem(RECIPES, "digits", replace(RECIPES["digits"], width=9))
    evidence.main(["--tables", "--runs", str(tmp_path / "none")])
    assert not table.exists()


def test_runs_of_different_images_are_not_put_into_one_table() -> None:
    one = {"recipe": {"seed": 0}, "data": "some"}
    store.refuse_other_data("table1", [one, one, {"recipe": {"seed": 1}, "data": "others"}, {"recipe": {"seed": 0}}])
    with pytest.raises(plures.PluresError, match="table1 with seed 0 were made of different images"):
        store.refuse_other_data("table1", [one, one | {"data": "others"}])
