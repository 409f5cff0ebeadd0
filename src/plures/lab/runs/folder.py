"""The folder of one run. Writes are atomic, and in an order that loses nothing.

    config.json            all settings of the run; written once
    log.jsonl              a record per epoch
    partial.safetensors    the ensemble after the last commit
    state.safetensors      the open stage after its last epoch
    ensemble.safetensors   the finished ensemble; the two files above are gone then
    metrics.json           its metrics on the test images
    costs.json             size and times relative to one network

After an epoch the log is written first and the state second, which counts the epochs of its stage: a record beyond
is of an epoch that was lost, and is cut off. After a commit the state of the stage stays until the next stage
replaces it: it is known to be out of date by its position in the plan.
"""

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from filelock import FileLock, Timeout
from msgspec import Meta

from plures import files
from plures.errors import PluresError
from plures.files import is_file
from plures.lab.runs.config import Made, differences, new_environment
from plures.methods.building import GONE as GONE_OPTIONS

log = logging.getLogger("plures")

# The types of the JSON files, which may come from anybody or from a damaged disk.
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # beyond, sums are infinite; refuses NaN
Whole = Annotated[int, Meta(ge=1 - (1 << 63), le=(1 << 63) - 1)]  # beyond, charts cannot draw them
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
MaybeNumber = NotRequired[Number | None]


def schema(**fields: Any) -> Any:
    """Return the type of a JSON object with the given keys; further keys are kept and not checked."""
    make: Any = TypedDict  # type checkers want the keys spelled out in a class
    return make("object", fields)


RECORD = schema(  # one line of log.jsonl
    **{"stage": str, "phase": str, "member": Whole | None, "epoch": Count, "epochs": Count},
    **{"loss": Number, "seconds": Number, "validation_accuracy": Share | None},
)
CONFIG = schema(
    method=str,
    recipe=schema(seed=Whole, data=str, model=str),
    data=schema(name=str, fingerprint=str, classes=list[str]),
    network=str,
    options=dict[str, Any],
    made=NotRequired[Made | None],
    environment=NotRequired[dict[str, Any] | None],
)
METRICS = schema(
    **{"images": Count, "members": Count, "bytes": Whole},
    **dict.fromkeys(("accuracy", "nll", "ece", "brier", "aurc", "mean_member_accuracy"), Number),
    **dict.fromkeys(("seconds", "agreement", "temperature", "calibrated_nll", "calibrated_ece"), MaybeNumber),
    member_accuracies=list[Number],
)

UNCHANGED = "; what was saved before is unchanged: correct this, and the same command resumes"
# Settings of earlier versions, at the values that changed nothing.
GONE = (("finetune_rate", None), ("literal_gradient", False), ("distill", None), ("label_smoothing", 0.0))


