"""From the rows of a comparison to one HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from plures import files
from plures.errors import PluresError
from plures.lab.compare.rows import Row
from plures.lab.compare.table import columns
from plures.lab.looks import looks_of, place_of
from plures.lab.report.charts import FEW
from plures.lab.report.gather import Detail, gather
from plures.lab.report.sections import sections, training
from plures.lab.report.summary import headlines, summary, title_of
from plures.lab.report.trust import trust_sections
from plures.lab.tables import figure

AT_ONCE = 9  # charts that a section shows before it asks whether to show more
OPEN = 3  # rows whose pictures and commands are unfolded from the start
LONG = 12  # letters of a class name that need a wider column
SMALL = 48  # pixels per side below which an image is enlarged without blur


def write_report(
    rows: Sequence[Row], out: Path, *, data_dir: Path | None, command: str, trust_code: bool = False
) -> Path:
    """Write one HTML file about the rows of a comparison, and return its path.

        rows = with_costs(rows_of([Path("runs/digits")]))
        write_report(rows, Path("report.html"), data_dir=None, command="plures report runs/digits")

    The file needs nothing else: no network, no script, no picture beside it. Of runs that differ in the seed alone the
    table shows mean and spread, and the charts the first one. `command` is shown as the way to make the page again.
    """
    rows = sorted((row for row in rows if row.runs), key=lambda row: place_of(row.name))
    looks = looks_of(row.name for row in rows)
    details = [gather(row, data_dir, looks[row.name].colour, trust_code=trust_code) for row in rows]
    html = render(rows, details, command)
    try:
        files.write(out, html.encode())
    except PluresError as error:
        raise PluresError(f"{error}; name another file with --out") from error
    return out


def render(rows: Sequence[Row], details: Sequence[Detail], command: str) -> str:
    """Write the page of some rows, whose first runs were looked at in detail."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    environment.filters["breakable"] = _breakable
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    data = rows[0].runs[0].config["data"]
    return environment.get_template("page.html.jinja").render(
        title=title_of(rows),
        summary=summary(rows, details),
        headlines=headlines(rows, details),
        rows=rows,
        seeds=sorted({len(row.runs) for row in rows}),
        columns=columns(rows),
        best={column.title: column.stressed(rows) for column in columns(rows)},
        costs_known=any(row.costs for row in rows),
        details=details,
        sections=[*sections(details), *trust_sections(rows, details)],
        training=training(details),
        few=FEW,
        at_once=AT_ONCE,
        unfolded=len(rows) <= OPEN,
        small=data["size"] < SMALL,
        long_names=max(map(len, data["classes"])) > LONG,
        commands=[(row.name, [run.command for run in row.runs]) for row in rows],
        environments=environments(rows),
        fingerprints={run.seed: run.config["data"]["fingerprint"] for row in rows for run in row.runs},
        data=data,
        command=command,
    )


def _breakable(name: str) -> Markup:
    """Let a class name break into the next line where one of its words ends."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def environments(rows: Sequence[Row]) -> list[tuple[Mapping[str, Any], int]]:
    """List the different environments that the runs come from, each with the number of its runs."""
    own = [run.config["environment"] for row in rows for run in row.runs]
    different = [one for place, one in enumerate(own) if one not in own[:place]]
    return [(one, own.count(one)) for one in different]
