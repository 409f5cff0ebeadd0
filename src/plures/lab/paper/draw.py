"""From finished runs to the paper's figures."""

from collections.abc import Sequence
from pathlib import Path

from plures.lab.compare.jobs import Comparison
from plures.lab.compare.rows import Finished, Row
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.paper.figures import Bars, Point, Series, against_members, member_bars
from plures.lab.paper.published import TABLE1, TABLE3, paper_data, paper_members
from plures.lab.paper.targets import AS_PUBLISHED
from plures.lab.runs.open import open_run


def draw(
    target: str, tables: Sequence[tuple[Comparison, Sequence[Row]]], stem: Path, data_dir: Path | None
) -> list[Path]:
    """Draw figure 1, 2 or 3 as PDF, PNG and SVG, and return their paths."""
    if target == "figure1":
        return member_bars({comparison.name: _bars(comparison, rows) for comparison, rows in tables}, stem)
    return against_members({comparison.name: _lines(comparison, rows, data_dir) for comparison, rows in tables}, stem)


def _bars(comparison: Comparison, rows: Sequence[Row]) -> list[Bars]:
    paper = TABLE3.get(paper_data(comparison.recipe.data), {})
    # The ablation calls the usual form by its parts.
    full = {AS_PUBLISHED.name: "orthogonal-dropout + MO + FC"}
    groups = []
    for row in rows:
        known = paper.get(full.get(row.name, row.name))
        members = tuple(tuple(run.metrics["member_accuracies"]) for run in row.runs)
        ensemble = tuple(row.values("accuracy"))
        groups.append(Bars(row.name, members, ensemble, known.member_accuracy if known else None))
    return groups


def _lines(comparison: Comparison, rows: Sequence[Row], data_dir: Path | None) -> list[Series]:
    """Put rows of one method together; of a deep ensemble, its first members are an ensemble of that many."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        name = row.name
        if name.startswith("deep-ensemble"):
            points[name] = _first_members(row.runs, data_dir)
        else:
            method, _, count = name.rpartition(" ")
            figures = (tuple(row.values(key)) for key in ("accuracy", "nll", "ece"))
            points.setdefault(method, []).append(Point(int(count), *figures))
    data = paper_data(comparison.recipe.data)
    known = {**TABLE1.get(data, {}), "deep-ensemble + FC": TABLE3.get(data, {}).get("deep-ensemble + FC")}
    series = []
    for name, found in points.items():
        row_of_paper = known.get(name)
        paper = () if row_of_paper is None else (Point.published(paper_members(name, wide=False), row_of_paper),)
        series.append(Series(name, tuple(found), paper))
    return series


def _first_members(runs: Sequence[Finished], data_dir: Path | None) -> list[Point]:
    found = []
    for finished in runs:
        run = open_run(finished.path)
        members, targets = predictions(run.ensemble, run.data(data_dir).test)
        found.append([scores(members[:count], targets) for count in range(2, len(members) + 1)])
    return [
        Point(index + 2, *(tuple(seed[index][key] for seed in found) for key in ("accuracy", "nll", "ece")))
        for index in range(len(found[0]) if found else 0)
    ]