class RunFolder:
    """Read and write the files of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ensemble = self.path / "ensemble.safetensors"
        self.partial = self.path / "partial.safetensors"
        self.state = self.path / "state.safetensors"
        self.log = self.path / "log.jsonl"
        self.measured = self.path / "metrics.json"
        self._config = self.path / "config.json"

    @property
    def finished(self) -> bool:
        """Whether the run is trained."""
        return is_file(self.ensemble)

    @property
    def begun(self) -> bool:
        """Whether it is a run folder: other programs write a config.json, too."""
        return self._config.is_file() and any(path.is_file() for path in (self.ensemble, self.partial, self.log))

    def config(self) -> dict[str, Any]:
        """Return the configuration of the run."""
        if not is_file(self._config):
            raise PluresError(f"{self.path} is not a run folder: it has no config.json")
        found = read_object(self._config, CONFIG, "restore the run from a backup, or train it again in another folder")
        if "target_std" in found["data"]:
            raise PluresError(
                f"{self.path} is a regression run of an earlier version, and the lab has only classifiers: load its "
                "ensemble with plures.load, or train again with plures.sklearn or the library"
            )
        for part, gone in (("recipe", GONE), ("options", (*GONE, *GONE_OPTIONS))):
            found[part] = {name: value for name, value in found[part].items() if (name, value) not in gone}
        return found

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the finished run."""
        return read_object(self.measured, METRICS, "remove it, and `plures train` makes it again")

    def records(self) -> list[dict[str, Any]]:
        """Read the log: one record per epoch. Damaged lines are reported, and left out."""
        found = []
        with files.told("read", self.log, UNCHANGED):
            lines = self.log.read_bytes().splitlines() if self.log.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(parse_object(line, RECORD))
            except ValueError:
                log.warning("line %d of %s is damaged and ignored", number, self.log)
        return found

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Lock the folder; if another process has locked it, `wait` or raise an error."""
        with files.told("write in the run folder", self.path, "; choose another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(blocking=wait)
            except Timeout:
                raise PluresError(
                    f"another process is working in the run folder {self.path}: wait for it, or choose another folder"
                ) from None
        try:
            for leftover in self.path.glob(".*.part"):  # of a process that was killed while it wrote
                leftover.unlink()
            yield
        finally:
            lock.release()

    def begin(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run, or make sure that the folder's run is the same; return the configuration that holds."""
        if self._config.is_file():
            before = self.config()
            if not (differing := differences(before, config)):
                if (changed := new_environment(before, config)) and not self.finished:
                    warning = "the run resumes in another environment, and its bits may differ: %s"
                    log.warning(warning, "; ".join(changed))
                return before
            if self.state.exists() or self.finished:
                raise other_settings(self.path, differing, "choose another run folder, or the old settings")
            self.partial.unlink(missing_ok=True)  # no epoch was finished: there is nothing to lose
        elif self.ensemble.exists() or self.partial.exists():
            raise PluresError(f"{self.path} has an ensemble but no config.json: choose another run folder")
        files.write_json(self._config, config)
        return dict(config)

    def read_state(self) -> bytes | None:
        """Read the state of the open stage, if there is one."""
        with files.told("read", self.state, UNCHANGED):
            return self.state.read_bytes() if self.state.is_file() else None

    def write_state(self, contents: bytes) -> None:
        """Write the state of the open stage, in place of the old one."""
        files.write(self.state, contents)

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Add a record to the log."""
        with files.told("write", self.log, UNCHANGED), self.log.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")

    def keep_records(self, stages: Collection[str], begun: str = "", epochs: int = 0) -> None:
        """Cut the log to the records of the given stages, and to the first epochs of the one that was begun."""
        if self.log.is_file():
            kept = [
                record
                for record in self.records()
                if record["stage"] in stages or (record["stage"] == begun and record["epoch"] <= epochs)
            ]
            files.write(self.log, b"".join(json.dumps(record).encode() + b"\n" for record in kept))

    def clean(self) -> None:
        """Remove the files that only an unfinished run needs."""
        for path in (self.partial, self.state):
            with contextlib.suppress(OSError):  # they do no harm
                path.unlink(missing_ok=True)


def other_settings(path: Path, differing: Sequence[str], advice: str) -> PluresError:
    """Return the error for a folder that has a run with other settings."""
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return PluresError(f"{path} has a run with other settings: {'; '.join(differing[:3])}{more}; {advice}")


def read_object(path: Path, expected: Any, advice: str) -> dict[str, Any]:
    """Read a JSON object from a file, and raise an error that ends with `advice` if it does not match the schema."""
    with files.told("read", path):
        contents = path.read_bytes()
    try:
        return parse_object(contents, expected)
    except ValueError as error:
        raise PluresError(f"{path} is damaged or was written by another program ({error}): {advice}") from error


def parse_object(contents: bytes, expected: Any) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if it does not match the schema.

    >>> parse_object(b'{"coverage": [0.5, 1]}', schema(coverage=list[Number]))
    {'coverage': [0.5, 1]}
    >>> parse_object(b'{"coverage": [0.5, "all"]}', schema(coverage=list[Number]))
    Traceback (most recent call last):
    ...
    ValueError: Expected `float`, got `str` - at `$.coverage[1]`
    """
    try:
        found: dict[str, Any] = json.loads(contents)  # not by msgspec, which refuses paths that are not UTF-8
        msgspec.convert(found, expected)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return found
