"""The sections of charts: what each shows for each row, drawn and in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from torch import Tensor

from plures.lab.report.charts import QUIET, Draw, chart, mirrored, percent_axis, whole_axis
from plures.lab.report.gather import Detail
from plures.lab.terminal import figure, percent

BINS = 15  # of confidence
FEW = 10  # members whose values can be written one by one
PERCENT_TICKS = ([0, 0.5, 1], ["0", "50", "100"])


@dataclass(frozen=True)
class Panel:
    """A chart of one row or of all, and what it shows."""

    title: str
    colour: str | None  # None: of several rows
    chart: Markup | None  # None: there is nothing to draw, and `says` gives the reason
    says: str


def panels(details: Sequence[Detail]) -> dict[str, list[Panel]]:
    """Draw every section, with equal axes within a section so that rows can be compared; some may be empty."""
    return {
        "reliability": [_reliability(one) for one in details],
        "members": _members(details),
        "agreement": _agreement(details),
        "confidence": _confidence(details),
        "shift": _shift([one for one in details if "shift" in one.trust]),
        "ood": _ood([one for one in details if "ood" in one.trust]),
        "risk": _risk([one for one in details if "risk_coverage" in one.trust]),
        "training": [training(one) for one in details],
    }


def _panel(one: Detail, says: str, height: float = 0, draw: Draw | None = None) -> Panel:
    return Panel(one.name, one.colour, chart(says, height, draw) if draw else None, says)


def _reliability(one: Detail) -> Panel:
    """Draw accuracy against confidence, of the members alone and of the ensemble."""
    alone, together = one.alone_ece, one.metrics["ece"]
    pairs = [(f"members alone, ECE {alone:.3f}", one.alone), (f"ensemble, ECE {together:.3f}", one.together)]
    if one.members == 1:
        pairs = [(f"one network, ECE {together:.3f}", one.together)]

    def draw(figure: Figure) -> None:
        for axes, (title, table) in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
            some = table.count > 0
            weight = (table.count[some] / table.count.sum()).sqrt().numpy()
            confidence, accuracy = table.confidence[some].numpy(), table.accuracy[some].numpy()
            axes.plot([0, 1], [0, 1], color=QUIET, linestyle=(0, (3, 4)), linewidth=1)
            axes.vlines(confidence, confidence, accuracy, color=QUIET, linewidth=1)
            area = (3.6 + 16 * weight) ** 2
            axes.scatter(confidence, accuracy, area, one.colour, alpha=0.85, linewidths=0, zorder=3, clip_on=False)
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title, xlabel="confidence, %")
            axes.set_xticks(*PERCENT_TICKS)
            axes.set_yticks(*PERCENT_TICKS)

    gap = float(one.confidence.mean()) - one.metrics["accuracy"]
    bias = f"{'overconfident' if gap > 0 else 'underconfident'} by {abs(100 * gap):.1f} points on average"
    says = f"A single member has an ECE of {alone:.3f}, the ensemble {together:.3f}; the ensemble is {bias}."
    if one.members == 1:
        says = f"The single network has an ECE of {together:.3f} and is {bias}."
    return _panel(one, says, 210, draw)


def _members(details: Sequence[Detail]) -> list[Panel]:
    """Draw accuracy and NLL of the first one, two, three... members, with the accuracy of each member alone."""
    ensembles = [one for one in details if one.members > 1]
    accuracies = [value for one in ensembles for value in one.metrics["member_accuracies"]]
    known = (
        accuracies + [accuracy for one in ensembles for accuracy, _ in one.added],
        [nll for one in ensembles for _, nll in one.added],
    )

    def panel(one: Detail) -> Panel:
        if one.members == 1:
            return _panel(one, "There is only one network: no member can be added.")
        alone, numbers = one.metrics["member_accuracies"], range(1, one.members + 1)

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2)
            for axes, title, line, every in zip(
                (left, right), ("accuracy", "NLL"), zip(*one.added, strict=True), known, strict=True
            ):
                margin = 0.05 * (max(every) - min(every)) or 0.05
                axes.plot(numbers, line, color=one.colour, linewidth=2)
                axes.set(title=title, xlabel="members", ylim=(min(every) - margin, max(every) + margin))
                whole_axis(axes)
            left.scatter(numbers, alone, 24, one.colour, alpha=0.6, linewidths=0)
            percent_axis(left)

        (accuracy, nll), (last_accuracy, last_nll) = one.added[0], one.added[-1]
        says = (
            f"Members are right on {_between(alone)}, {percent(one.metrics['mean_member_accuracy'])} on average; "
            f"together on {percent(one.metrics['accuracy'])}. From the first member to all {one.members}, accuracy "
            f"goes from {percent(accuracy)} to {percent(last_accuracy)} and NLL from {figure(nll)} to "
            f"{figure(last_nll)}."
        )
        return _panel(one, says, 180, draw)

    return [panel(one) for one in details]


def _agreement(details: Sequence[Detail]) -> list[Panel]:
    """Draw how often each two members give the same label: the lowest of all is faintest, always is strongest."""
    low = min(float(one.same_label.min()) for one in details)

    def panel(one: Detail) -> Panel:
        if one.members == 1:
            return _panel(one, "There is only one network: there are no pairs to compare.")
        others = ~np.eye(one.members, dtype=bool)

        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            colours = [to_rgba(one.colour, alpha) for alpha in (0.08, 0.48)]
            scale = LinearSegmentedColormap.from_list("agreement", colours)
            shown = np.ma.masked_array(one.same_label, ~others)
            axes.pcolormesh(range(one.members), range(one.members), shown, cmap=scale, vmin=low, vmax=1)
            if one.members <= FEW:
                digits = 1 if one.members <= 6 else 0
                for row, column in zip(*others.nonzero(), strict=True):
                    text = f"{100 * one.same_label[row, column]:.{digits}f}"
                    axes.text(column, row, text, ha="center", va="center")
            axes.set_aspect("equal")
            axes.invert_yaxis()
            axes.grid(False)
            axes.spines["bottom"].set_visible(False)
            axes.xaxis.tick_top()
            whole_axis(axes)
            axes.yaxis.set_major_locator(axes.xaxis.get_major_locator())

        pairs = one.same_label[others].tolist()
        says = (
            f"Two members agree on {_between(pairs)} of the images, {percent(fmean(pairs))} on average; inter-rater "
            f"agreement, which shows whether they fail together, is {figure(one.metrics['agreement'])}."
        )
        return _panel(one, says, 230, draw)

    return [panel(one) for one in details]


def _confidence(details: Sequence[Detail]) -> list[Panel]:
    """Draw how confident right predictions are, upwards, and wrong ones, downwards, each as a share of its kind."""
    split = [(one.confidence[one.right], one.confidence[~one.right]) for one in details]
    highest = [max(max(_shares(kind)) for kind in kinds) or 1.0 for kinds in zip(*split, strict=True)]
    made = []
    for one, (right, wrong) in zip(details, split, strict=True):
        says = f"All predictions are {'right' if len(right) else 'wrong'}."
        if len(right) and len(wrong):
            means = percent(float(right.mean())), percent(float(wrong.mean()))
            says = f"Right predictions have a confidence of {means[0]} on average, wrong ones {means[1]}."
        upper = _shares(right), f"{len(right):,} right", highest[0]
        lower = _shares(wrong), f"{len(wrong):,} wrong", highest[1]
        made.append(_panel(one, says, 205, mirrored(upper, lower, end=1.0, title="confidence")))
    return made


def _shares(values: Tensor) -> list[float]:
    return (torch.histc(values.clamp(max=1), BINS, 0, 1) / max(len(values), 1)).tolist()


def training(one: Detail) -> Panel:
    """Draw accuracy and loss over the epochs: a column per phase, a line per member, from faint to strong."""
    key, word = "validation_accuracy", "validation accuracy"
    if all(record[key] is None for record in one.records):
        key, word = "train_accuracy", "training accuracy"
    known = [record for record in one.records if record[key] is not None]
    if not known:
        return _panel(one, "The log of the run has no accuracies.")
    phases = list(dict.fromkeys(record["phase"] for record in known))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2, len(phases), sharex="col", sharey="row", squeeze=False)
        for phase, above, below in zip(phases, *grid, strict=True):
            records = [record for record in known if record["phase"] == phase]
            members = list(dict.fromkeys(record["member"] for record in records))
            for place, member in enumerate(members, 1):
                mine = [record for record in records if record["member"] == member]
                for axes, shown in ((above, key), (below, "loss")):
                    (line,) = axes.plot([record["epoch"] for record in mine], [record[shown] for record in mine], "o-")
                    line.set(color=one.colour, alpha=0.35 + 0.65 * place / len(members), linewidth=1.4, markersize=2.5)
            below.set_xlabel(f"{phase} epochs")
            whole_axis(below, most=3)
        grid[0, 0].set_title(word)
        grid[1, 0].set_title("training loss")
        percent_axis(grid[0, 0])
        if all(record["loss"] > 0 for record in known):
            grid[1, 0].set_yscale("log")

    last = {record["member"]: record[key] for record in known}
    return _panel(one, f"After {len(known):,} epochs in all, {word} is {_between(list(last.values()))}.", 270, draw)


def _shift(measured: Sequence[Detail]) -> list[Panel]:
    """Draw accuracy and ECE of all rows against the severity of corruptions."""
    if not measured:
        return []
    lines = {
        key: [[one.trust["home"][key], *(at[key] for at in one.trust["shift"]["by_severity"])] for one in measured]
        for key in ("accuracy", "ece")
    }

    def draw(figure: Figure) -> None:
        for axes, key, title in zip(figure.subplots(1, 2), lines, ("accuracy", "ECE"), strict=True):
            for one, values in zip(measured, lines[key], strict=True):
                axes.plot(values, color=one.colour, linewidth=2, label=one.name)
            axes.set(title=title, xlabel="severity")
            whole_axis(axes)
            if key == "accuracy":
                percent_axis(axes)
        figure.legend(handles=axes.lines, loc="outside lower left")

    pairs = zip(measured, lines["accuracy"], strict=True)
    falls = [f"{one.name} from {percent(line[0])} to {percent(line[-1])}" for one, line in pairs]
    says = f"On {measured[0].trust['shift']['images']:,} test images, accuracy falls: {'; '.join(falls)}."
    return [Panel("all methods", None, chart(says, 190 + 17 * len(measured), draw), says)]


def _ood(measured: Sequence[Detail]) -> list[Panel]:
    """Draw the entropy of predictions for test images, upwards, and for other images, downwards."""
    made = []
    highest = max(
        (share for one in measured for key in ("known", "strange") for share in one.trust["ood"][key]), default=1
    )
    for one in measured:
        found = one.trust["ood"]
        auroc = next(score["auroc"] for score in found["scores"] if score["score"] == "entropy")
        says = f"Entropy separates {found['data']} from the test images with an AUROC of {percent(auroc)}."
        upper, lower = (found["known"], "test images", highest), (found["strange"], found["data"], highest)
        made.append(_panel(one, says, 205, mirrored(upper, lower, end=found["most"], title="entropy, nats")))
    return made


def _risk(measured: Sequence[Detail]) -> list[Panel]:
    """Draw the error rate of all rows against the share of images with a prediction."""
    if not measured:
        return []
    curves = [(one, one.trust["risk_coverage"]["coverage"], one.trust["risk_coverage"]["risk"]) for one in measured]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for one, coverage, risk in curves:
            axes.plot(coverage, risk, color=one.colour, linewidth=2, label=one.name)
        axes.set(xlim=(0, 1), xlabel="images with a prediction, %")
        axes.set_ylim(bottom=0)
        axes.set_xticks(*PERCENT_TICKS)
        percent_axis(axes)
        figure.legend(loc="outside lower left")

    halves = [(one.name, next(r for c, r in zip(cs, rs, strict=True) if c >= 0.5)) for one, cs, rs in curves]
    words = "; ".join(f"{name} {percent(risk)}" for name, risk in halves)
    says = f"The error rate of the most confident half is: {words}."
    return [Panel("all methods", None, chart(says, 190 + 17 * len(measured), draw), says)]


def _between(values: Sequence[float]) -> str:
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
