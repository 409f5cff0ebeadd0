"""Make docs/trust.md and its figures from finished runs: calibration, shift and out-of-distribution data.

    python docs/make/trust.py runs/cifar10-cpu --ood svhn --data-dir data

Figures that the run folders do not contain yet (trust.json) are measured first and stored there. Every sentence that
depends on a number is written from it.
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trust_sentences as say
from plures.lab.compare.rows import Finished, Row, rows_of
from plures.lab.costs import machine
from plures.lab.method_names import place_of
from plures.lab.runs.config import train_command
from plures.lab.runs.folder import RunFolder
from trust_figures import Found, draw
from trust_measured import measured_trust
from trust_promises import add_promises
from trust_sentences import listed, scores

DOCS = Path(__file__).parent.parent
PICTURES = DOCS / "results"
LINE = 150  # characters of a line of prose

One = Mapping[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--ood", default="svhn")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=DOCS / "trust.md")
    asked = parser.parse_args(words)
    rows = sorted(rows_of(asked.runs), key=lambda row: place_of(row.name))
    found = {row.name: _measured(row, asked.data_dir, asked.ood) for row in rows}
    pictures = asked.out.parent / PICTURES.name
    pictures.mkdir(exist_ok=True)
    draw(found, pictures)
    asked.out.write_text(page(rows, found, asked.ood))
    print(asked.out, file=sys.stderr)


def _measured(row: Row, data_dir: Path | None, ood: str) -> One:
    def tell(words: str) -> None:
        print(f"{row.name}: {words}", file=sys.stderr, flush=True)

    folder = row.runs[0].path
    found = measured_trust(folder, data_dir, ood, tell)
    add_promises(folder, data_dir, found)
    return found


def page(rows: Sequence[Row], found: Found, ood: str) -> str:
    """Return the page."""
    first, some, here = rows[0].runs[0], next(iter(found.values())), machine()
    tables = {
        name: _table(columns, [line for pair in found.items() for line in lines(*pair)])
        for name, columns, lines in TABLES
    }
    recipe = first.made.recipe or first.config["data"]["name"]
    home = Path("runs") / recipe
    return _wrapped(
        (Path(__file__).parent / "trust.template")
        .read_text()
        .format(
            command=f"python docs/make/trust.py {home} --ood {ood}",
            trained="\n".join(train_command(row.runs[0].config, _place(home, row.runs[0])) for row in rows),
            epochs=_epochs(rows),
            data=first.config["data"]["name"],
            size=first.config["data"]["size"],
            network=first.config["recipe"]["model"],
            seed=first.seed,
            images=some["home"]["images"],
            held_out=some.get("calibrated", {}).get("held_out", 0),
            shifted=some["shift"]["images"],
            strangers=some["ood"]["images"],
            processor=here["processor"],
            torch=here["torch"],
            ood=ood,
            calibrated=say.calibration(found),
            covered=say.coverage(found),
            bounds=say.bounds(found),
            fallen=say.shift(found),
            told=say.strangers(found, ood),
            halves=say.silence(found),
            **tables,
        )
    )


def _wrapped(text: str) -> str:
    """Return a text with the lines of plain paragraphs broken anew."""
    parts = [
        part if part.startswith(("#", "|", "!", "```")) else textwrap.fill(part, LINE, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    ]
    return "\n\n".join(parts) + "\n"


def _place(home: Path, run: Finished) -> Path:
    return home / run.name.replace(" ", "-") / f"seed-{run.seed}"


def _epochs(rows: Sequence[Row]) -> str:
    each = [f"{row.name} {len(RunFolder(row.runs[0].path).records())}" for row in rows]
    return listed(each)


def _home(name: str, one: One) -> list[list[str]]:
    home, after = one["home"], one.get("calibrated", {})
    held_out = [_figure(after.get(key), 3) for key in ("held_out_nll", "held_out_nll_after")]
    figures = [
        f"{100 * home['accuracy']:.1f}",
        _figure(after.get("temperature"), 2),
        " → ".join(held_out),
        f"{home['nll']:.3f} → {_figure(after.get('nll'), 3)}",
        f"{home['ece']:.3f} → {_figure(after.get('ece'), 3)}",
    ]
    return [[name, str(home["members"]), *figures]]


def _sets(name: str, one: One) -> list[list[str]]:
    kinds = {each["kind"]: each for each in one.get("sets", [])}
    cells = [name]
    for kind in ("least ambiguous", "adaptive"):
        found = kinds.get(kind)
        cells += [f"{100 * found['covered']:.1f}", f"{found['size']:.2f}"] if found else ["-", "-"]
    return [cells]


def _bounded(name: str, one: One) -> list[list[str]]:
    return [
        [name, f"{100 * each['risk']:g}", f"{100 * each['answered']:.1f}", f"{100 * each['wrong']:.1f}"]
        for each in one.get("bounded", [])
    ]


def _shift(name: str, one: One) -> list[list[str]]:
    shift = one["shift"]
    severities = [f"{100 * each['accuracy']:.1f}" for each in shift["by_severity"]]
    means = [f"{100 * shift['accuracy']:.1f}", f"{shift['nll']:.3f}", f"{shift['ece']:.3f}"]
    return [[name, f"{100 * one['home']['accuracy']:.1f}", *severities, *means]]


def _ood(name: str, one: One) -> list[list[str]]:
    found = scores(one)
    by = [_percent(found.get(score, {}).get("auroc")) for score in ("entropy", "1 - max p", "mutual information")]
    return [[name, *by, _percent(found["entropy"]["fpr95"])]]


def _aurc(name: str, one: One) -> list[list[str]]:
    curve = one["risk_coverage"]

    def at(share: float) -> str:
        pairs = zip(curve["coverage"], curve["risk"], strict=True)
        return _percent(next(risk for coverage, risk in pairs if coverage >= share))

    return [[name, f"{one['home']['aurc']:.4f}", at(0.25), at(0.5), at(0.75), _percent(curve["risk"][-1])]]


def _percent(value: float | None) -> str:
    return _figure(None if value is None else 100 * value, 1)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


TABLES = [
    ("home", ["method", "members", "accuracy %", "temperature", "NLL, validation", "NLL, test", "ECE, test"], _home),
    ("sets", ["method", "least ambiguous: covered %", "classes", "adaptive: covered %", "classes"], _sets),
    ("bounded", ["method", "risk asked for, %", "answered %", "error % of these"], _bounded),
    (
        "shift",
        ["method", "uncorrupted", *(f"severity {one}" for one in range(1, 6)), "mean", "NLL, mean", "ECE, mean"],
        _shift,
    ),
    (
        "strangers_table",
        ["method", "AUROC % by entropy", "by 1 - max p", "by mutual information", "FPR95 % by entropy"],
        _ood,
    ),
    ("silent", ["method", "AURC", "error % of the most confident quarter", "half", "three quarters", "all"], _aurc),
]


if __name__ == "__main__":
    main()
