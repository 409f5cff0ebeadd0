"""What the results page says: pictures, sentences and tables, all from the figures of runs in docs/results.

A sentence compares what it finds; none has a number or a verdict of its own.
"""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import charts

DOCS = Path(__file__).parent.parent
RESULTS = DOCS / "results"
PICTURES = DOCS / "pictures"
LABELS = {
    "deterministic": "one network",
    "mc-dropout": "MC dropout",
    "batch-ensemble": "BatchEnsemble",
    "mimo": "MIMO",
    "masksembles": "Masksembles",
    "packed-ensemble": "packed ensemble",
    "deep-ensemble": "deep ensemble",
    "orthogonal-dropout schedule=together": "split, together",
    "orthogonal-dropout, as published": "split, as published",
    "orthogonal-dropout": "split, one by one",
}
COLOURS = {
    "one network": "#7F7F7F",
    "MC dropout": "#56B4E9",
    "packed ensemble": "#882255",
    "deep ensemble": "#0072B2",
    "BatchEnsemble": "#B8860B",
    "split, one by one": "#E07A2F",
    "split, together": "#C43C00",
}
TOGETHER, SEQUENTIAL, DEEP, SINGLE = "split, together, 2 x epochs", "split, one by one", "deep ensemble", "one network"
SETS = {
    "cifar10-cpu": "CIFAR10, 10,000 training images of 16 pixels, ResNet18 at a quarter of its width",
    "cifar10-half-cpu": "CIFAR10, the same at half of the width",
    "cifar100-cpu": "CIFAR100, 10,000 training images of 16 pixels",
    "tiny-imagenet-cpu": "Tiny-ImageNet, 20 of its classes",
    "cub200-cpu": "CUB200, 30 of its birds, 840 training photographs",
    "digits": "digits, 300 training images, a perceptron",
}
SHORT = {name: text.partition(",")[0] for name, text in SETS.items()} | {"cifar10-half-cpu": "CIFAR10, twice the width"}
SEVERITIES = {"uncorrupted": "uncorrupted", "severity 3": "severity 3", "severity 5, the highest": "severity 5"}
AXIS = "NLL of the test samples, lower is better"
PRETRAINED = {"one fine-tuning": "#7F7F7F", "deep ensemble": "#0072B2", "changes": "#C43C00"}
COLUMNS = ("method", "accuracy %", "NLL", "ECE", "file", "training")


@dataclass(frozen=True)
class Row:
    """The figures of a method on one data set."""

    name: str
    seeds: tuple[int, ...]
    metrics: dict[str, Any]
    costs: dict[str, float]

    def mean(self, metric: str) -> float:
        """The mean of a metric over the seeds."""
        return float(self.metrics[metric]["mean"])

    def values(self, metric: str) -> tuple[float, ...]:
        """A metric of every seed."""
        return tuple(self.metrics[metric]["values"])

    def cell(self, metric: str, digits: int = 3, scale: float = 1) -> str:
        """Return mean and standard deviation."""
        spread = self.metrics[metric]["deviation"]
        return f"{scale * self.mean(metric):.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")

    def cost(self, name: str) -> str:
        """Return a cost in networks; a dash if it was not measured."""
        return f"{self.costs[name]:.{2 if name == 'file' else 1}f} x" if name in self.costs else "-"

    @property
    def colour(self) -> str:
        """The colour of its method."""
        return next(
            (colour for name, colour in (COLOURS | PRETRAINED).items() if self.name.startswith(name)), "#E69F00"
        )


@cache
def rows_of(recipe: str) -> dict[str, Row]:
    """Return all methods that were measured on a data set."""
    found: dict[str, Row] = {}
    for table in ("table1", "width", "together", "members"):
        for row in rows_in(f"{table}-{recipe}"):
            one = Row(label(row["name"]), tuple(row["seeds"]), row["metrics"], costs_of(row["costs"], recipe))
            found.setdefault(one.name, one)
    found = dict(sorted(found.items(), key=lambda item: place(item[0])))
    for name, row in list(found.items()):  # what does not depend on the number of epochs is measured once
        same = found.get(name.replace(", 2 x epochs", ""))
        if not row.costs and same is not None and same.costs:
            found[name] = replace(row, costs=same.costs | {"training": 2 * same.costs["training"]})
    return found


