"""The sections of charts: what each shows, drawn and in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from plures.errors import visible
from plures.lab.report.charts import QUIET, chart
from plures.lab.report.gather import Detail
from plures.lab.terminal import figure, percent


@dataclass(frozen=True)
class Panel:
    """A chart of one row or of all, and what it shows."""

    title: str
    colour: str | None  # None: of several rows
    chart: Markup | None  # None: there is nothing to draw, and `says` gives the reason
    says: str


def panels(details: Sequence[Detail]) -> dict[str, list[Panel]]:
    """Draw every section; some may be empty."""
    return {
        "reliability": [_reliability(one) for one in details],
        "members": _members([one for one in details if one.members > 1]),
        "training": [training(one) for one in details],
    }


def _reliability(one: Detail) -> Panel:
    """Draw accuracy against confidence, of the members alone and of the ensemble."""

    def draw(*plots: Axes) -> None:
        for axes, table in zip(plots, (one.together, one.alone), strict=False):
            some = table.count > 0
            area = (3.6 + 16 * (table.count[some] / table.count.sum()).sqrt()) ** 2
            confidence, accuracy = 100 * table.confidence[some], 100 * table.accuracy[some]
            axes.plot([0, 100], [0, 100], color=QUIET, linestyle=(0, (3, 4)), linewidth=1)
            axes.vlines(confidence, confidence, accuracy, color=QUIET, linewidth=1)
            axes.scatter(confidence, accuracy, area, one.look.colour, alpha=0.85, linewidths=0, zorder=3, clip_on=False)
            axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")

    gap = one.confidence - one.metrics["accuracy"]
    bias = f"{'overconfident' if gap > 0 else 'underconfident'} by {abs(100 * gap):.1f} points on average"
    together, alone = f"an ECE of {figure(one.metrics['ece'])}", figure(one.alone_ece)
    says, titles = f"The single network has {together} and is {bias}.", ["one network"]
    if one.members > 1:
        says = f"The ensemble has {together}, a single member {alone}; the ensemble is {bias}."
        titles = ["ensemble", "members alone"]
    return Panel(one.name, one.look.colour, chart(says, titles, "confidence, %", draw), says)


def training(one: Detail) -> Panel:
    """Draw accuracy and loss over the epochs: a line per member, from faint to strong."""
    key, word = "validation_accuracy", "validation accuracy"
    known = [record for record in one.records if record[key] is not None]
    if not known:
        return Panel(one.name, one.look.colour, None, "The run had no validation images.")
    last = {record["member"]: record[key] for record in known}

    def draw(left: Axes, right: Axes) -> None:
        for place, member in enumerate(last, 1):
            mine = [record for record in known if record["member"] == member]
            strength = 0.35 + 0.65 * place / len(last)
            for axes, values in ((left, [100 * at[key] for at in mine]), (right, [at["loss"] for at in mine])):
                axes.plot(range(1, len(mine) + 1), values, "o-", color=one.look.colour, alpha=strength, markersize=2.5)

    low, high = percent(min(last.values())), percent(max(last.values()))
    reached = low if low == high else f"{low.removesuffix(' %')} to {high}"
    says = f"After {len(known):,} epochs in all, {word} is {reached}."
    return Panel(one.name, one.look.colour, chart(says, [f"{word}, %", "training loss"], "epochs", draw), says)


def _members(ensembles: Sequence[Detail]) -> list[Panel]:
    """Draw accuracy and NLL of the first one, two, three... members, a line per row; nothing without ensembles."""
    if not ensembles:
        return []

    def draw(*plots: Axes) -> None:
        for place, (axes, scale) in enumerate(zip(plots, (100, 1), strict=True)):
            for one in ensembles:
                values, (colour, marker) = [scale * pair[place] for pair in one.added], one.look
                some, label = max(1, len(values) // 6), visible(one.name)
                axes.plot(range(1, one.members + 1), values, color=colour, marker=marker, markevery=some, label=label)

    rises = [
        f"{one.name} from {percent(one.added[0][0])} and {figure(one.added[0][1])} to {percent(one.added[-1][0])} and "
        f"{figure(one.added[-1][1])}"
        for one in ensembles
    ]
    says = f"Accuracy and NLL go, from the first member to all: {'; '.join(rises)}."
    drawn = chart(says, ["accuracy, %", "NLL"], "members", draw, names=len(ensembles))
    return [Panel("all methods", None, drawn, says)]
