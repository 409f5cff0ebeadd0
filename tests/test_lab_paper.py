"""The paper's published figures, and the drawings that show ours beside them."""

import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib import style
from matplotlib.figure import Figure

from plures import PluresError
from plures.lab import figures
from plures.lab.compare import Comparison, Published
from plures.lab.compare.rows import Finished, Row
from plures.lab.figures import Series, against_members, each_member
from plures.lab.method_names import METHOD_NAMES
from plures.lab.paper import FROM_MIMO_PAPER, TABLE1, TABLE2, TABLE3, TABLE3_NOTES, TARGETS
from plures.lab.recipes import get_recipe

SVG = "{http://www.w3.org/2000/svg}"
HOLLOW = r"<use [^>]*style=\"fill: #ffffff; stroke: #[0-9a-f]{6}"
EFFICIENT = ["deterministic", "mc-dropout", "batch-ensemble", "mimo", "masksembles"]


def rows() -> list[Published]:
    tables = (TABLE1, TABLE2, TABLE3)
    return [row for table in tables for column in table.values() for row in column.values()]


def test_tables_have_the_papers_shape() -> None:
    assert list(TABLE1) == ["cifar10", "cifar100", "cub200", "tiny-imagenet"]
    assert list(TABLE2) == list(TABLE3) == ["cifar10", "cifar100"]
    for table, length in ((TABLE1, 7), (TABLE2, 7), (TABLE3, 6)):
        assert all(len(column) == length for column in table.values())
        assert len({tuple(column) for column in table.values()}) == 1, "every data set has the same rows"


def test_methods_are_called_as_on_the_command_line() -> None:
    names = set(TABLE1["cifar10"])
    assert names == set(TABLE2["cifar10"]) == set(METHOD_NAMES) - {"packed-ensemble"}
    assert names - FROM_MIMO_PAPER == {"orthogonal-dropout", "masksembles"}


@pytest.mark.parametrize(
    ("table", "recipe", "fewer"),
    [(TABLE1, "cifar10", {"mimo": 2}), (TABLE2, "cifar10-wrn", {"mimo": 3, "batch-ensemble": 4})],
)
def test_runs_of_the_papers_recipes_have_the_members_of_its_figures(table, recipe: str, fewer: dict[str, int]) -> None:
    for method in set(table["cifar10"]) - {"deterministic", "mc-dropout"}:
        assert get_recipe(recipe).for_method(method).members == fewer.get(method, 5), method


def test_values_are_possible() -> None:
    for row in rows():
        assert 0.4 < row.accuracy < 1
        assert 0 < row.ece < 0.2
        assert row.ece < row.nll < 3
    for column in TABLE3.values():
        for row in column.values():
            assert row.member_accuracy is not None
            assert row.agreement is not None
            assert row.member_accuracy < row.accuracy, "an ensemble is better than its members"
            assert 0.5 < row.agreement < 0.8


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_tables_1_and_3_agree_on_the_rows_they_share(data: str) -> None:
    pairs = {"orthogonal-dropout": "orthogonal-dropout + MO + FC", "deep-ensemble": "deep-ensemble"}
    if data == "cifar100":  # on CIFAR10 the paper contradicts itself, as the note says
        pairs["mc-dropout"] = "mc-dropout"
    for first, third in pairs.items():
        one, other = TABLE1[data][first], TABLE3[data][third]
        assert (one.accuracy, one.nll, one.ece) == (other.accuracy, other.nll, other.ece)


def test_the_note_tells_the_contradiction_that_is_in_the_tables() -> None:
    one, other = TABLE1["cifar10"]["mc-dropout"], TABLE3["cifar10"]["mc-dropout"]
    assert one.accuracy == other.accuracy
    for value in (one.nll, one.ece, other.nll, other.ece):
        assert f"{value}".lstrip("0") in TABLE3_NOTES["mc-dropout"]


def test_orthogonal_dropout_leads_as_the_paper_says() -> None:
    for column in TABLE1.values():
        best = column["orthogonal-dropout"]
        assert all(best.accuracy > column[name].accuracy for name in [*EFFICIENT, "deep-ensemble"])
        assert all(best.nll < column[name].nll for name in [*EFFICIENT, "deep-ensemble"])
        assert all(best.ece < column[name].ece for name in [*EFFICIENT, "deep-ensemble"])
    for column in TABLE3.values():  # each ingredient of the method helps
        steps = [row for name, row in column.items() if name.startswith("orthogonal-dropout")]
        assert all(later.nll < earlier.nll for earlier, later in itertools.pairwise(steps))


def test_the_tables_need_neither_torch_nor_matplotlib() -> None:
    code = "import sys, plures.lab.paper; print({'torch', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def dots(name: str, members: int, seeds: int = 1, paper: float | None = None) -> Row:
    accuracies = [[0.70 + 0.01 * ((3 * m + s) % 5) for m in range(members)] for s in range(seeds)]
    runs = [{"member_accuracies": own, "accuracy": 0.75 + 0.002 * seed} for seed, own in enumerate(accuracies)]
    published = paper and Published(0.95, 0.15, 0.01, member_accuracy=paper)
    return Row(name, tuple(Finished(Path(), {}, metrics) for metrics in runs), paper=published or None)


def series(name: str, seeds: int = 1, paper: Mapping[int, Published] | None = None) -> Series:
    starts = {"accuracy": 0.7, "nll": 0.9, "ece": 0.02}
    points = {
        members: [{key: at + 0.01 * members + 0.003 * seed for key, at in starts.items()} for seed in range(seeds)]
        for members in (2, 3, 4, 5)
    }
    return Series(name, points, paper or {})


