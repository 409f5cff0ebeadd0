"""One page that shows finished runs: `plures report`."""

from collections.abc import Sequence
from pathlib import Path

from plures.errors import PluresError
from plures.lab.compare.rows import rows_of
from plures.lab.report.gather import gather
from plures.lab.report.page import render


def write_report(folders: Sequence[Path], out: Path, *, data_dir: Path | None, command: str) -> Path:
    """Write one HTML file about finished runs, given one by one or as folders that contain them, and return its path.

        write_report([Path("runs/digits")], Path("report.html"), data_dir=None, command="plures report runs/digits")

    The file needs nothing else: no network, no script, no picture beside it. Of runs that differ in the seed alone the
    table shows mean and spread, and the charts the first one. `command` is told as the way to make the page again.
    """
    rows = rows_of(folders)
    details = [gather(row.name, row.runs[0].path, row.runs[0].metrics, data_dir) for row in rows]
    html = render(rows, details, command)
    beside = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(html, encoding="utf-8")
        beside.replace(out)
    except OSError as error:
        raise PluresError(f"cannot write {out}: {error.strerror}; name another file with --out") from error
    return out
