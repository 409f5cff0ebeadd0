"""One page that shows finished runs: `plures report`."""

from collections.abc import Sequence
from pathlib import Path

from plures.errors import PluresError
from plures.lab.compare.rows import Row
from plures.lab.report.gather import gather
from plures.lab.report.page import render


def write_report(rows: Sequence[Row], out: Path, *, data_dir: Path | None, command: str) -> Path:
    """Write one HTML file about the rows of a comparison, and return its path.

        rows = with_costs(rows_of([Path("runs/digits")]))
        write_report(rows, Path("report.html"), data_dir=None, command="plures report runs/digits")

    The file needs nothing else: no network, no script, no picture beside it. Of runs that differ in the seed alone the
    table shows mean and spread, and the charts the first one. `command` is told as the way to make the page again.
    """
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
