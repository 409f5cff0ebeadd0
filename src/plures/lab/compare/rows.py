"""Finished runs as the rows of a table: what they have in common, and what they differ in."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from plures.errors import PluresError
from plures.lab.compare.rerun import missing_stages, special_settings, train_command
from plures.lab.methods import kebab
from plures.lab.paper.published import TABLE1, TABLE2, Published, paper_members
from plures.lab.recipes import RECIPES
from plures.lab.runs.folder import RunFolder
from plures.lab.tables import UNKNOWN, figure
from plures.lab.timing.costs import Costs, kept_costs, measured_costs

EFFICIENT = 1.5  # times the file of one network: what is larger has bought its quality with size

PAPER_TITLE = "paper: accuracy % / NLL / ECE"


@dataclass(frozen=True)
class Finished:
    """A finished run: where it is, what it was made from, and what was measured.

    Finished.read(Path("runs/digits/deep-ensemble/seed-0")).metrics["nll"]
    """

    path: Path
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Finished":
        """Read a run folder, and refuse one that is not finished."""
        folder = RunFolder(path)
        config = folder.config()
        if not folder.finished:
            command = train_command(config, path)
            raise PluresError(f"the run in {path} is not finished: {_progress(folder)}; to finish it: {command}")
        metrics = path / "metrics.json"
        if not metrics.is_file():
            command = train_command(config, path)
            raise PluresError(f"the run in {path} is trained but not measured; to finish it: {command}")
        try:
            return cls(path, config, json.loads(metrics.read_text()))
        except ValueError as error:
            raise PluresError(f"{metrics} cannot be read ({error}): remove it, and it is made again") from error

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["recipe"]["seed"])

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return kebab(self.config["method"])


@dataclass(frozen=True)
class Row:
    """The runs of one method and one setting, with different seeds.

    row.name, row.mean("nll"), row.deviation("nll"), [run.seed for run in row.runs]
    """

    name: str
    runs: tuple[Finished, ...]
    costs: Costs | None = None
    paper: Published | None = None
    failures: tuple[str, ...] = ()

    def values(self, key: str) -> list[float]:
        """Return the figure of every run; nothing where one of them has none."""
        found = [run.metrics.get(key) for run in self.runs]
        return [] if None in found else [float(value) for value in found if value is not None]

    def mean(self, key: str) -> float | None:
        """Return the mean over the seeds."""
        found = self.values(key)
        return statistics.mean(found) if found else None

    def deviation(self, key: str) -> float | None:
        """Return the sample standard deviation over the seeds; None for a single one."""
        found = self.values(key)
        return statistics.stdev(found) if len(found) > 1 else None

    @property
    def efficient(self) -> bool:
        """Whether it takes about the place of one network."""
        return self.costs is not None and self.costs.size <= EFFICIENT


@dataclass(frozen=True)
class Column:
    """One column of a comparison: the figure of a row, how it is written, and which end is better.

    nll = next(column for column in columns(rows) if column.title == "NLL")
    nll.value(row), nll.cell(row), nll.best(rows)
    """

    title: str
    value: Callable[[Row], float | None]
    cell: Callable[[Row], str]
    better: Literal["high", "low"] | None = None

    def best(self, rows: Sequence[Row]) -> Row | None:
        """Name the best of the efficient rows; nobody where there is no choice."""
        known = [(value, row) for row in rows if row.efficient and (value := self.value(row)) is not None]
        if self.better is None or len(known) < 2:
            return None
        choose = max if self.better == "high" else min
        return choose(known, key=lambda pair: pair[0])[1]


def columns(rows: Sequence[Row]) -> list[Column]:
    """Give the columns of a comparison; those that no row has a figure for are left out.

        [[column.cell(row) for column in columns(rows)] for row in rows]

    What matters most comes first: a narrow screen shows no more than fits.
    """
    every = [
        measured("accuracy %", "accuracy", "high", digits=1, scale=100),
        measured("NLL", "nll", "low"),
        measured("ECE", "ece", "low", digits=4),
        Column(PAPER_TITLE, lambda row: row.paper.accuracy if row.paper else None, _paper),
        _cost("size", lambda costs: costs.size, "{:.2f} x"),
        _cost("prediction", lambda costs: costs.prediction, "{:.1f} x"),
        _cost("training epochs", lambda costs: costs.epochs, "{:.0f}"),
        measured("calibrated NLL", "calibrated_nll", "low"),
        measured("Brier", "brier", "low"),
        measured("member accuracy %", "mean_member_accuracy", None, digits=1, scale=100),
        measured("agreement", "agreement", None),
    ]
    return [column for column in every if any(column.value(row) is not None for row in rows)]


def measured(
    title: str, key: str, better: Literal["high", "low"] | None, *, digits: int = 3, scale: float = 1
) -> Column:
    """Make a column of a metric: its mean, and its standard deviation where there are several seeds.

    measured("accuracy %", "accuracy", "high", digits=1, scale=100).cell(row)  # '95.3 ± 0.3'
    """

    def value(row: Row) -> float | None:
        mean = row.mean(key)
        return None if mean is None else scale * mean

    def cell(row: Row) -> str:
        deviation = row.deviation(key)
        spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
        return figure(value(row), digits) + spread

    return Column(title, value, cell, better)


def rows_of(folders: Sequence[Path]) -> list[Row]:
    """Read run folders, or all that lie below the given ones, and put those that differ in their seed only together.

        rows = rows_of([Path("runs/digits")])

    Refuses runs that are not finished, and runs of different data.
    """
    runs = [Finished.read(path) for path in find_runs(folders)]
    check_same_data(runs)
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_without_seed(run.config), sort_keys=True), []).append(run)
    rows = [Row("", tuple(sorted(group, key=lambda run: run.seed))) for group in groups.values()]
    for row in rows:
        seeds = [run.seed for run in row.runs]
        if len(set(seeds)) < len(seeds):
            paths = ", ".join(str(run.path) for run in row.runs if seeds.count(run.seed) > 1)
            raise PluresError(f"the same run was given more than once: {paths}; give one of them")
    return [
        replace(row, name=name, costs=kept_costs(row.runs[0].path), paper=published(row))
        for row, name in zip(rows, _names(rows), strict=True)
    ]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """List the run folders among the given folders and below them.

    find_runs([Path("runs")])
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise PluresError(f"there is no folder {folder}")
        below = sorted(path.parent for path in folder.rglob("config.json") if _is_run(path.parent))
        if not below:
            raise PluresError(f"{folder} holds no run: no config.json in it or below it; make one with plures train")
        found |= dict.fromkeys(below)
    return list(found)


