"""The page of `plures report`: what it holds, what it never does, and what it refuses."""

import base64
import io
import json
import math
import re
import shlex
import shutil
import statistics
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plures import PluresError
from plures.lab import costs
from plures.lab.cli.main import main, parse
from plures.lab.cli.train import Train
from plures.lab.compare.rows import Finished, rows_of
from plures.lab.compare.table import columns
from plures.lab.method_names import LOOKS, METHOD_NAMES, looks_of, method_class, takes
from plures.lab.recipes import Epochs, get_recipe
from plures.lab.report import AT_ONCE, render, shortened, summary, write_report
from plures.lab.report.gather import Detail, gather
from plures.lab.report.sections import training
from plures.lab.runs.config import Made, describe, train_command, train_words
from plures.lab.runs.folder import RECORD, RunFolder
from plures.lab.runs.open import data_for, ensemble_for, network_for, open_run
from plures.lab.training.train import train

SMALL = replace(
    get_recipe("digits"),
    width=32,
    limit=200,
    validation=50,
    members=3,
    epochs=Epochs(pretrain=2, prune=1, finetune=2, train=2),
)
SECTIONS = {
    "table": "Comparison",
    "reliability": "Reliability, before and after ensembling",
    "members": "Quality against the number of members",
    "uncertain": "Where members disagree most",
    "mistakes": "The most confident mistakes",
    "training": "Training",
    "reproduce": "How to reproduce this report",
}
VOID = ("meta", "link", "img", "br")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, three rows: one network, three members with two seeds, and more members than can be listed."""
    folder = tmp_path_factory.mktemp("runs")
    train(SMALL, "deterministic", folder / "single")
    for seed in (0, 1):
        train(replace(SMALL, seed=seed), "orthogonal-dropout", folder / "deep" / "down" / f"seed-{seed}")
    train(SMALL, "mc-dropout", folder / "many", settings=["passes=12"])
    return folder


@pytest.fixture(scope="module")
def html(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "new" / "report.html"
    assert write_report(rows_of([runs]), out, data_dir=None, command="plures report runs") == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def details(runs: Path) -> list[Detail]:
    return [gather(row, None, LOOKS["deep-ensemble"]) for row in rows_of([runs])]


@dataclass
class Page(HTMLParser):
    """A page taken apart: its elements, checked to be nested properly, and the cells of its first table."""

    html: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    rows: list[list[tuple[str | None, str]]] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append((dict(attrs).get("data-value"), ""))
        if tag == "h2":
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            value, text = self.rows[-1][-1]
            self.rows[-1][-1] = (value, text + data)
        if "h2" in self.open:
            self.headings[-1] += data


def test_every_section_is_there_and_listed_at_the_top(html: str) -> None:
    page = Page(html)
    assert [attributes["id"] for tag, attributes in page.elements if tag == "section"] == list(SECTIONS)
    assert page.headings == list(SECTIONS.values())
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links[: len(SECTIONS)] == [f"#{name}" for name in SECTIONS]


def test_the_table_shows_the_means_of_metrics_json(html: str, runs: Path) -> None:
    first, second = Page(html).rows[:4], Page(html).rows[4:8]  # quality, and calibration
    both = [one + other[1:] for one, other in zip(first, second, strict=True)]
    rows = {cells[0][1]: cells[1:] for cells in both[1:]}
    assert set(rows) == {"deterministic", "orthogonal-dropout", "mc-dropout passes=12"}
    titles = [text.rstrip("\N{NO-BREAK SPACE}↑↓") for _, text in both[0]][1:]
    folders = {
        "deterministic": [runs / "single"],
        "orthogonal-dropout": [runs / "deep" / "down" / "seed-0", runs / "deep" / "down" / "seed-1"],
        "mc-dropout passes=12": [runs / "many"],
    }
    keys = {"NLL": "nll", "ECE": "ece", "Brier": "brier", "calibrated NLL": "calibrated_nll", "agreement": "agreement"}
    for name, cells in rows.items():
        found = [json.loads((folder / "metrics.json").read_text()) for folder in folders[name]]
        shown = dict(zip(titles, cells, strict=True))
        assert shown["seeds"][1] == str(len(found))
        assert shown["members"][1] == str(found[0]["members"])
        percentages = {"accuracy %": "accuracy", "member accuracy %": "mean_member_accuracy"}
        for title, key in (keys | percentages).items():
            scale = 100 if title in percentages else 1
            value, text = shown[title]
            if found[0][key] is None:
                assert (value, text) == (None, "-")
                continue
            mean = scale * statistics.mean(one[key] for one in found)
            assert float(value or "nan") == pytest.approx(mean, rel=1e-12)
            digits = len(text.split(" ")[0].partition(".")[2])
            assert text.split(" ")[0] == f"{mean:.{digits}f}"
            assert ("±" in text) == (len(found) > 1)


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    for tag, attributes in Page(html).elements:
        for name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action"):
            address = attributes.get(name)
            assert address is None or tag == "a" or address.startswith(("data:", "#")), (tag, address)
    without_links = re.sub(r'<a href="https://[^"]*">', "", html)
    assert not re.search(r"https?:|//[a-z]+\.|url\((?!#)|@import|@font-face", without_links)


def test_charts_have_words_for_those_who_do_not_see_them(html: str) -> None:
    page = Page(html)
    drawings = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(drawings) == 2 * 3 + 1  # of each row, and one of the members of all
    assert all(one["role"] == "img" and len(one["aria-label"] or "") > 20 for one in drawings)
    assert all(attributes.get("alt") for tag, attributes in page.elements if tag == "img")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [one for _, one in page.elements]


def test_the_same_runs_give_the_same_bytes(html: str, runs: Path, tmp_path: Path) -> None:
    again = write_report(rows_of([runs]), tmp_path / "again.html", data_dir=None, command="plures report runs")
    assert again.read_bytes() == html.encode()
    assert list(tmp_path.iterdir()) == [again]


def test_captions_give_the_numbers_of_the_run(html: str, runs: Path) -> None:
    text = html.replace("\N{NO-BREAK SPACE}", " ")
    found = json.loads((runs / "many" / "metrics.json").read_text())
    assert f"The ensemble has an ECE of {found['ece']:.3f}" in text
    first, last = found["member_accuracies"][0], found["accuracy"]
    assert re.search(rf"mc-dropout passes=12 from {100 * first:.1f} % and [.\d]+ to {100 * last:.1f} % and", text)
    assert "There is only one network, so no members can disagree." in text


def test_details_agree_with_metrics_json(details: list[Detail]) -> None:
    for one in details:
        assert one.added[-1] == pytest.approx((one.metrics["accuracy"], one.metrics["nll"]))
        table = one.together
        gaps = table.count * (table.confidence - table.accuracy).abs()
        assert float(gaps.sum() / table.count.sum()) == pytest.approx(one.metrics["ece"])
        assert [pair[0] for pair in one.added[:1]] == pytest.approx(one.metrics["member_accuracies"][:1])
        assert one.members == len(one.added) == one.metrics["members"]
        assert one.confidence == pytest.approx(float((table.count * table.confidence).nansum() / table.count.sum()))


def test_images_are_the_test_images_that_they_should_be(details: list[Detail], runs: Path) -> None:
    test = open_run(runs / "single").data(None).test
    for one in details:
        assert all(shown.label != shown.truth for shown in one.mistakes)
        confidences = [shown.confidence for shown in one.mistakes]
        assert confidences == sorted(confidences, reverse=True)
        doubts = [shown.epistemic for shown in one.uncertain]
        assert doubts == sorted(doubts, reverse=True)
        assert bool(doubts) == (one.members > 1)
        for shown in (*one.mistakes, *one.uncertain):
            assert one.members == sum(count for _, count in shown.votes)
            assert shown.truth == test.info.classes[test.labels[shown.number]]
            contents = base64.b64decode(shown.source.removeprefix("data:image/png;base64,"))
            pixels = np.asarray(Image.open(io.BytesIO(contents)))
            assert np.array_equal(pixels, test.images[shown.number][:, :, 0])


def test_no_mistakes_are_no_trouble(details: list[Detail], runs: Path) -> None:
    perfect = [replace(one, mistakes=()) for one in details]
    assert "There is no mistake among the test images." in render(rows_of([runs]), perfect, "")


def test_many_rows_are_folded_and_stay_light(details: list[Detail], runs: Path) -> None:
    rows = [replace(row, name=f"{row.name} {number}") for number in range(4) for row in rows_of([runs])]
    many = [replace(one, name=f"{one.name} {number}") for number in range(4) for one in details]
    assert len(rows) > AT_ONCE
    page = render(rows, many, "")
    assert page.count('<details class="more">') == 2
    assert f"<summary>{len(rows) - AT_ONCE} more</summary>" in page
    assert len(page) < 1_000_000


def test_half_a_character_in_a_run_folder_is_shown_as_an_escape(runs: Path, tmp_path: Path) -> None:
    out = write_report(rows_of([runs / "single"]), tmp_path / "page.html", data_dir=None, command="report \ud800")
    assert "report \\ud800" in out.read_text()


def test_names_of_classes_are_words_and_not_markup(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("<b>&", "<script>alert(1)"):
            (tmp_path / "odd" / split / name).mkdir(parents=True)
            for number in range(12):
                pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "odd" / split / name / f"{number}.png")
    recipe = replace(SMALL, data=str(tmp_path / "odd"), limit=None, validation=0.2)
    train(recipe, "deep-ensemble", tmp_path / "run")
    out = write_report(
        rows_of([tmp_path / "run"]), tmp_path / "page.html", data_dir=None, command="plures report '<i>'"
    )
    page = out.read_text(encoding="utf-8")
    assert "<b>&lt;b&gt;&amp;</b>" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "plures report &#39;&lt;i&gt;&#39;" in page
    assert "<b>&<" not in page
    assert "<script>alert" not in page
    Page(page)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_commands_make_the_same_run_again(method: str, tmp_path: Path) -> None:
    special = {
        "orthogonal-dropout": ["optimize-masks=false", "classifier=split"],
        "mc-dropout": ["rate=0.3", "passes=4"],
        "masksembles": ["layers=3", "scale=1.5"],
        "mimo": ["batch-repetition=2"],
        "packed-ensemble": ["alpha=2"],
    }
    recipe = replace(
        SMALL.for_method(METHOD_NAMES[method]),
        **{"seed": 3, "flip": True, "nesterov": False, "milestones": (0.25, 0.5, 0.75), "limit": None, "clip": 1.5},
        members=2 if takes(method_class(method), "members") else 5,
    )
    data = data_for(recipe, None)
    network = network_for(recipe, len(data.info.classes), data.info.channels, data.info.size)
    settings = special.get(method, [])
    config = describe(ensemble_for(recipe, method, settings, network), data, recipe, "no")
    line = train_command(config, tmp_path / "a run")
    words = shlex.split(line)
    assert words[:2] == ["plures", "train"]
    command = parse(words[1:])
    assert isinstance(command, Train)
    assert command.method == method
    assert command.run == tmp_path / "a run"
    assert command.settings.as_json() == recipe.as_json()
    again = ensemble_for(command.settings, command.method, command.set, network)
    assert json.loads(json.dumps(again.options())) == config["options"]


def test_a_recipe_as_it_is_needs_no_options(tmp_path: Path) -> None:
    recipe = get_recipe("digits")
    data = data_for(recipe, None)
    network = network_for(recipe, len(data.info.classes), data.info.channels, data.info.size)
    config = describe(ensemble_for(recipe, "mc-dropout", [], network), data, recipe, "no", Made("mc-dropout"))
    assert train_command(config, Path("runs/x")) == "plures train digits --method mc-dropout --run runs/x"


def test_long_names_become_short_labels_with_a_legend(details: list[Detail], runs: Path) -> None:
    long = "orthogonal-dropout epochs.pretrain=12 epochs.prune=2 epochs.finetune=12"
    names = shortened(["deep-ensemble", long, f"{long} x", "mc-dropout passes=12"])
    assert list(names.values()) == [
        "deep-ensemble",
        "orthogonal-dropout #1",
        "orthogonal-dropout #2",
        "mc-dropout passes=12",
    ]
    assert len({*shortened([f"{long} {number}" for number in range(60)]).values()}) == 60
    page = render(rows_of([runs]), details, "plures report runs", {"orthogonal-dropout A": long})
    assert f"<b>orthogonal-dropout A</b>: {long}" in page


@pytest.mark.parametrize("together", [True, False])
def test_a_command_trains_members_together_or_not(together: bool, tmp_path: Path) -> None:
    recipe = replace(get_recipe("digits"), together=together)
    words = train_words(recipe.as_json(), "orthogonal-dropout", (), tmp_path / "run", "digits")
    command = parse(words)
    assert isinstance(command, Train)
    assert command.settings.together is together


def test_the_page_tells_versions_fingerprints_and_commands(html: str, runs: Path) -> None:
    config = json.loads((runs / "single" / "config.json").read_text())
    assert config["data"]["fingerprint"] in html
    for name, value in config["environment"].items():
        assert value is None or str(value) in html, name
    assert html.count("plures train digits --method") == 4
    assert "<code>plures report runs</code>" in html


FORGED = [None, "high", [], {}, True, math.nan, math.inf, -1, 0, 7, 10**400, "missing"]


@pytest.mark.parametrize("key", [*RECORD.__annotations__, "unknown"])
def test_forged_lines_of_the_log_upset_neither_page_nor_comparison(
    runs: Path, details: list[Detail], tmp_path: Path, key: str
) -> None:
    for name in ("config.json", "log.jsonl"):
        shutil.copy(runs / "single" / name, tmp_path)
    folder = RunFolder(tmp_path)
    last = folder.records()[-1]
    lines = [{name: one for name, one in {**last, key: value}.items() if one != "missing"} for value in FORGED]
    with folder.log.open("a") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)
    single = next(one for one in details if one.members == 1)
    panel = training(replace(single, records=folder.records()))
    assert panel.chart is not None
    assert "nan" not in panel.chart
    folder.keep_records(["member 0 train"])
    assert folder.records()
    with pytest.raises(PluresError, match="is not finished; to finish it"):
        Finished.read(tmp_path)


def test_a_log_without_accuracies_is_no_trouble(details: list[Detail]) -> None:
    lines = [{**line, "validation_accuracy": None} for line in details[0].records]
    panel = training(replace(details[0], records=lines))
    assert panel.chart is None
    assert panel.says == "The run had no validation images."


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluresError, match="contains no run"):
        write_report(rows_of([tmp_path]), tmp_path / "page.html", data_dir=None, command="")
    assert not (tmp_path / "page.html").exists()


def test_an_unfinished_run_is_refused_with_the_way_to_finish_it(runs: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(runs / "deep" / "down" / "seed-0", cut)
    (cut / "ensemble.safetensors").unlink()
    (cut / "metrics.json").unlink()
    lines = (cut / "log.jsonl").read_text().splitlines(keepends=True)
    (cut / "log.jsonl").write_text("".join(lines[:1]))
    with pytest.raises(PluresError, match=r"cut is not finished; to finish it: plures train .*--run .*cut"):
        write_report(rows_of([runs, cut]), tmp_path / "page.html", data_dir=None, command="")


def test_runs_of_different_data_are_refused(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs / "single", other)
    config = json.loads((other / "config.json").read_text())
    config["data"]["classes"][0] = "zero"
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(PluresError, match="different data"):
        write_report(rows_of([runs, other]), tmp_path / "page.html", data_dir=None, command="")


def test_a_page_that_cannot_be_written_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PluresError, match="cannot write .*report.html"):
        write_report(rows_of([runs / "single"]), tmp_path / "file" / "report.html", data_dir=None, command="")


def test_the_best_of_each_column_is_bold(html: str, runs: Path) -> None:
    rows = rows_of([runs])
    for column in columns(rows):
        values = [value for row in rows if (value := column.value(row)) is not None]
        if column.better:
            best = max(values) if column.better == "high" else min(values)
            assert re.search(rf'<td data-value="{re.escape(str(best))}"><b>', html), column.title


def test_a_report_times_nothing_and_shows_its_progress(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def slow(*args: object) -> float:
        raise AssertionError("it was timed")

    monkeypatch.setattr(costs, "relative", slow)
    out = tmp_path / "report.html"
    assert main(["report", str(runs), "--out", str(out)]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" predicts")[0] for line in told] == [
        "1 of 3: deterministic",
        "2 of 3: mc-dropout passes=12",
        "3 of 3: orthogonal-dropout",
    ]
    titles = [text for _, text in Page(out.read_text(encoding="utf-8")).rows[0]]
    assert {"size", "prediction", "training epochs"} <= set(titles), "they were measured when the runs were trained"


def test_an_ensemble_at_chance_is_named(details: list[Detail], runs: Path) -> None:
    learned = replace(details[0], name="good", metrics={"accuracy": 0.92, "images": 450})
    stuck = replace(details[0], name="stuck", metrics={"accuracy": 0.11, "images": 450})
    text = " ".join(summary(rows_of([runs]), [learned, stuck]))
    assert "stuck is at chance: it is right on 11.0 %" in text
    assert "good is at chance" not in text


def test_rows_stand_in_the_order_of_the_paper_and_keep_their_colours(html: str) -> None:
    assert [cells[0][1] for cells in Page(html).rows[1:4]] == [
        "deterministic",
        "mc-dropout passes=12",
        "orthogonal-dropout",
    ]
    assert f'style="--look:{LOOKS["orthogonal-dropout"].colour}"></i>orthogonal-dropout' in html
    assert "http" not in html.partition("</style>")[0]


def test_every_name_has_a_look_of_its_own() -> None:
    names = ["mimo", "mine", *(f"mine {number}" for number in range(40)), "deep-ensemble"]
    looks = looks_of(names)
    assert list(looks) == names
    assert len(set(looks.values())) == len(names)
    assert (looks["mimo"], looks["deep-ensemble"]) == (LOOKS["mimo"], LOOKS["deep-ensemble"])
