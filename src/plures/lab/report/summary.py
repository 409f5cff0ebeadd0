"""The top of the page: what the rows say, in plain words and a few large numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from plures.lab.compare.rows import Row
from plures.lab.compare.table import columns
from plures.lab.report.gather import Detail
from plures.lab.report.sections import added_change

# Columns whose numbers stand large at the top, with their short names.
MEANINGS = {
    "accuracy %": ("accuracy", "of the test images"),
    "NLL": ("NLL", "negative log-likelihood, in nats"),
    "ECE": ("ECE", "gap between confidence and accuracy"),
}


@dataclass(frozen=True)
class Headline:
    """A number for the top of the page, what it means, and whose it is where there are several rows."""

    title: str
    value: str
    meaning: str
    whose: str = ""


def title_of(rows: Sequence[Row]) -> str:
    """Name the page.

    title_of(rows)  # '8 models compared on digits'
    """
    name = rows[0].runs[0].config["data"]["name"]
    return f"{len(rows)} models compared on {name}" if len(rows) > 1 else f"{rows[0].name} on {name}"


def summary(rows: Sequence[Row], details: Sequence[Detail]) -> list[str]:
    """Say in plain words what the page is about and what came out."""
    first = rows[0].runs[0]
    data = first.config["data"]
    networks = " and ".join(dict.fromkeys(run.config["recipe"]["model"] for row in rows for run in row.runs))
    who = f"{len(rows)} ways to use" if len(rows) > 1 else f"{rows[0].name} with"
    about = (
        f"{who} the network {networks}, trained on {data['name']} and tested on {first.metrics['images']:,} "
        f"images of {len(data['classes'])} classes; {_seeds(rows)}."
    )
    return [about, *_gain([one for one in details if one.members > 1])]


def headlines(rows: Sequence[Row], details: Sequence[Detail]) -> list[Headline]:
    """Choose the numbers for the top of the page: the best of several rows, or those of the only one."""
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
    """Say what all members bring over the first one, as the chart of added members shows it."""
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