def _is_run(folder: Path) -> bool:
    """Other programs write a config.json, too."""
    config = RunFolder(folder).config()
    return isinstance(config, dict) and {"method", "recipe", "data", "options", "network"} <= set(config)


def check_same_data(runs: Sequence[Finished]) -> None:
    """Refuse to compare what was measured on different images.

    check_same_data([Finished.read(path) for path in paths])
    """
    seen: dict[int, Finished] = {}
    for run in runs:
        # Which images are held out for validation depends on the seed; all else must be the same for all.
        data = {key: run.config["data"][key] for key in ("name", "classes", "size", "channels")}
        other = runs[0]
        if data != {key: other.config["data"][key] for key in data}:
            names = f"{other.path} has {_data(other)}, {run.path} has {_data(run)}"
            raise PluresError(f"runs of different data cannot stand in one table: {names}")
        twin = seen.setdefault(run.seed, run)
        if twin.config["data"]["fingerprint"] != run.config["data"]["fingerprint"]:
            raise PluresError(
                f"runs of different data cannot stand in one table: {twin.path} and {run.path} have the same seed and "
                f"name of the data ({data['name']}), but other images, labels or limits"
            )


def with_costs(rows: Sequence[Row]) -> list[Row]:
    """Measure the rows that were not measured yet.

    rows = with_costs(rows_of([Path("runs/digits")]))
    """
    return [replace(row, costs=row.costs or measured_costs(row.runs[0].path)) if row.runs else row for row in rows]


def published(row: Row) -> Published | None:
    """Find the paper's figures for a row: of the same method with the usual options, on the data that ours come from.

    published(row).nll
    """
    run = row.runs[0]
    wide = "wide_resnet" in run.config["recipe"]["model"]
    found = (TABLE2 if wide else TABLE1).get(paper_data(run.config["data"]["name"]), {}).get(run.method)
    members = paper_members(run.method, wide)
    if found is None or special_settings(run.config) or run.metrics["members"] != members:
        return None
    usual = [asdict(recipe.for_method(run.config["method"]).epochs) for recipe in RECIPES.values()]
    return found if run.config["recipe"]["epochs"] in usual else None


def paper_data(name: str) -> str:
    """Name the paper's data set that data were taken from.

    >>> paper_data("tiny-imagenet-20"), paper_data("cifar10")
    ('tiny-imagenet', 'cifar10')
    """
    whole, _, count = name.rpartition("-")
    return whole if whole and count.isdigit() else name


def _names(rows: Sequence[Row]) -> list[str]:
    """Name rows by method and special options; where that is not enough, also by what else they differ in."""
    configs = [row.runs[0].config for row in rows]
    short = [_name(config) for config in configs]
    flat = [dict(_flat(config["recipe"])) for config in configs]
    names = []
    for name, own in zip(short, flat, strict=True):
        rivals = [other for other_name, other in zip(short, flat, strict=True) if other_name == name]
        differing = [key for key in own if any(other.get(key) != own[key] for other in rivals) and key != "seed"]
        names.append(" ".join([name, *(f"{key}={own[key]}" for key in differing)]))
    return names


def _name(config: Mapping[str, Any]) -> str:
    return " ".join([kebab(config["method"]), *special_settings(config)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return found


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what makes runs the same: which images are held out, and their mean, follow from the seed."""
    data = {key: value for key, value in config["data"].items() if key not in ("fingerprint", "mean", "std")}
    parts = {key: dict(config[key]) for key in ("recipe", "options")}
    for part in parts.values():
        part.pop("seed", None)
    return {"method": config["method"], "data": data, "network": config["network"], **parts}


def _cost(title: str, of: Callable[[Costs], float], pattern: str) -> Column:
    def value(row: Row) -> float | None:
        return None if row.costs is None else of(row.costs)

    def cell(row: Row) -> str:
        return UNKNOWN if row.costs is None else pattern.format(of(row.costs))

    return Column(title, value, cell)


def _paper(row: Row) -> str:
    if row.paper is None:
        return UNKNOWN
    return f"{100 * row.paper.accuracy:.1f} / {row.paper.nll:.3g} / {row.paper.ece:.3g}"


def _progress(folder: RunFolder) -> str:
    records = folder.records()
    missing = missing_stages(folder.config(), records)
    where = "not an epoch is done"
    if records:
        last = records[-1]
        where = f"it stopped in {last['stage']} after epoch {last['epoch']} of {last['epochs']}"
    shown = ", ".join([*missing[:3], *(["..."] if len(missing) > 3 else [])])
    return f"{where}; {len(missing)} stages are missing ({shown})" if missing else where


def _data(run: Finished) -> str:
    data = run.config["data"]
    return f"{data['name']} ({len(data['classes'])} classes, {data['size']} pixels)"
