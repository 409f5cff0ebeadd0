"""Compare what can become of the last layer, on images that are neither trained nor tested on.

    python docs/make/classifiers.py digits digits-resnet --seeds 3
    python docs/make/classifiers.py cifar10-cpu cifar100-cpu --data-dir data

Missing runs are made, finished ones skipped, interrupted ones resumed. The tables go to docs/results; `make docs` puts
them into docs/results.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from held_out import arguments, make, measured, save
from plures.lab.compare.jobs import Comparison, Job, Variant
from plures.lab.recipes import get_recipe

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
COLUMNS = ["classifier", "accuracy %", "NLL", "ECE", "member accuracy %", "agreement", "file"]


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs and the tables."""
    asked = arguments(__doc__ or "").parse_args(words)
    jobs = {recipe: jobs_of(recipe, range(asked.seeds), asked.runs) for recipe in asked.recipes}
    make([job for forms in jobs.values() for own in forms.values() for job in own], asked.jobs, asked.data_dir)
    for recipe, forms in jobs.items():
        lines = [measured(name, own, asked.data_dir) for name, own in forms.items()]
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
        save(f"classifiers-{recipe}", lines, COLUMNS, cells)


def jobs_of(recipe: str, seeds: Sequence[int], runs: Path) -> dict[str, list[Job]]:
    """List the runs of a recipe, by what becomes of the classifier."""
    plain = get_recipe(recipe)
    with_scale = replace(plain, model=f"scaled:{plain.model}")
    found = {}
    for name, form in FORMS.items():
        chosen = (f"{recipe}-scaled", with_scale) if name == SCALED else (recipe, plain)
        found[name] = Comparison(*chosen, (form,), tuple(seeds)).jobs(runs)
    return found


if __name__ == "__main__":
    main()