def rows_in(table: str) -> list[Any]:
    """Return the rows of a table as they were written; none if it was not made yet."""
    path = RESULTS / f"{table}.json"
    return list(json.loads(path.read_text())["rows"]) if path.is_file() else []


def place(name: str) -> int:
    """Return where a row stands in a table."""
    order = ("one", "MC", "Batch", "MIMO", "Mask", "packed", "deep", "split, together", "split")
    return next(number for number, start in enumerate(order) if name.startswith(start))


def label(name: str) -> str:
    """Return the short name of a row."""
    known = max((one for one in LABELS if name.startswith(one)), key=len)
    rest = re.sub(r" epochs x ([\d.]+)", r", \1 x epochs", name.removeprefix(known))
    return LABELS[known] + re.sub(r" members=(\d+)| \((\d+) members\)", r", \1\2 members", rest)


def costs_of(found: dict[str, float] | None, recipe: str) -> dict[str, float]:
    """Return the costs of a row in networks."""
    if found is None:
        return {}
    plain = {"cub200-cpu": 100, "tiny-imagenet-cpu": 20}.get(recipe, 30)  # epochs of one network
    known = {"file": found["size"], "prediction": found["prediction"], "training": (found["epochs"] or 0) / plain}
    return {name: value for name, value in known.items() if value}


def split_of(recipe: str) -> Row | None:
    """Return the split network, trained together if that was measured."""
    rows = rows_of(recipe)
    return rows.get(TOGETHER) or rows.get(SEQUENTIAL)


def verdict(one: Row, other: Row, metric: str) -> int:
    """Return -1, 0 or 1: whether a metric is lower, within the spread between seeds, or higher."""
    difference = one.mean(metric) - other.mean(metric)
    spread = max(one.metrics[metric]["deviation"] or 0, other.metrics[metric]["deviation"] or 0)
    return 0 if abs(difference) <= spread else (1 if difference > 0 else -1)


def seeds(*rows: Row) -> str:
    """Return the seeds that were measured."""
    most, least = max(len(one.seeds) for one in rows), min(len(one.seeds) for one in rows)
    return f"{most} seeds" if most == least > 1 else "one seed" if most == 1 else f"{least} to {most} seeds"


def claim(title: str, picture: str, says: str, *sentences: str) -> str:
    """Return one claim: a heading, a picture and what it shows."""
    return f"### {title}\n\n![{says}]({picture})\n\n{' '.join(sentences)}\n"


def dots(name: str, says: str, metric: str, panels: dict[str, Sequence[Row]], axis: str, scale: float = 1) -> str:
    """Draw a metric of some rows, and return the path of the picture for the page."""
    marks = {
        title: [charts.Mark(one.name, one.colour, tuple(scale * value for value in one.values(metric))) for one in rows]
        for title, rows in panels.items()
    }
    digits = 1 if scale == 100 else 4 if metric in ("ece", "aurc") else 3
    charts.dots(PICTURES / f"{name}.svg", says, axis, marks, digits)
    return f"pictures/{name}.svg"


def chosen(recipe: str, *names: str) -> list[Row]:
    """Return some rows of a data set, without those that were not measured."""
    return [rows_of(recipe)[name] for name in names if name in rows_of(recipe)]


def quality() -> str:
    """One network against five."""
    single, deep, split = (rows_of("cifar10-cpu")[name] for name in (SINGLE, DEEP, TOGETHER))
    says = "NLL of one network, a deep ensemble and split networks on CIFAR10"
    rows = chosen("cifar10-cpu", SINGLE, "packed ensemble", "BatchEnsemble", DEEP, TOGETHER, SEQUENTIAL)
    picture = dots("quality", says, "nll", {"CIFAR10": rows}, "NLL of 10,000 test images, lower is better")
    word = {-1: "Better than", 0: "As good as", 1: "Behind"}[verdict(split, deep, "nll")]
    file = f" in a file of {split.costs['file']:.2f} x" if "file" in split.costs else " in one network"
    return claim(
        f"{word} five networks,{file}",
        picture,
        says,
        f"The split network, trained together, has NLL {split.cell('nll')}, and a deep ensemble has {deep.cell('nll')} "
        f"({seeds(single, deep, split)}).",
        f"Their accuracies are {split.cell('accuracy', 1, 100)} % and {deep.cell('accuracy', 1, 100)} %.",
    )


