"""Render the rows of a comparison as one HTML file, with a summary at the top."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from plures import files
from plures.errors import PluresError
from plures.lab.compare.rows import Row
from plures.lab.compare.table import columns
from plures.lab.method_names import looks_of, place_of
from plures.lab.report.charts import FEW
from plures.lab.report.gather import Detail, gather
from plures.lab.report.sections import added_change, sections, training
from plures.lab.report.trust_sections import trust_sections
from plures.lab.terminal import figure, percent

AT_ONCE = 9  # charts of a section that are shown at first
OPEN = 3  # rows whose images and commands are unfolded at first
LONG = 12  # letters of a class name that need a wider column
SMALL = 48  # pixels per side below which an image is enlarged without blur
# Columns whose numbers stand large at the top, with their short names.
MEANINGS = {
    "accuracy %": ("accuracy", "of the test images"),
    "NLL": ("NLL", "negative log-likelihood, in nats"),
    "ECE": ("ECE", "gap between confidence and accuracy"),
}


def write_report(
    rows: Sequence[Row],
    out: Path,
    *,
    data_dir: Path | None,
    command: str,
    trust_code: bool = False,
    tell: Callable[[str], None] = lambda words: None,
) -> Path:
    """Write one HTML file about the rows of a comparison, and return its path.

        write_report(rows_of([Path("runs/digits")]), Path("report.html"), data_dir=None, command="plures report runs")

    The file is self-contained. For runs that differ only in their seed, the table shows mean and standard deviation,
    and the charts show the first run. `command` is shown as the way to make the page again; `tell` receives a line of
    progress for each row.
    """
    rows = sorted((row for row in rows if row.runs), key=lambda row: place_of(row.name))
    looks = looks_of(row.name for row in rows)
    details = []
    for number, row in enumerate(rows, 1):
        tell(f"{number} of {len(rows)}: {row.name} predicts the {row.runs[0].metrics['images']:,} test images")
        details.append(gather(row, data_dir, looks[row.name].colour, trust_code=trust_code))
    html = render(rows, details, command)
    try:
        files.write(out, html.encode())
    except PluresError as error:
        raise PluresError(f"{error}; give another file with --out") from error
    return out


def render(rows: Sequence[Row], details: Sequence[Detail], command: str) -> str:
    """Return the page of some rows, with the details of their first runs."""
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
    """Allow a line break after each word of a class name."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def environments(rows: Sequence[Row]) -> list[tuple[Mapping[str, Any], int]]:
    """Return the different environments of the runs, each with the number of its runs."""
    own = [run.config["environment"] for row in rows for run in row.runs]
    different = [one for place, one in enumerate(own) if one not in own[:place]]
    return [(one, own.count(one)) for one in different]


@dataclass(frozen=True)
class Headline:
    """A number for the top of the page, its meaning, and the row that it belongs to if there are several."""

    title: str
    value: str
    meaning: str
    whose: str = ""


def title_of(rows: Sequence[Row]) -> str:
    """Return the title of the page.

    title_of(rows)  # '8 models compared on digits'
    """
    name = rows[0].runs[0].config["data"]["name"]
    return f"{len(rows)} models compared on {name}" if len(rows) > 1 else f"{rows[0].name} on {name}"


def summary(rows: Sequence[Row], details: Sequence[Detail]) -> list[str]:
    """Return the summary at the top of the page, in plain words."""
    first = rows[0].runs[0]
    data = first.config["data"]
    networks = " and ".join(dict.fromkeys(run.config["recipe"]["model"] for row in rows for run in row.runs))
    who = f"{len(rows)} ways to use" if len(rows) > 1 else f"{rows[0].name} with"
    about = (
        f"{who} the network {networks}, trained on {data['name']} and tested on {first.metrics['images']:,} "
        f"images of {len(data['classes'])} classes; {_seeds(rows)}."
    )
    engines = [f"{one.name} with the {one.engine} engine" for one in details if one.engine]
    answered = [f"The test images were predicted again for this page: {', '.join(engines)}."] if engines else []
    ensembles = [one for one in details if one.members > 1 and not one.at_chance]
    return [about, *_gain(ensembles), *_at_chance(details), *answered]


def headlines(rows: Sequence[Row], details: Sequence[Detail]) -> list[Headline]:
    """Return the numbers for the top of the page: the best of several rows, or those of the only one."""
    found = []
    for column in (column for column in columns(rows) if column.title in MEANINGS):
        short, meaning = MEANINGS[column.title]
        row = column.best(rows) or rows[0]
        value = column.cell(row).partition(" ±")[0] + (" %" if column.title.endswith("%") else "")
        word = "best" if column.better == "high" else "lowest"
        several = len(rows) > 1
        size = f", {row.costs.size:.2f} x the file of one network" if row.costs else ""
        whose = row.name + size if several else ""
        found.append(Headline(f"{word} {short}" if several else short, value, meaning, whose))
    if len(rows) == 1 and details[0].members > 1:
        gain = details[0].metrics["accuracy"] - details[0].metrics["mean_member_accuracy"]
        meaning = "points of accuracy over its members on average"
        found.append(Headline("gain from ensembling", f"{100 * gain:+.1f}", meaning))
    return found


def _gain(ensembles: Sequence[Detail]) -> list[str]:
    """Describe the gain of all members over the first one, as the chart of added members shows it."""
    if not ensembles:
        return []
    ranked = sorted(ensembles, key=lambda one: one.added[-1][1] - one.added[0][1])  # by what the NLL gains
    helped = [one for one in ranked if _verdict(one) == "helps"]
    others = [one for one in ranked if one not in helped]
    averaging = "Averaging all members, instead of using the first one alone,"
    if len(ranked) == 1 or not helped:
        return [f"{averaging} {_verdict(ranked[0])} in {_of(ranked[0])}."]
    count = f"{len(helped)} of {len(ranked)}" if others else f"all {len(ranked)}"
    but = f" It {_verdict(others[-1])} in {_of(others[-1])}." if others else ""
    return [f"{averaging} helps in {count} ensembles, most in {_of(helped[0])}.{but}"]


def _at_chance(details: Sequence[Detail]) -> list[str]:
    """Describe the rows that have learned nothing; they do not count as helped by averaging."""
    return [
        f"{one.name} is at chance: it is right on {percent(one.metrics['accuracy'])} of the test images, and always "
        f"giving the most frequent class on {percent(one.chance)}."
        for one in details
        if one.at_chance
    ]


def _verdict(one: Detail) -> str:
    (accuracy, nll), (last_accuracy, last_nll) = one.added[0], one.added[-1]
    if last_nll < nll:
        return "helps" if last_accuracy >= accuracy else "improves NLL, but not accuracy,"
    return "improves accuracy, but not NLL," if last_accuracy > accuracy else "does not help"


def _of(one: Detail) -> str:
    return f"{one.name}: {added_change(one)} (seed {one.seed})"


def _seeds(rows: Sequence[Row]) -> str:
    counts = sorted({len(row.runs) for row in rows})
    numbers = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    return f"{numbers} seed{'' if counts == [1] else 's'}{' each' if len(rows) > 1 else ''}"
