"""Make docs/trust.md and its figures from finished runs: calibration, shift and out-of-distribution data.

    python docs/make/trust.py runs/cifar10-cpu --ood svhn --data-dir data

What the run folders do not hold yet (trust.json) is measured first.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from plures.lab.compare.rows import Row, rows_of
from plures.lab.evaluation.trust import measured_trust
from plures.lab.methods import Look, looks_of, place_of
from plures.lab.timing.machine import machine

DOCS = Path(__file__).parent.parent
PICTURES = DOCS / "results"
matplotlib.rcParams |= {"svg.hashsalt": "plures", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}

Found = Mapping[str, Mapping[str, Any]]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--ood", default="svhn")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=DOCS / "trust.md")
    asked = parser.parse_args(words)
    rows = sorted(rows_of(asked.runs), key=lambda row: place_of(row.name))
    found = {row.name: measured_trust(row.runs[0].path, asked.data_dir, shift=True, ood=asked.ood) for row in rows}
    command = f"python docs/make/trust.py {shlex.join(map(str, asked.runs))} --ood {asked.ood}"
    pictures = asked.out.parent / PICTURES.name
    pictures.mkdir(exist_ok=True)
    draw(found, pictures, asked.ood)
    asked.out.write_text(page(rows, found, asked.ood, command))
    print(asked.out, file=sys.stderr)


def draw(found: Found, folder: Path, ood: str) -> None:
    """Draw the four figures."""
    looks = looks_of(found)
    _severity(found, looks, folder / "trust-shift.svg")
    _strangers(found, looks, folder / "trust-strangers.svg", ood)
    _risk(found, looks, folder / "trust-risk-coverage.svg")
    _on_demand(found, looks, folder / "trust-on-demand.svg")


def page(rows: Sequence[Row], found: Found, ood: str, command: str) -> str:
    """Fill the page."""
    first, some, here = rows[0].runs[0], next(iter(found.values())), machine()
    tables = {
        name: _table(columns, [line for pair in found.items() for line in lines(*pair)])
        for name, columns, lines in TABLES
    }
    return (
        (Path(__file__).parent / "trust.template")
        .read_text()
        .format(
            command=command,
            data=first.config["data"]["name"],
            network=first.config["recipe"]["model"],
            seed=first.seed,
            images=some["home"]["images"],
            shifted=some["shift"]["images"],
            processor=here["processor"],
            torch=here["torch"],
            ood=ood,
            **tables,
        )
    )


def _home(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    home, after = one["home"], one.get("calibrated", {})
    figures = [
        f"{100 * home['accuracy']:.1f}",
        f"{home['nll']:.3f}",
        _figure(after.get("nll"), 3),
        f"{home['ece']:.4f}",
        _figure(after.get("ece"), 4),
        _figure(after.get("temperature"), 2),
    ]
    return [[name, str(home["members"]), *figures]]


def _sets(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    kinds = {each["kind"]: each for each in one.get("sets", [])}
    cells = [name]
    for kind in ("least ambiguous", "adaptive"):
        found = kinds.get(kind)
        cells += [f"{100 * found['covered']:.1f}", f"{found['size']:.2f}"] if found else ["-", "-"]
    return [cells]


def _shift(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    shift = one["shift"]
    return [[name, f"{100 * shift['accuracy']:.1f}", f"{shift['nll']:.3f}", f"{shift['ece']:.4f}"]]


def _ood(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    scores = {each["score"]: each for each in one["ood"]["scores"]}
    by = [f"{100 * scores[score]['auroc']:.1f}" for score in ("entropy", "1 - max p", "mutual information")]
    return [[name, *by, f"{100 * scores['entropy']['fpr95']:.1f}"]]


def _aurc(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    curve = one["risk_coverage"]
    half = next(risk for coverage, risk in zip(curve["coverage"], curve["risk"], strict=True) if coverage >= 0.5)
    return [[name, f"{one['home']['aurc']:.4f}", f"{100 * half:.1f}", f"{100 * curve['risk'][-1]:.1f}"]]


def _demand(name: str, one: Mapping[str, Any]) -> list[list[str]]:
    members = one["home"]["members"]
    if members == 1:
        return []
    lines = []
    for each in one.get("on_demand", []):
        saved, lost = 1 - each["members"] / members, one["calibrated"]["accuracy"] - each["accuracy"]
        figures = [f"{each['members']:.2f} of {members}", f"{100 * saved:.0f}", f"{100 * each['accuracy']:.2f}"]
        lines.append([name, f"{each['until']:g}", *figures, f"{100 * lost:+.2f}", f"{each['nll']:.3f}"])
    return lines


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


TABLES = [
    (
        "home",
        ["method", "members", "accuracy %", "NLL", "calibrated NLL", "ECE", "calibrated ECE", "temperature"],
        _home,
    ),
    ("sets", ["method", "least ambiguous: covered %", "classes", "adaptive: covered %", "classes"], _sets),
    ("shift", ["method", "accuracy %", "NLL", "ECE"], _shift),
    (
        "strangers",
        ["method", "AUROC % by entropy", "by 1 - max p", "by mutual information", "FPR95 % by entropy"],
        _ood,
    ),
    ("silent", ["method", "AURC", "error % of the most confident half", "error % of all"], _aurc),
    (
        "demand",
        ["method", "until", "members used", "passes saved %", "accuracy %", "lost, points", "NLL"],
        _demand,
    ),
]


def _severity(found: Found, looks: Mapping[str, Look], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    for name, one in found.items():
        places = [0, *(each["severity"] for each in one["shift"]["by_severity"])]
        for axis, key in zip(axes, ("accuracy", "ece"), strict=True):
            values = [one["home"][key], *(each[key] for each in one["shift"]["by_severity"])]
            axis.plot(places, values, color=looks[name].colour, marker=looks[name].marker, ms=4, label=name)
    for axis, title in zip(axes, ("accuracy", "ECE"), strict=True):
        axis.set(xlabel="severity (0: uncorrupted)", title=title)
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _strangers(found: Found, looks: Mapping[str, Look], path: Path, ood: str) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(2.2 * len(found), 2.4), sharey=True, layout="constrained")
    for axis, (name, one) in zip([axes] if len(found) == 1 else axes, found.items(), strict=True):
        counts = one["ood"]
        step = counts["most"] / len(counts["known"])
        edges = [step * place for place in range(len(counts["known"]) + 1)]
        axis.stairs(counts["known"], edges, color="#444444", label="in-distribution")
        axis.stairs(counts["strange"], edges, color=looks[name].colour, fill=True, alpha=0.5, label=ood)
        axis.set(title=name, xlabel="entropy, nats")
        axis.legend(frameon=False, fontsize=7)
    _save(figure, path)


def _risk(found: Found, looks: Mapping[str, Look], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    for name, one in found.items():
        axis.plot(one["risk_coverage"]["coverage"], one["risk_coverage"]["risk"], color=looks[name].colour, label=name)
    axis.set(xlabel="share of images with a prediction", ylabel="error rate among them")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _on_demand(found: Found, looks: Mapping[str, Look], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    for name, one in found.items():
        members = one["home"]["members"]
        if members == 1:
            continue
        whole = [*one.get("on_demand", []), {"members": members, **one.get("calibrated", one["home"])}]
        used = [each["members"] / members for each in whole]
        for axis, key in zip(axes, ("accuracy", "nll"), strict=True):
            values = [each[key] for each in whole]
            axis.plot(used, values, color=looks[name].colour, marker=looks[name].marker, ms=4, label=name)
    for axis, title in zip(axes, ("accuracy", "NLL"), strict=True):
        axis.set(xlabel="share of member passes", title=title)
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
