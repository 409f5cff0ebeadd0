"""The sections of charts: how to read each, and what it shows for each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from plures.lab.report import charts
from plures.lab.report.gather import Detail
from plures.lab.terminal import figure, percent


@dataclass(frozen=True)
class Figure:
    """A chart of one row and what it shows."""

    title: str
    colour: str | None  # None: of several rows
    chart: Markup | None  # None: there is nothing to draw, and `says` gives the reason
    says: str


@dataclass(frozen=True)
class Section:
    """Small charts side by side, one per row, under a heading that says how to read them."""

    id: str
    title: str
    reading: str
    figures: Sequence[Figure]


def sections(details: Sequence[Detail]) -> list[Section]:
    """Draw the predictions for the test images, with equal axes within a section so that rows can be compared."""
    ensembles = [one for one in details if one.members > 1]
    return [
        _reliability(details),
        _member_bars(details),
        _added_members(details, ensembles),
        _agreement(details, ensembles),
        _histograms(details),
    ]


def training(details: Sequence[Detail]) -> Section:
    """Draw the training curves."""

    def says(one: Detail) -> str:
        if not one.records:
            return "The log of the run has no accuracies."
        key, word = charts.accuracy_key(one)
        last = {record["member"]: record[key] for record in one.records}
        if len(last) == 1:
            return f"After {len(one.records):,} epochs, {word} is {percent(*last.values())}."
        return f"After {len(one.records):,} epochs in all, members end at a {word} of {_between(list(last.values()))}."

    return Section(
        "training",
        "Training",
        "Each column is a phase of training, each line a member, from faint (the first) to strong (the last). The loss "
        "axis is logarithmic.",
        _figures(details, says, lambda one, words: charts.training_curves(one, words) if one.records else None),
    )


def _reliability(details: Sequence[Detail]) -> Section:
    def says(one: Detail) -> str:
        table = one.together
        gap = float((table.count * table.confidence).sum() / table.count.sum()) - one.metrics["accuracy"]
        bias = f"{'overconfident' if gap > 0 else 'underconfident'} by {abs(100 * gap):.1f} points on average"
        if one.members == 1:
            return f"The single network has an ECE of {one.metrics['ece']:.3f} and is {bias}."
        return (
            f"A single member has an ECE of {one.alone_ece:.3f}, the ensemble {one.metrics['ece']:.3f}; the "
            f"ensemble is {bias}."
        )

    return Section(
        "reliability",
        "Reliability, before and after ensembling",
        "Each dot is a group of predictions of similar confidence: its area shows how many they are, its height the "
        "percentage that is correct. On the dashed line confidence equals accuracy; below it the network is "
        "overconfident, above it underconfident.",
        _figures(details, says, charts.reliability),
    )


def _member_bars(details: Sequence[Detail]) -> Section:
    values = [value for one in details for value in [*one.metrics["member_accuracies"], one.metrics["accuracy"]]]
    limits = max(0.0, charts.limits_of(values)[0] - 0.1 * (1 - min(values))), charts.limits_of(values)[1]

    def says(one: Detail) -> str:
        accuracies = one.metrics["member_accuracies"]
        if len(accuracies) == 1:
            return f"The single network is right on {percent(accuracies[0])} of the images."
        return (
            f"Members are right on {_between(accuracies)}, {percent(one.metrics['mean_member_accuracy'])} on "
            f"average; together on {percent(one.metrics['accuracy'])}."
        )

    return Section(
        "members",
        "Accuracy of each member",
        f"A bar is the accuracy of a member, the line that of the ensemble; the axis starts at {percent(limits[0])}.",
        _figures(details, says, lambda one, words: charts.member_bars(one, limits, words)),
    )


def _added_members(details: Sequence[Detail], ensembles: Sequence[Detail]) -> Section:
    def says(one: Detail) -> str:
        if one.members == 1:
            return "There is only one network: no member can be added."
        change = added_change(one)
        return f"{change[0].upper()}{change[1:]}."

    def draw(one: Detail, words: str) -> Markup | None:
        if one.members == 1:
            return None
        accuracies, nlls = zip(*(pair for other in ensembles for pair in other.added), strict=True)
        return charts.added_members(one, ensembles, (charts.limits_of(accuracies), charts.limits_of(nlls)), words)

    behind = " The other ensembles on this page are drawn faintly behind." if len(ensembles) > 1 else ""
    return Section(
        "added",
        "Quality against the number of members",
        "The line shows the ensemble of the first one, two, three ... members. Accuracy should rise and NLL fall."
        + behind,
        _figures(details, says, draw),
    )


def _agreement(details: Sequence[Detail], ensembles: Sequence[Detail]) -> Section:
    low = min((float(one.same_label.min()) for one in ensembles), default=0.0)

    def says(one: Detail) -> str:
        if one.members == 1:
            return "There is only one network: there are no pairs to compare."
        pairs = [float(one.same_label[i, j]) for i in range(one.members) for j in range(i)]
        average = f", {percent(sum(pairs) / len(pairs))} on average" if len(pairs) > 1 else ""
        return (
            f"Two members agree on {_between(pairs)} of the images{average}; inter-rater agreement, which shows "
            f"whether they fail together, is {figure(one.metrics['agreement'])}."
        )

    return Section(
        "agreement",
        "Agreement between members",
        "Each square is the share of test images, in percent, to which two members give the same label, from faint "
        f"(the lowest on this page, {percent(low)}) to strong (always); fainter is more diverse.",
        _figures(
            details, says, lambda one, words: charts.agreement_matrix(one, low, words) if one.members > 1 else None
        ),
    )


def _histograms(details: Sequence[Detail]) -> Section:
    highest = (
        max((share for one in details for share in one.right.shares), default=1.0),
        max((share for one in details for share in one.wrong.shares), default=1.0),
    )

    def says(one: Detail) -> str:
        if one.right.confidence is None or one.wrong.confidence is None:
            return f"All predictions are {'right' if one.right.count else 'wrong'}."
        return (
            f"Right predictions have a confidence of {percent(one.right.confidence)} on average, wrong ones "
            f"{percent(one.wrong.confidence)}."
        )

    return Section(
        "confidence",
        "Confidence of right and wrong predictions",
        "Upwards, the confidence of right predictions; downwards, of wrong ones, each as a share of its kind and on "
        "its own scale. In a good ensemble the wrong ones are far to the left.",
        _figures(details, says, lambda one, words: charts.confidence_histogram(one, highest, words)),
    )


def added_change(one: Detail) -> str:
    """Describe the gain of all members over the first one.

    added_change(detail)  # 'from the first member to all 5, accuracy goes from ...'
    """
    (accuracy, nll), (last_accuracy, last_nll) = one.added[0], one.added[-1]
    return (
        f"from the first member to all {one.members}, accuracy goes from {percent(accuracy)} to "
        f"{percent(last_accuracy)} and NLL from {figure(nll)} to {figure(last_nll)}"
    )


def _figures(
    details: Sequence[Detail], says: Callable[[Detail], str], draw: Callable[[Detail, str], Markup | None]
) -> list[Figure]:
    return [Figure(one.name, one.colour, draw(one, says(one)), says(one)) for one in details]


def _between(values: Sequence[float]) -> str:
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
