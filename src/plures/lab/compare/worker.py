"""A process that makes runs, one after the other.

    python -m plures.lab.compare.worker < jobs

Runs have processes of their own: a crash takes only its own run along, and no run slows another by its threads. Every
line of standard input describes a job (`describe`), and every line of standard output that starts with ANSWER answers
one: null, or why the run failed. All else that is printed goes to the file beside the run. When standard input ends,
the process that asked for the runs is gone, or does not need this one any more, which ends at once.
"""

import contextlib
import gc
import json
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from queue import SimpleQueue

import torch

from plures.errors import PluresError
from plures.lab.compare.jobs import Job

OUTPUT = "output.txt"  # what the processes of a run wrote, in its run folder
ANSWER = "plures-worker: "  # libraries may print lines of their own when they are imported
DONE = "null"  # the answer to a job whose run was made

Reason = str | None  # why a run failed; None: it did not


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
    train(
        job.recipe,
        job.variant.method,
        job.run,
        settings=job.variant.settings,
        recipe_name=job.recipe_name,
        data_dir=where,
    )


def reason_of(description: str) -> Reason:
    """Make a run and say in one line why it failed, if it did; unexpected errors show their traceback, too."""
    try:
        make(description)
    except PluresError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def on_ray(description: str, output: str) -> Reason:
    """Make a run on a worker of Ray."""
    torch.set_num_threads(1)
    with Path(output).open("a") as file, contextlib.redirect_stderr(file):
        return reason_of(description)


def main() -> int:
    """Make the runs that standard input describes, until it ends, and return the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    descriptions: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=[descriptions], daemon=True).start()
    try:
        while True:
            reason = _written(descriptions.get())
            gc.collect()
            torch.cuda.empty_cache()  # another process may share the GPU
            # Last, because a crash before it costs no other run; on a line of its own, whatever was printed before.
            print(f"\n{ANSWER}{json.dumps(reason)}", file=answers, flush=True)
    except KeyboardInterrupt:
        return 130


def _written(description: str) -> Reason:
    """Make a run, and write all that is printed meanwhile, by whatever library, to the file beside it."""
    values = json.loads(description)
    with (Path(values["folder"]) / values["run"] / OUTPUT).open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # each run shows its own warnings
        return reason_of(description)


def _listen(descriptions: SimpleQueue[str]) -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            descriptions.put(line.decode())
    os._exit(143)  # at once: what is saved is complete


if __name__ == "__main__":
    sys.exit(main())