PUBLISHED = TABLE3["cifar10"]["deep-ensemble + FC"]
DOT_PANEL = {"CIFAR10": (dots("mimo", 2, seeds=3), dots("orthogonal-dropout", 5, seeds=3, paper=0.939))}
LINE_PANEL = {
    "CIFAR10": (series("mimo", seeds=3), series("deep-ensemble + FC", seeds=3, paper={5: PUBLISHED})),
}


def words(svg: str) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter(SVG + "text")]


@pytest.fixture
def drawn() -> Callable[..., str]:
    """Draw panels, and return the SVG."""

    def draw(panels: Mapping[str, Sequence[Row | Series]]) -> str:
        first = next(item for panel in panels.values() for item in panel)
        chosen: Callable[..., Figure] = each_member if isinstance(first, Row) else against_members
        with style.context(figures.RULES, after_reset=True):
            contents = io.BytesIO()
            chosen(panels).savefig(contents, format="svg", metadata=figures.UNDATED[".svg"])
        return contents.getvalue().decode()

    return draw


def drawn_to(stem: Path) -> list[Path]:
    comparison = Comparison("CIFAR10", get_recipe("cifar10"), ())
    return figures.draw("figure1", [(comparison, DOT_PANEL["CIFAR10"])], stem, None)


def test_two_files_that_open_and_are_the_same_every_time(tmp_path) -> None:
    paths = drawn_to(tmp_path / "new" / "figure.cpu")
    assert [path.name for path in paths] == ["figure.cpu.pdf", "figure.cpu.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [path.name for path in paths], "nothing else"
    pdf, svg = paths
    assert pdf.read_bytes().startswith(b"%PDF")
    assert "CIFAR10" in words(svg.read_text())
    before = [path.read_bytes() for path in paths]
    with mpl.rc_context({"font.size": 20}):  # the user's own settings neither matter nor change
        assert [path.read_bytes() for path in drawn_to(tmp_path / "new" / "figure.cpu")] == before
        assert mpl.rcParams["font.size"] == 20
    for dated in (b"CreationDate", b"<dc:date>"):
        assert not any(dated in contents for contents in before)


def test_dots_say_what_they_show(drawn) -> None:
    svg = drawn(DOT_PANEL)
    found = words(svg)
    for expected in ("one member", "ensemble", "paper: mean member"):
        assert found.count(expected) == 1
    assert {"mimo", "orthogonal-dropout"} <= set(found)
    assert len(re.findall(HOLLOW, svg)) == 2, "the paper's value and the legend"


def test_lines_say_what_they_show(drawn) -> None:
    svg = drawn(LINE_PANEL)
    found = words(svg)
    for expected in ("mimo", "deep-ensemble + FC", "paper (hollow)", "± one standard deviation of the seeds"):
        assert expected in found
    assert found.count("members") == 3
    assert {"2", "3", "4", "5"} <= set(found), "whole numbers of members"
    assert not {"2.5", "3.5"} & set(found)
    assert len(re.findall(HOLLOW, svg)) == 4, "the paper's three scores and the legend"


def test_one_seed_has_no_deviation_and_without_the_paper_nothing_is_hollow(drawn) -> None:
    for plain in ({"a": (dots("mimo", 2),)}, {"a": (series("mimo"),)}):
        svg = drawn(plain)
        assert not [word for word in words(svg) if "deviation" in word or "paper" in word]
        assert not re.search(HOLLOW, svg)


def test_values_of_the_paper_are_seen_however_far_they_are(drawn) -> None:
    for panel in (
        {"a": (dots("mimo", 2, paper=0.943),)},
        {"a": (series("mimo", paper={2: Published(0.3, 0.123, 0.051)}),)},
    ):
        svg = ElementTree.fromstring(drawn(panel))
        box = [float(number) for number in svg.attrib["viewBox"].split()]
        hollow = [one for one in svg.iter(SVG + "use") if "fill: #ffffff" in one.attrib.get("style", "")]
        assert len(hollow) >= 2, "the paper's values and the legend"
        assert all(0 < float(one.attrib["x"]) < box[2] and 0 < float(one.attrib["y"]) < box[3] for one in hollow)


def test_long_names_of_many_methods_do_not_overlap(drawn) -> None:
    few = words(drawn({"a": tuple(dots(name, 1) for name in TABLE3["cifar10"])}))
    assert few.count("orthogonal-") == 3, "names are broken into lines"


def test_a_method_whose_runs_failed_is_named_without_values(drawn) -> None:
    found = words(drawn({"a": (dots("mimo", 2), Row("failed", ())), "b": (Row("failed", ()),)}))
    assert " ".join(found).count("(no\N{NO-BREAK SPACE}result)") == 2
    assert not [word for word in found if "paper" in word or "nan" in word]
    found = words(drawn({"a": (Series("mimo", {2: [], 3: series("mimo").points[3]}, {}), Series("failed", {}, {}))}))
    assert {"mimo", "failed"} <= set(found)
    assert not [word for word in found if "nan" in word]


def test_a_figure_that_cannot_be_written_is_told_in_a_sentence(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluresError, match="cannot write .*figure"):
        drawn_to(tmp_path / "file" / "figure")


@pytest.mark.parametrize("target", ["table1", "table2"])
def test_tables_have_orthogonal_dropout_as_published_and_by_our_defaults(target: str) -> None:
    (comparison,) = TARGETS[target].comparisons("digits")
    settings = {one.name: one.settings for one in comparison.variants if one.method == "orthogonal-dropout"}
    assert settings == {
        "orthogonal-dropout": (),
        "orthogonal-dropout, as published": ("classifier=fixed", "granularity=weight"),
    }
