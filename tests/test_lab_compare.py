"""Comparisons: what is run, what is skipped, what stands in the tables."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab import figures, terminal
from plures.lab.cli.main import main, parse
from plures.lab.cli.train import Train
from plures.lab.compare import Comparison, Job, Variant, variants
from plures.lab.compare import table as write
from plures.lab.compare.compare import compare, make_runs, planned
from plures.lab.compare.rows import rows_of
from plures.lab.compare.table import columns, markdown
from plures.lab.costs import plain_step, relative
from plures.lab.data import DataSplit, open_data
from plures.lab.evaluation import evaluate as evaluation
from plures.lab.models import build
from plures.lab.paper import TABLE1, TABLE2, TABLE3, TARGETS, Scale, paper_data
from plures.lab.runs.config import train_words
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import open_run
from plures.prediction import Predictor
from plures.storage import save
from short import METHODS, SHORT, SHORT_WORDS, make, start_in_this_process


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """Three methods with two seeds each, made without further processes."""
    runs = tmp_path_factory.mktemp("runs")
    comparison = Comparison("digits", SHORT, variants(METHODS), seeds=(0, 1))
    make(*comparison.jobs(runs))
    return comparison, runs


def test_compare_writes_what_the_runs_measured_and_makes_none_again(
    finished: tuple[Comparison, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, runs = finished
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("ensemble.safetensors")}
    words = ["compare", "digits", "--methods", *METHODS, "--seeds", "2", *SHORT_WORDS, "--runs", str(runs)]
    monkeypatch.setattr("sys.argv", ["plures", *words])
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "6 done before, 0 to train" in shown.err
    assert "deep-ensemble" in shown.out
    results = json.loads((runs / "digits/results.json").read_text())
    assert [row["name"] for row in results["rows"]] == list(METHODS)
    for row in results["rows"]:
        nll = [RunFolder(runs / "digits" / row["name"] / f"seed-{seed}").metrics()["nll"] for seed in (0, 1)]
        assert row["metrics"]["nll"]["values"] == nll
        assert row["metrics"]["nll"]["mean"] == pytest.approx(sum(nll) / 2)
        assert row["metrics"]["nll"]["deviation"] == pytest.approx(abs(nll[0] - nll[1]) / 2**0.5)
    sizes = [row["costs"]["size"] for row in results["rows"]]
    assert (sizes[0], sizes[2]) == (1, pytest.approx(2, rel=0.02))
    assert [row["seeds"] for row in results["rows"]] == [[0, 1]] * len(METHODS)
    assert "plures compare digits" in (runs / "digits/results.md").read_text()

    assert {path: path.stat().st_mtime_ns for path in runs.rglob("ensemble.safetensors")} == before


def test_a_run_builds_its_network_and_engine_once_and_predicts_every_image_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    engines: list[object] = []
    predicted: list[str] = []

    def counted(model: str, *words: int, **more: Any) -> torch.nn.Module:
        built.append(model)
        return build(model, *words, **more)

    def made(ensemble: Ensemble) -> Predictor:
        engines.append(ensemble)
        return evaluation.fastest(ensemble)

    def asked(ensemble: Ensemble, split: DataSplit, *words: Any, **more: Any) -> Any:
        predicted.append(split.name)
        return predictions(ensemble, split, *words, **more)

    predictions = evaluation.predictions
    monkeypatch.setattr("plures.lab.runs.open.build", counted)
    monkeypatch.setattr("plures.lab.training.train.fastest", made)
    monkeypatch.setattr(evaluation, "predictions", asked)
    job = Job(SHORT, Variant("orthogonal-dropout"), tmp_path / "digits/x/seed-0", "digits")
    with pytest.MonkeyPatch.context() as patch:
        saved: list[str] = []

        def kept(one: Ensemble, path: Path, **options: bool) -> None:
            saved.append(path.name)
            save(one, path, **options)

        patch.setattr("plures.lab.training.fit.save", kept)
        make(job)
    assert built == [SHORT.model]
    assert len(engines) == 1
    assert sorted(predicted) == ["test", "validation"]
    assert saved.count("ensemble.safetensors") == 1
    assert open_run(job.run).ensemble.calibration.temperature == RunFolder(job.run).metrics()["temperature"]  # type: ignore[union-attr]
    built.clear()
    (row,) = rows_of([tmp_path])
    assert row.costs is not None
    assert row.runs[0].command
    assert built == [], "names, costs and commands need no network"


def test_a_failed_run_stops_no_other_and_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
    words = ["compare", "digits", "--methods", "deterministic", "masksembles:scale=0.5", "--runs", str(tmp_path)]
    assert main([*words, *SHORT_WORDS]) == 2
    err = capsys.readouterr().err
    rows = {row["name"]: row for row in json.loads((tmp_path / "digits/results.json").read_text())["rows"]}
    assert rows["deterministic"]["metrics"]["accuracy"]["mean"] > 0
    (failure,) = rows["masksembles scale=0.5"]["failures"]
    assert "scale" in failure
    assert failure in err
    assert "failed" in (tmp_path / "digits/results.md").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compare", "digits", "--methods", "deep-ensembel"], "deep-ensemble"),
        (["compare", "digitz"], "digits"),
        (["compare", "digits", "--seeds", "0"], "1 or more"),
        (["compare", "digits", "--methods", "mimo", "mimo"], "more than once"),
        (["compare", "digits", "--jobs", "0"], "1 or more"),
        (["reproduce", "table4"], "table3"),
        (["reproduce", "table1", "--recipes", "cifar10"], "digits"),
        (["reproduce", "table1", "--seeds", "0"], "1 or more"),
        (["compare", "digits", "--runs", "taken"], "taken"),
        (["report"], "no runs"),
        (["report", "other"], "contains no run"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file, not a folder")
    Path("other").mkdir()
    Path("other/config.json").write_text("{}")
    assert main(words) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("plures: ")
    assert expected in message


def test_data_that_are_missing_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "digits", "--data", str(tmp_path / "nowhere"), "--runs", str(tmp_path / "runs")]
    assert main(words) == 2
    assert capsys.readouterr().err.count("there is no data set") == 1


@pytest.mark.parametrize("width", [60, 80, 120, 400])
def test_a_table_breaks_no_number_however_narrow_the_terminal(
    width: int, finished: tuple[Comparison, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, runs = finished
    (rows,) = compare([comparison], runs)
    monkeypatch.setattr(terminal, "WIDE", width)
    write.show("digits", rows)
    lines = capsys.readouterr().out.splitlines()
    _, _, told = " ".join(" ".join(lines).split()).partition("not shown: ")
    left_out = told.partition(";")[0].split(", ")
    kept = [column for column in columns(rows) if column.title not in left_out]
    assert len(kept) >= 2
    assert (len(kept) == len(columns(rows))) == (width == 400)
    for row in rows:
        (line,) = [line for line in lines if line.startswith(row.name)]
        assert all(column.cell(row) in line for column in kept)
    assert all(len(line) <= width for line in lines)


def test_another_configuration_in_the_folder_is_told_before_anything_is_run(
    finished: tuple[Comparison, Path],
) -> None:
    comparison, runs = finished
    other = replace(comparison, recipe=replace(SHORT, width=24), variants=variants(["mimo", "deterministic"]))
    with pytest.raises(PluresError, match=r"recipe\.width was 16 and is 24.*--runs"):
        make_runs(other.jobs(runs))
    assert not (runs / "digits/mimo").exists()


def test_rows_put_seeds_together_and_name_what_differs(finished: tuple[Comparison, Path], tmp_path: Path) -> None:
    _, runs = finished
    rows = rows_of([runs])
    assert {row.name: [run.seed for run in row.runs] for row in rows} == {name: [0, 1] for name in METHODS}
    longer = Job(
        Variant("deep-ensemble", longer=2).recipe(SHORT),
        Variant("deep-ensemble"),
        tmp_path / "digits/x/seed-0",
        "digits",
    )
    split = Variant("orthogonal-dropout", ("classifier=split",))
    make(longer)
    make(Job(SHORT, split, tmp_path / "digits/y/seed-0", "digits"))
    names = {row.name for row in rows_of([runs, tmp_path])}
    assert "orthogonal-dropout classifier=split" in names
    assert any(name.startswith("deep-ensemble ") and "epochs.train=4" in name for name in names)
    assert any(name.startswith("deep-ensemble ") and "epochs.train=2" in name for name in names)


def test_unfinished_and_unlike_runs_are_refused(finished: tuple[Comparison, Path], tmp_path: Path) -> None:
    _, runs = finished
    with pytest.raises(PluresError, match="contains no run"):
        rows_of([tmp_path])
    other = Job(replace(SHORT, limit=110), Variant("deterministic"), tmp_path / "digits/other/seed-0", "digits")
    make(other)
    with pytest.raises(PluresError, match="different data"):
        rows_of([runs, tmp_path])
    (other.run / "ensemble.safetensors").rename(other.run / "partial.safetensors")
    with pytest.raises(PluresError, match=r"not finished; to finish it: plures train .*--method determ"):
        rows_of([tmp_path])


def test_the_best_efficient_row_is_bold_and_a_deep_ensemble_is_not_efficient(finished: tuple[Comparison, Path]) -> None:
    comparison, runs = finished
    (rows,) = compare([comparison], runs)
    by_name = {row.name: row for row in rows}
    assert by_name["deterministic"].efficient
    assert not by_name["deep-ensemble"].efficient
    for column in columns(rows):
        best = column.stressed(rows)
        if column.better is None:
            assert best is None
        else:
            assert best is not None
            sign = 1 if column.better == "low" else -1
            assert all(sign * column.value(best) <= sign * column.value(row) for row in rows if row.efficient)  # type: ignore[operator]
    judged = [column for column in columns(rows) if column.better is not None]
    assert markdown(rows, {}).count("**") == 2 * len(judged)


def test_training_cost_counts_every_stage(finished: tuple[Comparison, Path]) -> None:
    comparison, runs = finished
    (rows,) = compare([comparison], runs)
    costs = {row.name: row.costs for row in rows}
    assert all(cost is not None and cost.epochs > 0 and cost.prediction > 0 for cost in costs.values())


def test_relative_is_of_the_two_given() -> None:
    def work(times: int) -> None:
        for _ in range(times * 20_000):
            pass

    longer, shorter = (relative(lambda a=a: work(a), lambda b=b: work(b)) for a, b in ((8, 1), (1, 8)))
    assert longer > shorter


def test_a_plain_step_is_timed_on_one_thread_as_runs_are_trained() -> None:
    class Watched(torch.nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            threads.add(torch.get_num_threads())
            return super().forward(images.flatten(1))

    threads: set[int] = set()
    torch.set_num_threads(2)
    info = open_data("digits").info
    assert plain_step(Watched(64, 10), info, SHORT, torch.device("cpu")) > 0
    assert threads == {1}
    assert torch.get_num_threads() == 2


def test_every_target_has_distinct_runs_of_known_recipes() -> None:
    read: set[object] = set()  # every recipe, form of a method and seed once: reading a command takes long
    for scale in get_args(Scale):
        assert_its_runs_are_distinct(scale, read)


def assert_its_runs_are_distinct(scale: Scale, read: set[object]) -> None:
    for target in TARGETS.values():
        comparisons = target.comparisons(scale)
        jobs = [job for comparison in comparisons for job in comparison.jobs(Path("runs"))]
        assert len({job.run for job in jobs}) == len(jobs)
        for job in jobs:
            parts = {job.recipe_name, job.variant, job.recipe.seed}
            if not parts <= read:
                read |= parts
                assert_its_command_makes_it(job)


def assert_its_command_makes_it(job: Job) -> None:
    words = train_words(job.recipe.as_json(), job.variant.method, job.variant.settings, job.run, job.recipe_name)
    command = parse(words)
    assert isinstance(command, Train)
    assert (command.recipe, command.method, command.run) == (job.recipe_name, job.variant.method, job.run)
    assert command.set == job.variant.settings
    assert replace(command.settings, about="") == replace(job.recipe, about="")


def test_targets_share_their_runs() -> None:
    def runs(target: str) -> set[Path]:
        return {job.run for one in TARGETS[target].comparisons("cpu") for job in one.jobs(Path("runs"))}

    assert runs("figure1") < runs("table1")
    paper = Path("runs/cifar10-cpu/orthogonal-dropout-classifier=fixed-granularity=weight/seed-0")
    assert paper in runs("table1") & runs("table3") & runs("figure2")
    assert Path("runs/cifar10-cpu/orthogonal-dropout/seed-0") in runs("table1") & runs("table3")
    assert Path("runs/cifar10-cpu/mimo/seed-0") in runs("figure3") & runs("table1")


def test_the_ablation_gives_the_deep_ensemble_as_many_epochs() -> None:
    (comparison,) = TARGETS["table3"].comparisons("paper", only=["cifar10"])
    jobs = {job.variant.name: job for job in comparison.jobs(Path("runs")) if job.recipe.seed == 0}
    ours = jobs["orthogonal-dropout + MO + FC"].recipe.epochs
    assert jobs["deep-ensemble, 2.1 x epochs"].recipe.epochs.train == ours.pretrain + ours.prune + ours.finetune
    assert comparison.paper == TABLE3["cifar10"]
    assert set(comparison.paper) <= set(jobs)


def test_the_papers_figures_stand_beside_the_rows_of_the_same_form() -> None:
    for target, table in (("table1", TABLE1), ("table2", TABLE2)):
        for comparison in TARGETS[target].comparisons("cpu"):
            known = table[paper_data(comparison.recipe.data)]
            assert comparison.paper["orthogonal-dropout, as published"] == known["orthogonal-dropout"]
            assert comparison.paper["deep-ensemble"] == known["deep-ensemble"]
            assert "orthogonal-dropout" not in comparison.paper, "our default is not the paper's form"
            assert set(comparison.paper) < {one.name for one in comparison.variants}
    assert not TARGETS["table1"].comparisons("digits")[0].paper, "the paper has no digits"


def test_a_table_has_as_many_figures_of_the_paper_as_it_published(finished: tuple[Comparison, Path]) -> None:
    comparison, runs = finished
    for name, published, cell in (
        ("deep-ensemble", TABLE1["cifar10"]["deep-ensemble"], "94.8 / 0.175 / 0.011"),
        ("deterministic", TABLE3["cifar10"]["deep-ensemble"], "93.4 / 94.8 / 0.175 / 0.011 / 0.581"),
    ):
        (rows,) = compare([replace(comparison, paper={name: published})], runs)
        (column,) = [column for column in columns(rows) if column.title.startswith("paper")]
        assert [column.cell(row) for row in rows] == [cell if row.name == name else "-" for row in rows]
        assert column.title.count("/") == cell.count("/")


def test_runs_of_the_last_version_have_names_and_commands() -> None:
    written = Path(__file__).parent / "data" / "v0.1" / "runs"
    names = ("deep-ensemble", "mc-dropout", "orthogonal-dropout")
    rows = rows_of([written / name for name in names])
    assert [row.name for row in rows] == [*names[:2], f"{names[2]} granularity=weight"]  # which was the default
    for row, name in zip(rows, names, strict=True):
        assert row.runs[0].command.startswith(f"plures train digits --method {name} ")
    with pytest.raises(PluresError, match="not finished; to finish it"):
        rows_of([written])


def test_what_tables_share_is_counted_once(tmp_path: Path) -> None:
    every = [one for target in TARGETS.values() for one in target.comparisons("digits")]
    plan = planned(every, tmp_path)
    assert sum(line["runs"] for line in plan) == len({job.run for one in every for job in one.jobs(Path())})
    assert {line["recipe"] for line in plan} == {"digits", "digits-wrn", "digits-resnet"}


def test_all_tables_and_figures_are_written_and_costs_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = str(tmp_path / "runs")
    few = {
        name: replace(TARGETS[name], recipes={"smoke": ("digits-smoke",)}, variants=(Variant("deterministic"),))
        for name in ("table1", "figure1")
    }
    monkeypatch.setattr("plures.lab.cli.compare.TARGETS", few)
    monkeypatch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
    words = ["reproduce", "all", "--scale", "smoke", "--runs", runs, "--out", str(tmp_path / "out")]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert re.search(r"digits-smoke: 1 runs, 1 epochs, 2 steps of 32 images; mlp has [\d,]+ weights, .* about ", told)
    assert told.index("a plain step took") < told.index("1 to train")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"table1-digits-smoke.md", "figure1-digits-smoke.json", "figure1-smoke.pdf", "figure1-smoke.svg"} <= written
    assert main(words) == 0
    assert "plain step" not in capsys.readouterr().err, "nothing is left to train"


def test_members_on_the_command_line_are_for_all_methods() -> None:
    jobs = Comparison("digits", SHORT, variants(["mimo", "deep-ensemble"]), members=4).jobs(Path("runs"))
    assert [job.recipe.members for job in jobs] == [4, 4]


def test_dry_run_prints_the_plan_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "table3", "--scale", "digits", "--runs", str(tmp_path / "runs"), "--dry-run"]
    plan = planned(TARGETS["table3"].comparisons("digits"), tmp_path / "runs")
    assert {line["runs"] for line in plan} == {2}
    assert sum(line["epochs"] for line in plan) > 0
    assert [line["stages"] for line in plan][:3] == [2 * 1, 2 * 5, 2 * 14]  # each of five members has its own
    assert main(words) == 0
    assert "total" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_figures_take_the_first_members_of_a_deep_ensemble(tmp_path: Path) -> None:
    fixed = Variant("deep-ensemble", members=3, label="deep-ensemble")
    counts = tuple(
        Variant("orthogonal-dropout", members=count, label=f"orthogonal-dropout {count}") for count in (2, 3)
    )
    comparison = Comparison("digits", SHORT, (*counts, fixed))
    make(*comparison.jobs(tmp_path))
    (rows,) = compare([comparison], tmp_path)
    for target in ("figure1", "figure2"):
        paths = figures.draw(target, [(comparison, rows)], tmp_path / target, None)
        assert sorted(path.suffix for path in paths) == [".pdf", ".svg"]
        assert all(path.stat().st_size > 1000 for path in paths)