def costs() -> str:
    """File, prediction and training."""
    draw_costs()
    rows = rows_of("cifar10-cpu")
    split = rows[TOGETHER] if "training" in rows[TOGETHER].costs else rows[SEQUENTIAL]
    says = "NLL against size of the file, prediction time and training time"
    return claim(
        f"Five answers cost {in_networks(split)}",
        "pictures/costs.svg",
        says,
        f"A deep ensemble costs {in_networks(rows[DEEP])} (of one network of this width, which is a quarter).",
        f"{prediction_of_wide()} ([benchmarks](../benchmarks/results.md)).",
    )


def in_networks(row: Row) -> str:
    """Return the costs of a row, in the order of the chart."""
    found = row.costs
    return f"{found['file']:.2f} files, {found['prediction']:.1f} predictions and {found['training']:.1f} trainings"


def prediction_of_wide() -> str:
    """Return a sentence on the prediction time of a ResNet18 at full width."""
    document = json.loads((DOCS.parent / "benchmarks/results.json").read_text())
    found = [
        one["value"]
        for one in document["ratios"]
        if one["name"] == "owned prediction of 5 members / one plain network"
        and one["setting"].startswith("ResNet18, batch")
        and "kernel granularity" in one["setting"]
    ]
    return f"At full width a split ResNet18 predicts as long as {min(found):.1f} to {max(found):.1f} networks"


def draw_costs() -> None:
    """Draw the chart of the README."""
    names = (SINGLE, "MC dropout", "packed ensemble", DEEP, SEQUENTIAL, TOGETHER)
    shown = [one for one in chosen("cifar10-cpu", *names) if one.costs]
    points = [charts.Point(one.name, one.colour, one.mean("nll"), one.costs) for one in shown]
    says = "NLL on CIFAR10 against size of the file, prediction time and training time, by method"
    charts.against_costs(PICTURES / "costs.svg", says, "NLL on CIFAR10, small ResNet18", points)


