"""The table of what can become of the last layer, on images that are neither trained nor tested on.

`docs/make/evidence.py` makes its runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import store
from held_out_table import lines_of, save
from plures.lab.compare.jobs import Comparison, Job, Variant

SPLIT = "orthogonal-dropout"
SCALED = "fixed, one learned scale per member"
FORMS = {
    "one network": Variant("deterministic"),
    "fixed, as in the paper": Variant(SPLIT, ("classifier=fixed",)),
    SCALED: Variant(SPLIT),  # of the networks in scaled.py
    "split": Variant(SPLIT, ("classifier=split",)),
    "private": Variant(SPLIT, ("classifier=private",)),
    "deep ensemble": Variant("deep-ensemble"),
}
LARGE = ("cifar100-cpu",)  # recipes whose classifier is split by default; the others have a private one
COLUMNS = ["classifier", "accuracy %", "NLL", "ECE", "member accuracy %", "agreement", "file"]


def jobs_of(recipe: str, seeds: Sequence[int], runs: Path) -> dict[str, list[Job]]:
    """List the runs of a recipe, by what becomes of the classifier."""
    plain = store.recipe_of(recipe)
    with_scale = replace(plain, model=f"scaled:{plain.model}")
    usual = "split" if recipe in LARGE else "private"
    found = {}
    for name, form in (FORMS | {usual: Variant(SPLIT)}).items():  # the default has the runs of the other tables
        chosen = (f"{recipe}-scaled", with_scale) if name == SCALED else (recipe, plain)
        found[name] = Comparison(*chosen, (form,), tuple(seeds)).jobs(runs)
    return found


def write(recipe: str, seeds: Sequence[int]) -> int:
    """Write the table of the forms whose runs were kept, and say how many runs there are."""
    lines = lines_of(jobs_of(recipe, seeds, Path()))
    if not lines or lines[0].name != "one network":  # its file is the unit of sizes
        return 0
    plain = lines[0].mean("bytes")
    cells = [
        [
            line.name,
            line.cell("accuracy", 1, 100),
            line.cell("nll", 3),
            line.cell("ece", 4),
            line.cell("mean_member_accuracy", 1, 100),
            line.cell("agreement", 3),
            f"{line.mean('bytes') / plain:.2f} x",
        ]
        for line in lines
    ]
    return save(f"classifiers-{recipe}", lines, COLUMNS, cells)
