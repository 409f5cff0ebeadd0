"""Make one run in a process of its own: a crash takes nothing else along, and no run slows another by its threads.

python -m plures.lab.experiments.worker < job.json
"""

import json
import sys
from pathlib import Path

from plures.errors import PluresError
from plures.lab.experiments.jobs import Job


def describe(job: Job, data_dir: Path | None) -> str:
    """Put a job into words for another process, which may work in another folder.

    subprocess.run([sys.executable, "-m", "plures.lab.experiments.worker"], input=describe(job, None), text=True)
    """
    values = job.as_json() | {"data_dir": None if data_dir is None else str(data_dir.resolve())}
    return json.dumps(values | {"run": str(job.run.resolve())})


def make(description: str) -> None:
    """Train and measure the run that was described.

    make(describe(job, data_dir))
    """
    from plures.lab.train import train

    values = json.loads(description)
    data_dir = values.pop("data_dir")
    job = Job.from_json(values)
    variant = job.variant
    where = None if data_dir is None else Path(data_dir)
    train(job.recipe, variant.method, job.run, settings=variant.settings, data_dir=where)


def main() -> int:
    """Make the run that standard input describes and return the exit code."""
    try:
        make(sys.stdin.read())
    except PluresError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
