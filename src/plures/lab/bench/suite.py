"""The whole benchmark, and how it is written down."""

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from plures.lab.bench.inference import prediction_ratios
from plures.lab.bench.measure import Ratio
from plures.lab.bench.methods import MethodCost, method_costs
from plures.lab.bench.size import file_ratios, memory_ratio
from plures.lab.bench.subjects import RESNET18, TRANSFORMER, WIDE_RESNET
from plures.lab.bench.training import data_ratios, mask_ratios, step_ratios
from plures.lab.precision import resolve
from plures.version import __version__


def precision_here() -> str:
    """Name the precision that training takes on this machine: bf16 only where the processor multiplies in it.

    >>> precision_here() in ("bf16", "float32")
    True
    """
    return "bf16" if resolve("auto", torch.device("cpu")) == "bf16" else "float32"


def ratios(quick: bool = False, full: bool = False) -> Iterator[Ratio]:
    """Measure a ResNet18: with `quick` only what has a bar; with `full` also a wide ResNet and a transformer.

    for ratio in ratios(quick=True): print(ratio)
    """
    precision = precision_here()
    yield from step_ratios(RESNET18, 64, precision, rounds=7)
    yield from mask_ratios(rounds=7)
    yield from data_ratios(rounds=9)
    yield from file_ratios(RESNET18, rounds=5)
    yield memory_ratio(RESNET18, rounds=3)
    yield from prediction_ratios(RESNET18, 128, "float32", rounds=3)
    if quick:
        return
    yield from prediction_ratios(RESNET18, 1, "float32", rounds=5, compiled=True)
    yield from prediction_ratios(RESNET18, 32, "float32", rounds=2)
    if precision == "bf16":
        yield from prediction_ratios(RESNET18, 128, "bf16", rounds=2)
    for subject in (WIDE_RESNET, TRANSFORMER) if full else ():
        yield from step_ratios(subject, 4, precision, rounds=3)
        yield from file_ratios(subject, rounds=2)
        yield memory_ratio(subject, rounds=1)
        yield from prediction_ratios(subject, 4, "float32", rounds=2)


def costs() -> Iterator[MethodCost]:
    """Measure what each method costs on ResNet18.

    for cost in costs(): print(cost)
    """
    yield from method_costs(batch=16, precision=precision_here(), rounds=2)


def machine() -> dict[str, str | int]:
    """Describe the machine that measured.

    machine()["threads"]
    """
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    return {
        "plures": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
    }


def write(folder: Path, found: list[Ratio], table: list[MethodCost]) -> None:
    """Write results.json and results.md into a folder.

    write(Path("benchmarks"), list(ratios()), list(costs()))
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "ratios": [asdict(r) | {"met": r.met} for r in found]}
    document["methods"] = [asdict(cost) for cost in table]
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(found, table))


def markdown(found: list[Ratio], table: list[MethodCost]) -> str:
    """Write the results as Markdown.

    print(markdown(list(ratios()), []))
    """
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = ["# Benchmark", "", f"Made by `make bench`. {about}.", ""]
    lines += [
        "Ratios measured side by side in one run: median of the rounds, with the least and the largest.",
        "",
    ]
    lines += ["| measure | setting | ratio | spread | bar |", "|---|---|---|---|---|"]
    for one in found:
        sign = ">=" if one.at_least else "<="
        bar = "" if one.bar is None else f"{sign} {one.bar:g} {'met' if one.met else '**missed**'}"
        lines.append(f"| {one.name} | {one.setting} | {one.value:.3f} | {one.low:.3f} to {one.high:.3f} | {bar} |")
    if table:
        lines += ["", "Each method on ResNet18-CIFAR, relative to the plain network, batch 16.", ""]
        lines += ["| method | members | parameters | file | training step | prediction |", "|---|---|---|---|---|---|"]
        for cost in table:
            numbers = (cost.parameters, cost.file, cost.step, cost.prediction)
            lines.append(f"| {cost.method} | {cost.members} | " + " | ".join(f"{n:.2f}" for n in numbers) + " |")
    return "\n".join(lines) + "\n"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
