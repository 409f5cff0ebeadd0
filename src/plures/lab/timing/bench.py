"""The benchmarks: what is measured, and how the results are written."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from plures import files
from plures.lab.timing import speed
from plures.lab.timing.costs import MethodCost, method_costs
from plures.lab.timing.harness import RESNET18, TRANSFORMER, WIDE_RESNET, LeftOut, Ratio, Subject
from plures.lab.timing.machine import machine
from plures.lab.timing.owned_engine import owned_ratios
from plures.lab.timing.size import file_ratios, memory_ratios
from plures.lab.training.distributed import resolve


def precision_here() -> str:
    """Name the precision that training takes on this machine: bf16 only where the processor is made for it.

    >>> precision_here() in ("bf16", "float32")
    True
    """
    return "bf16" if resolve("auto", torch.device("cpu")) == "bf16" else "float32"


def ratios(quick: bool = False) -> Iterator[Ratio | LeftOut]:
    """Measure a ResNet18: with `quick` only ratios that have a target."""
    precision = precision_here()
    yield from speed.step_ratios(RESNET18, 64, precision, rounds=5)
    yield from speed.mask_ratios(rounds=7)
    yield from speed.data_ratios(rounds=9)
    yield from file_ratios(RESNET18, rounds=9)
    yield from memory_ratios(RESNET18, rounds=3)
    yield from speed.prediction_ratios(RESNET18, 128, "float32", rounds=5, engines_only=True)
    yield from owned_ratios(rounds=9)
    if quick:
        return
    yield from speed.prediction_ratios(RESNET18, 1, "float32", rounds=5)
    yield from speed.prediction_ratios(RESNET18, 32, "float32", rounds=2)
    if precision == "bf16":
        for batch in (1, 32, 128):
            yield from speed.prediction_ratios(RESNET18, batch, "bf16", rounds=2)
    yield from speed.bf16_ratios(RESNET18, 8, rounds=3)  # few images: without bf16 instructions they take very long


def all_large_ratios() -> Iterator[Ratio | LeftOut]:
    """Measure a wide ResNet and a transformer of the size of ViT-S."""
    for subject in (TRANSFORMER, WIDE_RESNET):  # the quicker one first
        yield from large_ratios(subject, precision_here())


def large_ratios(
    subject: Subject, precision: str, batches: Sequence[int] = (1, 32, 128), rounds: int = 2
) -> Iterator[Ratio | LeftOut]:
    """Measure a large network, and its predictions at the batch sizes that it gets through in reasonable time.

    Predictions are in float32, and also in bf16 where the processor is made for it.
    """
    yield from speed.step_ratios(subject, 4, precision, rounds)
    yield from file_ratios(subject, rounds)
    yield from memory_ratios(subject, rounds=1, all_resident=False)
    for each in dict.fromkeys(("float32", precision)):
        yield from speed.affordable_ratios(subject, batches, each, rounds)


def costs() -> Iterator[MethodCost]:
    """Measure what each method costs on ResNet18."""
    yield from method_costs(batch=16, precision=precision_here(), rounds=2)


def write(folder: Path, found: Sequence[Ratio | LeftOut], table: list[MethodCost]) -> None:
    """Write results.json and results.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "ratios": [asdict(r) | {"met": r.met} for r in found]}
    document["methods"] = [asdict(cost) for cost in table]
    files.write_json(folder / "results.json", document)
    files.write(folder / "results.md", markdown(found, table).encode())


def markdown(found: Sequence[Ratio | LeftOut], table: list[MethodCost]) -> str:
    """Write the results as Markdown."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = ["# Benchmark", "", f"Made by `make bench`. {about}.", ""]
    lines += [
        "Ratios measured side by side in one run: median of the rounds, with the least and the largest.",
        "",
    ]
    lines += ["| measure | setting | ratio | spread | target |", "|---|---|---|---|---|"]
    for one in found:
        if isinstance(one, LeftOut):
            lines.append(f"| {one.name} | {one.setting} | | | left out: {one.why} |")
            continue
        bar = "" if one.bar is None else f"<= {one.bar:g} {'met' if one.met else '**missed**'}"
        lines.append(f"| {one.name} | {one.setting} | {one.value:.3f} | {one.low:.3f} to {one.high:.3f} | {bar} |")
    if table:
        lines += ["", "Each method on ResNet18-CIFAR, relative to the plain network, batch 16.", ""]
        lines += ["| method | members | parameters | file | training step | prediction |", "|---|---|---|---|---|---|"]
        for cost in table:
            numbers = (cost.parameters, cost.file, cost.step, cost.prediction)
            lines.append(f"| {cost.method} | {cost.members} | " + " | ".join(f"{n:.2f}" for n in numbers) + " |")
    return "\n".join(lines) + "\n"