def elsewhere() -> str:
    """Other data sets, and a wider network."""
    others = [name for name in SETS if name not in ("cifar10-cpu", "digits") and split_of(name)]
    panels = {SHORT[name]: chosen(name, SINGLE, DEEP, TOGETHER, SEQUENTIAL) for name in others}
    says = "NLL of one network, a deep ensemble and split networks on other data"
    picture = dots("elsewhere", says, "nll", panels, "NLL of the test images, lower is better")
    pairs = {name: (split, rows_of(name)[DEEP]) for name in others if (split := split_of(name))}
    lower = [name for name, pair in pairs.items() if verdict(*pair, "nll") < 0]
    rest = [SHORT[name] for name in pairs if name not in lower]
    return claim(
        f"A lower NLL than the deep ensemble in {len(lower)} of {len(pairs)} other comparisons",
        picture,
        says,
        f"It is lower on {listed([SHORT[name] for name in lower])}"
        + (f", and not on {listed(rest)}." if rest else "."),
        "Most rows have one seed, so small differences may be chance "
        f"({seeds(*(row for pair in pairs.values() for row in pair))}).",
    )


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them; one with a comma in it is in brackets."""
    told = [re.sub(r", (.*)", r" (\1)", one) for one in names]
    return " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))


def abstaining() -> str:
    """Confidence and errors."""
    rows = chosen("cifar10-cpu", SINGLE, "MC dropout", "packed ensemble", DEEP, TOGETHER, SEQUENTIAL)
    deep, split = (rows_of("cifar10-cpu")[name] for name in (DEEP, TOGETHER))
    says = "Area under the risk-coverage curve by method"
    axis = "area under the curve of errors against answered images, lower is better"
    picture = dots("abstaining", says, "aurc", {"CIFAR10: how well confidence ranks errors": rows}, axis)
    words = {
        -1: "more reliably than a deep ensemble",
        0: "as reliably as a deep ensemble",
        1: "less reliably than a deep ensemble",
    }
    return claim(
        f"It knows when to abstain, {words[verdict(split, deep, 'aurc')]}",
        picture,
        says,
        f"The error, averaged over all shares of answered images, is {split.cell('aurc', 4)} for the split network "
        f"and {deep.cell('aurc', 4)} for the deep ensemble ({seeds(deep, split)}).",
        "With held-out data, `predict(...).abstain(risk=0.05)` bounds the error of what it answers "
        "([guide](guide/trust.md)).",
    )


def members() -> str:
    """What a fifth of the weights can do alone."""
    rows = chosen("cifar10-cpu", SINGLE, "MC dropout", "packed ensemble", DEEP, TOGETHER, SEQUENTIAL)
    single, packed, split = (rows_of("cifar10-cpu")[name] for name in (SINGLE, "packed ensemble", TOGETHER))
    says = "Accuracy of single members by method"
    axis = "mean accuracy of the members alone, %, higher is better"
    picture = dots("members", says, "mean_member_accuracy", {"CIFAR10": rows}, axis, 100)
    lost = single.mean("accuracy") - split.mean("mean_member_accuracy")
    return claim(
        f"A member with a fifth of the weights is {100 * lost:.1f} points behind a whole network",
        picture,
        says,
        f"Members of the split network are right for {split.cell('mean_member_accuracy', 1, 100)} % of the images, "
        f"and a network of the same shape for {single.cell('accuracy', 1, 100)} %.",
        f"Members of a packed ensemble of the same size have {packed.cell('mean_member_accuracy', 1, 100)} % "
        f"({seeds(single, packed, split)}).",
    )


def equal_training() -> str:
    """The deep ensemble with more epochs."""
    (row,) = [one for one in rows_in("table3-cifar10-cpu") if one["name"] == "deep-ensemble, 2.1 x epochs"]
    longer = Row("deep ensemble, 2.1 x epochs", tuple(row["seeds"]), row["metrics"], {})
    shown = [longer, *chosen("cifar10-cpu", DEEP, TOGETHER, "split, together, 3 x epochs", SEQUENTIAL)]
    best = min((one for one in shown if one.name.startswith("split")), key=lambda one: one.mean("nll"))
    says = "NLL of a deep ensemble that trains longer"
    picture = dots("equal-training", says, "nll", {"CIFAR10": shown}, "NLL, lower is better")
    word = "is ahead" if longer.mean("nll") < best.mean("nll") else "is not ahead"
    return claim(
        f"At equal training, the deep ensemble {word}",
        picture,
        says,
        f"With 2.1 times the epochs a deep ensemble has NLL {longer.cell('nll')}, and the best split network has "
        f"{best.cell('nll')} ({seeds(longer, best)}).",
        f"Their accuracies are {longer.cell('accuracy', 1, 100)} % and {best.cell('accuracy', 1, 100)} %.",
    )


def calibration() -> str:
    """ECE before a temperature."""
    rows = chosen("cifar10-cpu", SINGLE, DEEP, TOGETHER, SEQUENTIAL)
    deep, together, sequential = (rows_of("cifar10-cpu")[name] for name in (DEEP, TOGETHER, SEQUENTIAL))
    says = "Calibration error by method"
    picture = dots("calibration", says, "ece", {"CIFAR10, without a temperature": rows}, "ECE, lower is better")
    words = {-1: "lower", 0: "no lower", 1: "higher"}
    return claim(
        f"Its calibration error is {words[verdict(together, deep, 'ece')]} than a deep ensemble's",
        picture,
        says,
        f"Trained together, the split network has an ECE of {together.cell('ece', 4)}, and a deep ensemble has "
        f"{deep.cell('ece', 4)} ({seeds(deep, sequential, together)}).",
        f"One by one it has {sequential.cell('ece', 4)}, and with a temperature from held-out data "
        f"{sequential.cell('calibrated_ece', 4)}.",
    )


def shift() -> str:
    """Corrupted images."""
    text = (DOCS / "trust.md").read_text().partition("## Under shift")[2].partition("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    head, table = lines[0], {line[0]: line for line in lines[2:]}
    says = "Accuracy on clean and on corrupted images by method"
    panels = {}
    for title, column in SEVERITIES.items():
        marks = []
        for name in ("deterministic", "mc-dropout", "deep-ensemble", "orthogonal-dropout"):
            value = float(table[name][head.index(column)])
            marks.append(charts.Mark(LABELS[name], COLOURS[LABELS[name]], (value,)))
        panels[title] = marks
    charts.dots(PICTURES / "shift.svg", says, "accuracy on CIFAR10 in %, higher is better", panels, 1)
    deep, split = (float(table[name][head.index("severity 5")]) for name in ("deep-ensemble", "orthogonal-dropout"))
    return claim(
        f"Under shift it is {'less' if split < deep else 'not less'} accurate",
        "pictures/shift.svg",
        says,
        f"At the highest severity of eleven corruptions, the deep ensemble is right for {deep} % of the images "
        f"and the split network for {split} % (CIFAR10, one seed, one by one).",
        "[Calibration and shift](trust.md) has all severities and data from elsewhere.",
    )


def small() -> str:
    """A network without capacity to spare."""
    rows = chosen("digits", SINGLE, "packed ensemble", DEEP, TOGETHER, SEQUENTIAL)
    deep = rows_of("digits")[DEEP]
    split = split_of("digits")
    assert split
    says = "NLL of a small perceptron on digits"
    picture = dots(
        "small", says, "nll", {"digits, a perceptron of two layers": rows}, "NLL of 450 test images, lower is better"
    )
    counts = {row["name"]: row["metrics"]["nll"]["mean"] for row in rows_in("figure2-digits")}
    five, ten = (counts[f"orthogonal-dropout {count}"] for count in (5, 10))
    word = {-1: "ahead", 0: "only level", 1: "behind"}[verdict(split, deep, "nll")]
    return claim(
        f"With a small network it is {word}",
        picture,
        says,
        f"On digits the split perceptron has NLL {split.cell('nll')}, a deep ensemble {deep.cell('nll')} "
        f"({seeds(deep, split)}).",
        f"Five members of the paper's form have {five:.3f}, and ten have {ten:.3f} ([digits](evidence/digits.md)): "
        "a tenth of this network is too small.",
    )


def adapted() -> str:
    """Ensembles from one pre-trained network."""
    path = RESULTS / "pretrained.json"
    tasks = {name: tuned(runs) for name, runs in json.loads(path.read_text()).items()} if path.is_file() else {}
    tasks = {name: rows for name, rows in tasks.items() if len(rows) == 3}
    if not tasks:
        return ""
    says = "NLL of one fine-tuning, a deep ensemble of fine-tunings and changes to one network"
    picture = dots("pretrained", says, "nll", {name: list(rows.values()) for name, rows in tasks.items()}, AXIS)
    pairs = {name: (list(rows.values())[2], rows["deep ensemble"]) for name, rows in tasks.items()}
    found = {name: verdict(*pair, "nll") for name, pair in pairs.items()}
    words = {-1: "ahead", 0: "level", 1: "behind"}
    told = [f"{word} on {listed(those)}" for one, word in words.items() if (those := of_value(found, one))]
    worst = max(pairs, key=lambda name: pairs[name][0].mean("nll") - pairs[name][1].mean("nll"))
    split, deep = pairs[worst]
    files = [
        f"{min(sizes):.2f} to {max(sizes):.2f}"
        for one in (0, 1)
        if (sizes := [p[one].costs["file"] for p in pairs.values()])
    ]
    return claim(
        f"Against a deep ensemble of fine-tunings: {', '.join(told)}",
        picture,
        says,
        f"On {worst}, where the difference is least in its favour, `plures.adapt` has NLL {split.cell('nll')}, and the "
        f"deep ensemble has {deep.cell('nll')} ({seeds(*(row for pair in pairs.values() for row in pair))}).",
        f"Its file has {files[0]} x the size of the network, and the deep ensemble's {files[1]} x "
        "([guide](guide/pretrained-network.md)).",
    )


def of_value(found: dict[str, int], value: int) -> list[str]:
    """Return the names that have a value."""
    return [name for name, its in found.items() if its == value]


def tuned(runs: dict[str, dict[str, float]]) -> dict[str, Row]:
    """Return the methods of a task that were run, from what was kept of it; of several shares the best one.

    The share is chosen as the rates are: by the NLL of one member on validation samples.
    """
    shares = {key.partition(", seed")[0] for key in runs if re.match("changes, .* seed", key)}
    tried = {name: min(one["NLL"] for key, one in runs.items() if key.startswith(f"{name}, rate")) for name in shares}
    rows = {}
    for name in ("one fine-tuning", "deep ensemble", *sorted(shares, key=lambda share: tried[share])[:1]):
        own = [one for key, one in sorted(runs.items()) if key.startswith(f"{name}, seed")]
        if own:
            values = [one["NLL"] for one in own]
            spread = statistics.stdev(values) if len(values) > 1 else None
            found = {"nll": {"mean": statistics.mean(values), "deviation": spread, "values": values}}
            rows[name] = Row(name, tuple(range(len(own))), found, {"file": own[0]["file"]})
    return rows


def pretrained() -> str:
    """Return the tables of ensembles from one pre-trained network, without most of the columns.

    Rows that are not finished, and the row of the rates of norms, are in the guide only.
    """
    path = RESULTS / "pretrained.md"
    if not path.is_file():
        return ""
    parts = []
    for block in path.read_text().split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if (block.startswith("|") and "file" not in lines[0]) or "further samples" in block:
            continue  # in the guide only
        if block.startswith("|"):
            places = [0, *(lines[0].index(name) for name in ("accuracy", "NLL", "ECE", "file", "training"))]
            seeds = lines[2][lines[0].index("seeds")]
            lines[0] = ["method", *lines[0][1:]]
            lines[2:] = [line for line in lines[2:] if line[1] == seeds and "norms at" not in line[0]]
            parts.append("\n".join(f"| {' | '.join(line[place] for place in places)} |" for line in lines))
        elif not block.startswith("- "):
            parts.append(f"### Pre-trained: {block.strip()}")
    return "\n\n".join(parts) + "\n"


def table(recipe: str) -> str:
    """Return the table of a data set."""
    rows = list(rows_of(recipe).values())
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [
        (
            row.name,
            row.cell("accuracy", 1, 100),
            row.cell("nll"),
            row.cell("ece"),
            row.cost("file"),
            row.cost("training"),
        )
        for row in rows
    ]
    return f"### {SETS[recipe]}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def accuracies() -> str:
    """Return the sentence of the README about what members can do, together and alone."""
    split, deep, single = chosen("cifar10-cpu", TOGETHER, DEEP, SINGLE)
    return (
        f"There, five members together are right for {split.cell('accuracy', 1, 100)} % of the images, five networks "
        f"for {deep.cell('accuracy', 1, 100)} %, one network for {single.cell('accuracy', 1, 100)} %, and one member "
        f"alone for {split.cell('mean_member_accuracy', 1, 100)} % ({seeds(split, deep)})."
    )


CLAIMS = (quality, costs, elsewhere, abstaining, members)
LOSSES = (equal_training, calibration, shift, small)


def generated() -> dict[str, str]:
    """Return what the marks of the results page stand for; draw its pictures."""
    rows_of.cache_clear()
    return {
        "claims": "\n".join(f"{make()}" for make in CLAIMS),
        "adapted": adapted(),
        "accuracies": accuracies(),
        "losses": "\n".join(make() for make in LOSSES),
        "sets": "\n".join([*(table(recipe) for recipe in SETS if rows_of(recipe)), *filter(None, [pretrained()])]),
    }
