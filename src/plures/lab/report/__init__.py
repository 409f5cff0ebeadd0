"""One HTML page that shows the rows of a comparison: `plures report`."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plures import files
from plures.errors import visible
from plures.lab.compare.rows import Row
from plures.lab.compare.table import columns
from plures.lab.method_names import looks_of, place_of
from plures.lab.report.gather import Detail, gather
from plures.lab.report.sections import panels
from plures.lab.terminal import figure, percent

LONGEST = 32  # characters of a name that a table of a page has room for
AT_ONCE = 9  # charts of a section that are shown at first


def write_report(
    rows: Sequence[Row], out: Path, *, data_dir: Path | None, command: str, trust_code: bool = False
) -> Path:
    """Write one HTML file about the rows of a comparison, and return its path.

        write_report(rows_of([Path("runs/digits")]), Path("report.html"), data_dir=None, command="plures report runs")

    The file is self-contained. For runs that differ only in their seed, the table shows mean and standard deviation,
    and the charts show the first run. `command` is shown as the way to make the page again. Each row prints a line of
    progress.
    """
    rows = sorted((row for row in rows if row.runs), key=lambda row: place_of(row.name))
    names = shortened([row.name for row in rows])
    rows = [replace(row, name=names[row.name]) for row in rows]
    looks = looks_of(row.name for row in rows)
    details = []
    for number, row in enumerate(rows, 1):
        words = f"{number} of {len(rows)}: {row.name} predicts the {row.runs[0].metrics['images']:,} test images"
        print(visible(words), file=sys.stderr, flush=True)
        details.append(gather(row, data_dir, looks[row.name], trust_code=trust_code))
    legend = {short: name for name, short in names.items() if short != name}
    files.write(out, render(rows, details, command, legend).encode(errors="backslashreplace"))
    return out


def shortened(names: Sequence[str]) -> dict[str, str]:
    """Return a label for each name: a long one keeps its method and gets a number, which a legend explains."""
    numbers = itertools.count(1)
    return {name: name if len(name) <= LONGEST else f"{name.partition(' ')[0]} #{next(numbers)}" for name in names}


def render(
    rows: Sequence[Row], details: Sequence[Detail], command: str, legend: Mapping[str, str] | None = None
) -> str:
    """Return the page of some rows, with the details of their first runs and the meaning of shortened names."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    data = rows[0].runs[0].config["data"]
    several = len(rows) > 1
    own = [run.config["environment"] for row in rows for run in row.runs]
    return environment.get_template("page.html.jinja").render(
        title=f"{len(rows)} models compared on {data['name']}" if several else f"{rows[0].name} on {data['name']}",
        summary=summary(rows, details),
        rows=rows,
        legend=legend or {},
        seeds=sorted({len(row.runs) for row in rows}),
        columns=columns(rows),
        best={column.title: column.stressed(rows) for column in columns(rows)},
        costs_known=any(row.costs for row in rows),
        details=details,
        panels=panels(details),
        at_once=AT_ONCE,
        environments=[(one, own.count(one)) for place, one in enumerate(own) if one not in own[:place]],
        fingerprints={run.seed: run.config["data"]["fingerprint"] for row in rows for run in row.runs},
        data=data,
        command=command,
    )


def summary(rows: Sequence[Row], details: Sequence[Detail]) -> list[str]:
    """Return the summary at the top of the page, in plain words."""
    first = rows[0].runs[0]
    data = first.config["data"]
    networks = " and ".join(dict.fromkeys(run.config["recipe"]["model"] for row in rows for run in row.runs))
    who = f"{len(rows)} ways to use" if len(rows) > 1 else f"{rows[0].name} with"
    count = sum(len(row.runs) for row in rows)
    about = (
        f"{who} the network {networks}, trained on {data['name']} and tested on {first.metrics['images']:,} "
        f"images of {len(data['classes'])} classes; {count} run{'s' if count > 1 else ''} in all."
    )
    stuck = [
        f"{one.name} is at chance: it is right on {percent(one.metrics['accuracy'])} of the test images, and always "
        f"giving the most frequent class on {percent(one.chance)}."
        for one in details
        if one.at_chance
    ]
    return [about, *stuck]
