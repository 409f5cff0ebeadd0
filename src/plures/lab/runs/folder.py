"""The folder of one run. Every write is complete or has not happened, and their order loses nothing.

    config.json            what the run was made from; written once
    log.jsonl              a record per epoch
    partial.safetensors    the ensemble after the last commit
    state.safetensors      the open stage after its last epoch
    ensemble.safetensors   the finished ensemble; the two files above are gone then

After an epoch the log is written first and the state second, which remembers how long the log was: what is longer
belongs to an epoch that was lost, and is cut off. After a commit the state of the stage stays until the next stage
replaces it: it is known to be out of date by its position in the plan.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from plures import files
from plures.errors import PluresError
from plures.lab.runs.config import differences

log = logging.getLogger("plures")


class RunFolder:
    """Read and write the files of a run.

    folder = RunFolder("runs/cifar10")
    folder.config()["recipe"]["seed"]
    folder.finished, folder.ensemble
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ensemble = self.path / "ensemble.safetensors"
        self.partial = self.path / "partial.safetensors"
        self.state = self.path / "state.safetensors"
        self.log = self.path / "log.jsonl"
        self._config = self.path / "config.json"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.ensemble.is_file()

    def config(self) -> dict[str, Any]:
        """Read what the run was made from."""
        try:
            config: dict[str, Any] = json.loads(self._config.read_text())
        except FileNotFoundError:
            raise PluresError(f"{self.path} is no run folder: it has no config.json") from None
        except (OSError, ValueError) as error:
            raise PluresError(f"{self._config} cannot be read: {error}") from error
        return config

    def records(self) -> list[dict[str, Any]]:
        """Read the log: one record per epoch."""
        if not self.log.is_file():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out, for as long as this one lives at most."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PluresError(f"cannot make the run folder {self.path}: {error.strerror}") from error
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise PluresError(
                f"another process is working in the run folder {self.path}: wait for it, or choose another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start a run, or make sure that the folder's run is the same."""
        for leftover in self.path.glob(".*.part"):  # of a process that was killed while it wrote
            leftover.unlink()
        if not self._config.is_file():
            if self.ensemble.exists() or self.partial.exists():
                raise PluresError(f"{self.path} holds an ensemble but no config.json: choose another run folder")
            self._write_config(config)
            return
        before = self.config()
        if differing := differences(before, config):
            if not self.state.exists() and not self.finished:  # no epoch was finished: there is nothing to lose
                self.partial.unlink(missing_ok=True)
                self._write_config(config)
                return
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise PluresError(
                f"{self.path} holds a run of another configuration: {'; '.join(differing[:3])}{more}; "
                "choose another run folder, or the old configuration"
            )
        changed = differences({"versions": before.get("environment", {})}, {"versions": config.get("environment", {})})
        if changed and not self.finished:
            log.warning("the run goes on under another environment, and may differ in bits: %s", "; ".join(changed))

    def write(self, path: Path, contents: bytes) -> None:
        """Write a file of the run: the old one or the new one is there, whatever happens."""
        files.write(path, contents)

    def read_state(self) -> bytes | None:
        """Read the state of the open stage, if there is one."""
        return self.state.read_bytes() if self.state.is_file() else None

    def append_record(self, record: Mapping[str, Any]) -> int:
        """Add a record to the log and return how long the log is now, in bytes."""
        with self._told(self.log), self.log.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            return file.tell()

    def cut_log(self, length: int) -> None:
        """Forget what was logged beyond a length."""
        if self.log.is_file() and self.log.stat().st_size > length:
            os.truncate(self.log, length)

    def clean(self) -> None:
        """Remove what only an unfinished run needs."""
        self.partial.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.write(self._config, json.dumps(config, indent=2).encode() + b"\n")

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PluresError(
                f"cannot write {path}: {error.strerror}; what was saved before is unchanged: "
                "make room and start the same command again to go on"
            ) from error
