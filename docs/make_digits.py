"""Make docs/digits.md: every method on the digits recipe, three seeds each. `make docs` runs it and resumes it."""

import statistics
from dataclasses import replace
from pathlib import Path

from plures.lab.bench.suite import machine
from plures.lab.options import METHOD_NAMES
from plures.lab.recipes import get_recipe
from plures.lab.train import train

SEEDS = (0, 1, 2)
RUNS = Path("runs/digits")
COLUMNS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "calibrated_nll": "calibrated NLL"}

ABOUT = """# Digits

Every method on the recipe `digits` (300 training images of 8 x 8 pixels, two hidden layers of 256 units), tested on 450
images. Mean and standard deviation over seeds {seeds}; made by `make docs`, which runs
`plures train digits --method METHOD --seed SEED` for each. Machine: {machine}.

Calibrated NLL is at the temperature fitted on the 100 validation images. Agreement is the inter-rater kappa: lower is
more diverse. Size is that of the file, relative to the single network's.
"""


def main() -> None:
    """Train what is missing and write the page."""
    rows = []
    single = None
    for method, name in METHOD_NAMES.items():
        recipe = get_recipe("digits").for_method(name)
        found = []
        for seed in SEEDS:
            run = RUNS / f"{method}-seed{seed}"
            found.append(train(replace(recipe, seed=seed), method, run))
        if method == "deterministic":
            single = found[0]["bytes"]
        rows.append((method, found))
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [
        ABOUT.format(seeds=", ".join(map(str, SEEDS)), machine=about),
        "| method | members | " + " | ".join(COLUMNS.values()) + " | agreement | size |",
        "|---|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for method, found in rows:
        cells = [spread([one[key] for one in found], 100 if key == "accuracy" else 1) for key in COLUMNS]
        agreement = spread([one["agreement"] for one in found])
        size = f"{found[0]['bytes'] / single:.2f}"
        lines.append(f"| {method} | {found[0]['members']} | " + " | ".join([*cells, agreement, size]) + " |")
    Path("docs/digits.md").write_text("\n".join(lines) + "\n")


def spread(values: list[float | None], scale: float = 1) -> str:
    """Write mean and standard deviation."""
    known = [scale * value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    digits = 1 if scale > 1 else 3
    return f"{statistics.mean(known):.{digits}f} ± {statistics.stdev(known):.{digits}f}"


if __name__ == "__main__":
    main()
