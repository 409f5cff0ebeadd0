"""Finished runs as rows of a comparison: the runs of each row, its name and its costs.

Names and commands follow from a run's config.json alone: no network is built.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plures.errors import PluresError
from plures.lab.compare import Published
from plures.lab.costs import Costs, kept_costs
from plures.lab.method_names import short_name
from plures.lab.runs.config import Made, flat_values, made_of, train_command
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import described, unfinished

EFFICIENT = 1.5  # times the file of one network: a larger ensemble may owe its quality to its size


@dataclass(frozen=True)
class Finished:
    """A finished run: its folder, its configuration and its metrics."""

    path: Path
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Finished":
        """Read a run folder, and refuse one that is not finished."""
        folder = RunFolder(path)
        config = folder.config()
        described(config, path)
        if not folder.finished:
            raise unfinished(config, path)
        if not (path / "metrics.json").is_file():
            command = train_command(config, path)
            raise PluresError(f"the run in {path} is trained but not measured; to finish it: {command}")
        return cls(path, config, folder.metrics())

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["recipe"]["seed"])

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return self.made.method

    @property
    def command(self) -> str:
        """The command that makes the run."""
        return train_command(self.config, self.path)

    @cached_property
    def name(self) -> str:
        """The method and the options that it was given."""
        return " ".join([short_name(self.method), *self.made.settings])

    @cached_property
    def made(self) -> Made:
        """The words that it was made with."""
        return made_of(self.config)


@dataclass(frozen=True)
class Row:
    """The runs of one method and one setting, with different seeds."""

    name: str
    runs: tuple[Finished, ...]
    costs: Costs | None = None
    paper: Published | None = None
    failures: tuple[str, ...] = ()

    def values(self, key: str) -> list[float]:
        """Return the figure of every run; an empty list if one of them has none."""
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
        """Whether its file is about as large as that of one network."""
        return self.costs is not None and self.costs.size <= EFFICIENT


def rows_of(folders: Sequence[Path]) -> list[Row]:
    """Read run folders, or all below the given folders; runs that differ only in their seed share a row.

    Runs that are not finished, and runs of different data, raise an error.
    """
    groups: dict[str, list[Finished]] = {}
    for run in map(Finished.read, find_runs(folders)):
        groups.setdefault(json.dumps(_without_seed(run.config), sort_keys=True), []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.seed)
        if doubled := [seed for seed, count in Counter(run.seed for run in group).items() if count > 1]:
            paths = ", ".join(str(run.path) for run in group if run.seed in doubled)
            raise PluresError(f"the same run was given more than once: {paths}; give one of them")
    names = _names([group[0] for group in groups.values()])
    return make_rows([Row(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)])


def make_rows(rows: Sequence[Row]) -> list[Row]:
    """Add the costs of their first runs to the rows of a comparison. Runs of different data raise an error."""
    runs = [run for row in rows for run in row.runs]
    seen: dict[int, Finished] = {}
    for run in runs:
        # Which images are held out for validation depends on the seed; all else must be the same for all.
        alike = (runs[0], ("name", "classes", "size", "channels")), (seen.setdefault(run.seed, run), ("fingerprint",))
        for other, keys in alike:
            if differing := [key for key in keys if run.config["data"][key] != other.config["data"][key]]:
                raise PluresError(
                    f"runs with different data cannot be compared in one table: {other.path} and {run.path} differ in "
                    f"the {' and '.join(differing)} of their data"
                )
    return [replace(row, costs=kept_costs(row.runs[0].path)) if row.runs else row for row in rows]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """List the run folders among the given folders and below them."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise PluresError(f"there is no folder {folder}")
        below = sorted(path.parent for path in folder.rglob("config.json") if RunFolder(path.parent).begun)
        if not below:
            raise PluresError(
                f"{folder} contains no run: there is no config.json in it or below it; train one with plures train"
            )
        found |= dict.fromkeys(below)
    return list(found)


def _names(runs: Sequence[Finished]) -> list[str]:
    """Return the names of rows: method and options, and other settings if these are not enough."""
    flat = [flat_values({key: run.config[key] for key in ("recipe", "options")}) for run in runs]
    names = []
    for run, own in zip(runs, flat, strict=True):
        rivals = [other for rival, other in zip(runs, flat, strict=True) if rival.name == run.name]
        differing = [key for key in own if any(other.get(key) != own[key] for other in rivals)]
        more = [f"{key.partition('.')[2]}={own[key]}" for key in differing if not key.endswith(".seed")]
        names.append(" ".join([run.name, *more]))
    return names


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that is equal for all seeds: held-out images and their mean are not."""
    data = {key: value for key, value in config["data"].items() if key not in ("fingerprint", "mean", "std")}
    # What is None was not there in runs of older versions.
    parts = {
        key: {name: value for name, value in config[key].items() if value is not None and name != "seed"}
        for key in ("recipe", "options")
    }
    return {"method": config["method"], "data": data, "network": config["network"], **parts}
