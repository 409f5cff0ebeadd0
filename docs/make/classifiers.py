"""The table of the forms of the last layer, on images that are neither trained nor tested on.

`docs/make/evidence.py` makes its runs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import store
from plures import files
from plures.lab.compare import Comparison, Job, Variant

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
EMBEDDED = ("digits", "digits-resnet")  # recipes whose data come with plures
COLUMNS = ["classifier", "accuracy %", "NLL", "ECE", "member accuracy %", "agreement", "file"]


@dataclass(frozen=True)
class Line:
    """One line of a table: the figures of its seeds."""

    name: str
    runs: list[store.Kept]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs."""
        return tuple(run["recipe"]["seed"] for run in self.runs)

    def values(self, key: str) -> list[float]:
        """Return one figure of every seed."""
        return [float(one["held_out"][key]) for one in self.runs]

    def mean(self, key: str) -> float:
        """Return its mean over the seeds."""
        return statistics.fmean(self.values(key))

    def cell(self, key: str, digits: int, scale: float = 1) -> str:
        """Return mean and standard deviation; a dash if there is no figure."""
        if any(one["held_out"].get(key) is None for one in self.runs):
            return "-"
        spread = statistics.stdev(self.values(key)) if len(self.runs) > 1 else None
        return f"{scale * self.mean(key):.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def jobs_of(recipe: str, seeds: Sequence[int], runs: Path) -> dict[str, list[Job]]:
    """Return the runs of a recipe, by the form of the classifier."""
    plain = store.recipe_of(recipe)
    with_scale = replace(plain, model=f"scaled:{plain.model}")
    usual = "split" if recipe in LARGE else "private"
    found = {}
    for name, form in (FORMS | {usual: Variant(SPLIT)}).items():  # the default has the runs of the other tables
        chosen = (f"{recipe}-scaled", with_scale) if name == SCALED else (recipe, plain)
        found[name] = Comparison(*chosen, (form,), tuple(seeds)).jobs(runs)
    return found


def write(recipe: str, seeds: Sequence[int]) -> int:
    """Write the table of the forms whose runs were kept, and return the number of runs."""
    found = {
        name: [one for job in jobs if (one := store.read(job, "held_out"))]
        for name, jobs in jobs_of(recipe, seeds, Path()).items()
    }
    lines = [Line(name, runs) for name, runs in found.items() if runs]
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
    return save(f"classifiers-{recipe}", lines, cells)


def save(name: str, lines: Sequence[Line], cells: Sequence[Sequence[str]]) -> int:
    """Write a table into docs/results as Markdown and JSON, and return the number of its runs."""
    runs = [run for line in lines for run in line.runs]
    store.refuse_other_data(name, runs)
    images, seeds = runs[0]["held_out"]["images"], max((line.seeds for line in lines), key=len)
    fewer = [f"{line.name} ({', '.join(map(str, line.seeds))})" for line in lines if len(line.seeds) < len(seeds)]
    spread = f"seeds {', '.join(map(str, seeds))}: mean ± standard deviation"
    notes = [
        f"{spread if len(seeds) > 1 else f'seed {seeds[0]}: no spread'}; agreement: inter-rater kappa, "
        "lower is more diverse",
        *([f"fewer seeds: {'; '.join(fewer)}"] if fewer else []),
        f"each run is measured on {images:,} training images that it was not trained on; the test images were not "
        "looked at",
        f"command: python docs/make/evidence.py --only {name}{'' if name.endswith(EMBEDDED) else ' --data-dir DATA'}",
        f"machines: {store.machines(runs)}",
    ]
    head = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells])
    rows = [{"name": one.name, "seeds": one.seeds, "found": [run["held_out"] for run in one.runs]} for one in lines]
    text = "\n".join([table, "", *(f"- {note}" for note in notes)]) + "\n"
    files.write(store.RESULTS / f"{name}.md", text.encode())
    files.write_json(store.RESULTS / f"{name}.json", {"notes": notes, "rows": rows})
    return len(runs)
