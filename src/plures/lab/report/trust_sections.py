"""The sections about shift, out-of-distribution data and abstaining."""

from collections.abc import Sequence

from plures.lab.compare.rows import Row
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES
from plures.lab.evaluation.trust import kept_trust
from plures.lab.report import charts
from plures.lab.report.charts import Found, Measured
from plures.lab.report.gather import Detail
from plures.lab.report.sections import Figure, Section
from plures.lab.terminal import percent


def trust_sections(rows: Sequence[Row], details: Sequence[Detail]) -> list[Section]:
    """Draw the measurements of `plures compare --shift --ood DATA` for the first run of each row, if there are any."""
    every = [(detail, kept_trust(row.runs[0].path)) for row, detail in zip(rows, details, strict=True)]
    drawers = {"shift": _shift, "ood": _strangers, "risk_coverage": _risk}
    measured = {key: [(detail, found) for detail, found in every if key in found] for key in drawers}
    return [drawers[key](pairs) for key, pairs in measured.items() if pairs]


def _shift(measured: Measured) -> Section:
    images = measured[0][1]["shift"]["images"]
    ends = [(one, found["home"]["accuracy"], found["shift"]["by_severity"][-1]["accuracy"]) for one, found in measured]
    words = "; ".join(f"{one.name} from {percent(first)} to {percent(last)}" for one, first, last in ends)
    says = f"Accuracy falls: {words}."
    return Section(
        "shift",
        "Under shift",
        f"{len(KINDS)} published corruptions (noise, blur, weather, compression) at {len(SEVERITIES)} severities, on "
        f"{images:,} test images; the lines are means over all corruptions, and severity 0 is the uncorrupted images.",
        [Figure("all methods", None, charts.severity_curves(measured, says), says)],
    )


def _strangers(measured: Measured) -> Section:
    data = measured[0][1]["ood"]["data"]
    highest = max(max(found["ood"]["known"] + found["ood"]["strange"]) for _, found in measured)

    def figure(detail: Detail, found: Found) -> Figure:
        auroc = {one["score"]: one["auroc"] for one in found["ood"]["scores"]}["entropy"]
        says = f"Entropy separates {found['ood']['data']} from the test images with an AUROC of {percent(auroc)}."
        return Figure(detail.name, detail.colour, charts.entropy_histogram(found["ood"], highest, says), says)

    return Section(
        "ood",
        f"Out-of-distribution images: {data}",
        f"The entropy of the predictions in nats: for test images (upwards) and for images of {data} (downwards), each "
        "as a share of its set. The less they overlap, the better the ensemble recognises unfamiliar images.",
        [figure(detail, found) for detail, found in measured],
    )


def _risk(measured: Measured) -> Section:
    halves = []
    for one, found in measured:
        pairs = zip(found["risk_coverage"]["coverage"], found["risk_coverage"]["risk"], strict=True)
        halves.append(f"{one.name} {percent(next(risk for share, risk in pairs if share >= 0.5))}")
    words = "; ".join(halves)
    says = f"The error rate of the most confident half is: {words}."
    return Section(
        "risk",
        "Abstaining",
        "The error rate among the most confident predictions, against the share of images with a prediction. Lower is "
        "better.",
        [Figure("all methods", None, charts.risk_curves(measured, says), says)],
    )
