"""The figures of docs/trust.md: shift, and risk against coverage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

from plures.lab.figures import INK, RULES, WIDTH
from plures.lab.method_names import Look, looks_of

Found = Mapping[str, Mapping[str, Any]]


def draw(found: Found, folder: Path) -> None:
    """Draw the figures."""
    looks = looks_of(found)
    with matplotlib.rc_context({**RULES, "axes.grid": True, "xtick.color": INK, "ytick.color": INK}):
        _severity(found, looks, folder / "trust-shift.svg")
        _risk(found, looks, folder / "trust-risk-coverage.svg")


def _severity(found: Found, looks: Mapping[str, Look], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    for name, one in found.items():
        places = [0, *(each["severity"] for each in one["shift"]["by_severity"])]
        for axis, key in zip(axes, ("accuracy", "ece"), strict=True):
            values = [one["home"][key], *(each[key] for each in one["shift"]["by_severity"])]
            axis.plot(places, values, label=name, **_line(looks[name]))
    for axis, title in zip(axes, ("accuracy", "ECE"), strict=True):
        axis.set(xlabel="severity (0: uncorrupted)", title=title)
    axes[0].yaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10]))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[1].set_ylim(bottom=0)
    _legend(figure, axes[0])
    _save(figure, path)


def _risk(found: Found, looks: Mapping[str, Look], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(0.72 * WIDTH, 3.4), layout="constrained")
    for name, one in found.items():
        curve = one["risk_coverage"]
        axis.plot(curve["coverage"], curve["risk"], color=looks[name].colour, lw=1.6, label=name)
    axis.set(xlabel="share of images with a prediction, most confident first", ylabel="error rate among them")
    axis.set(xlim=(0, 1), ylim=(0, None))
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="upper left")
    _save(figure, path)


def _line(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "ms": 4, "lw": 1.6}


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), columnspacing=1.2)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
