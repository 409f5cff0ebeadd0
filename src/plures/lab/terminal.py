"""Tables that the command line prints without --json."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plures.errors import visible
from plures.lab.recipes import Recipe

if TYPE_CHECKING:  # a list of recipes needs no torch
    from plures.lab.evaluation.predict import ImagePrediction

UNKNOWN = "-"
WIDE = 400  # without a terminal, lines are not broken
SHOWN = 10  # members whose values are listed one by one


def show(*parts: Table | str) -> None:
    """Print tables and lines: plain text without control codes if the output is not a terminal."""
    printer = console()
    for part in parts:
        printer.print(_text(part) if isinstance(part, str) else part)
    printer.print()


def console() -> Console:
    """Return a console as wide as the terminal, or very wide if the output is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[str] = ()) -> Table:
    """Return a table: columns named in `words` are text, the others are numbers, aligned to the right."""
    made = Table(
        title=_text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        made.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for row in rows:
        made.add_row(*(_text(cell) for cell in row))
    return made


def _text(words: str) -> Text:
    """Return words without markup: [red].png is a name; control characters are escaped."""
    return Text(visible(words))


def percent(value: float | None) -> str:
    """Return a fraction as a percentage: 95.1 %."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number with some digits after the point."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def scores_table(title: str, found: Mapping[str, Any]) -> Table:
    """Return a table of the metrics of one ensemble, one per line."""
    temperature = "needs validation images"
    if found["temperature"] is not None:
        temperature = f"at temperature {found['temperature']:.2f}, fitted on validation images"
    rows = [
        ["accuracy", percent(found["accuracy"]), f"of {found['images']:,} test images"],
        ["NLL", figure(found["nll"]), "negative log likelihood, lower is better"],
        ["Brier", figure(found["brier"]), "squared distance to the true class, 0 to 2"],
        ["ECE", figure(found["ece"], 4), "gap between confidence and accuracy"],
        ["calibrated NLL", figure(found["calibrated_nll"]), temperature],
        ["calibrated ECE", figure(found.get("calibrated_ece"), 4), "at the same temperature"],
        ["AURC", figure(found["aurc"], 4), "error rate of the most confident images, averaged"],
        ["member accuracy", percent(found["mean_member_accuracy"]), _each(found["member_accuracies"])],
        ["agreement", figure(found["agreement"]), "1: members fail together; 0: independently"],
    ]
    if found.get("engine"):
        rows.append(["engine", found["engine"], "the engine that predicted"])
    return table(title, ["", "value", "meaning"], rows, words=["", "meaning"])


def shift_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of corruptions: the accuracy at each severity, and the mean NLL and ECE."""
    severities = sorted({row["severity"] for row in rows})

    def line(name: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
        groups = [[one["accuracy"] for one in found if one["severity"] == severity] for severity in severities]
        nll, ece = (fmean(one[key] for one in found) for key in ("nll", "ece"))
        return [name, *(figure(100 * fmean(group), 1) for group in groups), figure(nll), figure(ece, 4)]

    kinds = dict.fromkeys(row["corruption"] for row in rows)
    lines = [line(kind, [row for row in rows if row["corruption"] == kind]) for kind in kinds]
    columns = ["corruption", *map(str, severities), "NLL", "ECE"]
    ends = f"{severities[0]} to {severities[-1]}"
    title = f"accuracy in % under shift, at severity {ends}, on {rows[0]['images']:,} test images"
    return table(title, columns, [*lines, line("all", rows)], words=["corruption"])


def ood_table(data: str, scores: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of how well uncertainty separates out-of-distribution images."""
    lines = [[row["score"], percent(row["auroc"]), percent(row["aupr"]), percent(row["fpr95"])] for row in scores]
    title = f"separating {data} from the test images"
    return table(title, ["score", "AUROC", "AUPR", "FPR95"], lines, words=["score"])


def answers_table(answers: Sequence["ImagePrediction"]) -> Table:
    """Return a table of predictions for image files."""
    with_sets = any(one.classes is not None for one in answers)
    lines = [
        [
            one.file,
            one.label or "abstains",
            percent(one.confidence),
            *([", ".join(one.classes or []) or "none"] if with_sets else []),
            figure(one.epistemic),
            _votes(one.votes),
        ]
        for one in answers
    ]
    columns = ["file", "label", "confidence", *(["one of"] if with_sets else []), "epistemic", "votes"]
    return table("", columns, lines, words=["file", "label", "one of", "votes"])


def recipes_table(recipes: Mapping[str, Recipe]) -> Table:
    """Return a list of recipes that fits 80 columns."""
    made = Table(box=None, show_header=False, pad_edge=False, width=min(80, console().width))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, recipe in recipes.items():
        every = recipe.epochs
        epochs = f"{every.train if recipe.together else f'{every.pretrain} + {every.prune} + {every.finetune}'} epochs"
        network = recipe.model if recipe.width is None else f"{recipe.model} of width {recipe.width}"
        made.add_row(Text(name), Text(f"{recipe.about}\n({recipe.data}, {network}, {epochs})"))
    return made


def _each(accuracies: Sequence[float]) -> str:
    if len(accuracies) == 1:
        return "one member"
    shown = ", ".join(f"{100 * accuracy:.1f}" for accuracy in accuracies[:SHOWN])
    return f"{len(accuracies)} members: {shown}{', ...' if len(accuracies) > SHOWN else ''}"


def _votes(votes: Sequence[str]) -> str:
    if len(votes) <= SHOWN:
        return ", ".join(votes)
    return ", ".join(f"{count} x {label}" for label, count in Counter(votes).most_common())
