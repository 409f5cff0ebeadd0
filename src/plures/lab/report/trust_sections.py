"""The sections about shift, out-of-distribution data and abstaining."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from plures.lab.compare.rows import Row
from plures.lab.evaluation.corruptions import KINDS, SEVERITIES
from plures.lab.evaluation.trust import kept_trust
from plures.lab.report import charts
from plures.lab.report.gather import Detail
from plures.lab.report.sections import Figure, Section
from plures.lab.terminal import percent

Found = Mapping[str, Any]
Measured = Sequence[tuple[Detail, Found]]
LINE = 15  # units from one line of a legend to the next


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
        [Figure("all methods", None, _severity(measured, says), says)],
    )


def _severity(measured: Measured, says: str) -> Markup:
    drawing = charts.Drawing(charts.WIDTH, 192 + LINE * len(measured))
    for place, (key, title) in enumerate((("accuracy", "accuracy"), ("ece", "ECE"))):
        lines = [[found["home"][key], *(one[key] for one in found["shift"]["by_severity"])] for _, found in measured]
        limits = charts.limits_of([value for line in lines for value in line])
        ticks = charts.percent_ticks(limits) if key == "accuracy" else charts.plain_ticks(limits)
        panel = charts.Panel(drawing, 38 + 182 * place, 22, 134, 116, (0, 5), limits)
        panel.axes(charts.whole_ticks(0, 5), ticks, title=title, x_title="severity")
        for (detail, _), values in zip(measured, lines, strict=True):
            points = [(panel.px(severity), panel.py(value)) for severity, value in enumerate(values)]
            drawing.line(points, "curve", f"--look:{detail.colour}")
    _legend(drawing, measured, 190)
    return drawing.markup(says)


def _strangers(measured: Measured) -> Section:
    data = measured[0][1]["ood"]["data"]
    highest = max(max(found["ood"]["known"] + found["ood"]["strange"]) for _, found in measured)

    def figure(detail: Detail, found: Found) -> Figure:
        auroc = {one["score"]: one["auroc"] for one in found["ood"]["scores"]}["entropy"]
        says = f"Entropy separates {found['ood']['data']} from the test images with an AUROC of {percent(auroc)}."
        return Figure(detail.name, detail.colour, _histogram(found["ood"], highest, says), says)

    return Section(
        "ood",
        f"Out-of-distribution images: {data}",
        f"The entropy of the predictions in nats: for test images (upwards) and for images of {data} (downwards), each "
        "as a share of its set. The less they overlap, the better the ensemble recognises unfamiliar images.",
        [figure(detail, found) for detail, found in measured],
    )


def _histogram(counts: Found, highest: float, says: str) -> Markup:
    drawing = charts.Drawing(charts.WIDTH, 200)
    most = counts["most"]
    upper = charts.Panel(drawing, 38, 18, charts.WIDTH - 46, 74, (0, most), (0, highest))
    lower = charts.Panel(drawing, 38, 92, charts.WIDTH - 46, 74, (0, most), (highest, 0))
    sides = ((upper, "right", "known", "test images"), (lower, "wrong", "strange", counts["data"]))
    for panel, kind, key, word in sides:
        step = most / len(counts[key])
        for place, share in enumerate(counts[key]):
            top, bottom = sorted([panel.py(0), panel.py(share)])
            tip = f"{word}: {share:.1%} between {step * place:.2f} and {step * (place + 1):.2f} nats"
            drawing.rectangle(panel.px(step * place), top, panel.width / len(counts[key]) - 1, bottom - top, kind, tip)
        panel.level(0, "base")
        drawing.text(panel.left, panel.top - 8 if panel is upper else panel.bottom + 28, word, f"name-{kind}")
    for value in (one for one in charts.nice_ticks(0, most, most=4) if one <= most):
        drawing.text(lower.px(value), lower.bottom + 14, f"{value:g}", "tick", "middle")
    return drawing.markup(says)


def _risk(measured: Measured) -> Section:
    curves = [
        (one, list(zip(*(found["risk_coverage"][key] for key in ("coverage", "risk")), strict=True)))
        for one, found in measured
    ]
    halves = [(one, next(risk for share, risk in curve if share >= 0.5)) for one, curve in curves]
    words = "; ".join(f"{one.name} {percent(half)}" for one, half in halves)
    says = f"The error rate of the most confident half is: {words}."
    drawing = charts.Drawing(charts.WIDTH, 202 + LINE * len(measured))
    limits = charts.limits_of([0.0, *(risk for _, curve in curves for _, risk in curve)])
    panel = charts.Panel(drawing, 38, 12, charts.WIDTH - 46, 136, (0, 1), limits)
    panel.axes(charts.EDGES, charts.percent_ticks(limits), x_title="images with a prediction, %")
    for one, curve in curves:
        drawing.line([(panel.px(share), panel.py(risk)) for share, risk in curve], "curve", f"--look:{one.colour}")
    _legend(drawing, measured, 200)
    return Section(
        "risk",
        "Abstaining",
        "The error rate among the most confident predictions, against the share of images with a prediction. Lower is "
        "better.",
        [Figure("all methods", None, drawing.markup(says), says)],
    )


def _legend(drawing: charts.Drawing, measured: Measured, top: float) -> None:
    for place, (detail, _) in enumerate(measured):
        drawing.circle(44, top + LINE * place - 4, 4, "dot", style=f"--look:{detail.colour}")
        drawing.text(54, top + LINE * place, detail.name)
