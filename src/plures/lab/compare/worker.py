"""Make one run in a process of its own: a crash takes nothing else along, and no run slows another by its threads.

python -m plures.lab.compare.worker < job.json

The job is one line of standard input; when standard input ends, the process that asked for the run is gone, and the
worker ends, too. Standard output has the reason if the run fails; all else goes to standard error.
"""

import json
import os
import sys
import threading
import traceback
from pathlib import Path

from plures.errors import PluresError
from plures.lab.compare.jobs import Job


def describe(job: Job, data_dir: Path | None) -> str:
    """Put a job into one line for another process, which may have been started elsewhere."""
    values = {"data_dir": None if data_dir is None else str(data_dir), "folder": str(Path.cwd())}
    return json.dumps(job.as_json() | values | {"data": os.environ.get("PLURES_DATA")})


def make(description: str) -> None:
    """Train and measure the run that was described."""
    from plures.lab.training.fit import train

    values = json.loads(description)
    if Path(values["folder"]).is_dir():
        os.chdir(values["folder"])  # relative paths mean what they meant to the caller
    data_dir = values["data_dir"] or values["data"]
    job = Job.from_json(values)
    where = None if data_dir is None else Path(data_dir)
    variant, name = job.variant, job.recipe_name or None
    train(job.recipe, variant.method, job.run, settings=variant.settings, recipe_name=name, data_dir=where)


def reason_of(description: str) -> str | None:
    """Make a run and say in one line why it failed, if it did; unexpected errors show their traceback, too."""
    try:
        make(description)
    except PluresError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> int:
    """Make the run that standard input describes and return the exit code."""
    description = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reason = reason_of(description)
    except KeyboardInterrupt:
        return 130
    if reason is not None:
        print(reason, flush=True)
        return 2
    return 0


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(143)  # at once: what is saved is complete


if __name__ == "__main__":
    sys.exit(main())
