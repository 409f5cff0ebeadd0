"""Measure speed and size, as ratios: `make bench`, or `python -m benchmarks --quick` for the ratios with a target.

The two sides of a ratio run in turn, so a busy machine slows both; an idle machine is still better. Everything is
written into benchmarks/results.json and results.md as it is found, and the figures of the owned engine into README.md
and docs/engines.md at the end. With --quick, nothing is written.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import pages, size, speed
from benchmarks.harness import RESNET18, TRANSFORMER, WIDE_RESNET, Ratio
from benchmarks.speed import MethodCost
from plures import files
from plures.lab.costs import machine
from plures.native import library

Part = tuple[str, Callable[[], Iterable[Ratio | MethodCost]]]

# Network, granularity, batch and targets (AVX-512, other instructions).
OWNED = (
    (RESNET18, "kernel", 1, (2.0, 2.0)),
    (RESNET18, "kernel", 16, (1.5, 1.9)),
    (RESNET18, "kernel", 32, (1.5, 1.9)),
    (RESNET18, "weight", 32, (2.8, 2.8)),
    (TRANSFORMER, "block", 8, (2.5, 2.5)),
    (WIDE_RESNET, "kernel", 8, (1.8, 1.8)),
    (RESNET18, "kernel", 128, (1.5, 1.9)),
)


def main() -> None:
    """Measure, with a line before each part and one for each ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only ratios that have a target; write nothing")
    quick = parser.parse_args().quick
    parts = with_targets() + ([] if quick else others())
    found: list[Ratio | MethodCost] = []
    start = time.monotonic()
    for number, (title, measure) in enumerate(parts, 1):
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        print(f"[{number}/{len(parts)}, {minutes}:{seconds:02}] {title} ...", file=sys.stderr, flush=True)
        for one in measure():
            print(f"  {one}", file=sys.stderr, flush=True)
            found.append(one)
            if not quick:
                write(pages.HOME / "benchmarks", found)
    print(markdown(found))
    if not quick:
        pages.main()


def with_targets() -> list[Part]:
    """Return the parts whose ratios have targets."""
    parts: list[Part] = [
        ("training steps, ResNet18", partial(speed.step_ratios, RESNET18, 64, rounds=5)),
        ("masks", partial(speed.mask_ratios, rounds=7)),
        ("the data pipeline", partial(speed.data_ratios, rounds=9)),
        ("files, ResNet18", partial(size.file_ratios, RESNET18, rounds=9)),
        ("prediction, ResNet18, batch 128", partial(speed.prediction_ratios, RESNET18, 128, rounds=3)),
    ]
    if reason := library.why_unavailable():
        print(f"the owned engine is not measured: {reason}", file=sys.stderr)
        return parts
    for subject, granularity, batch, bars in OWNED:
        title = f"the owned engine, {subject.name}, batch {batch}, {granularity} granularity"
        parts.append((title, partial(speed.owned_ratios, subject, granularity, batch, 9, bars)))
    parts.append(("the owned engine, ten members", partial(speed.growth_ratios, RESNET18, 16, 9)))
    for granularity in size.MEMORY_BARS:
        title = f"the memory of the owned engine, {granularity} granularity"
        parts.append((title, partial(size.memory_ratios, granularity)))
    return parts


def others() -> list[Part]:
    """Return the parts without targets: small batches, large networks, bf16, and every method on a ResNet18."""
    parts: list[Part] = [
        (f"prediction, ResNet18, batch {batch}", partial(speed.prediction_ratios, RESNET18, batch, rounds=3))
        for batch in (1, 32)
    ]
    # Few images: without bf16 instructions they take very long.
    parts.append(("bf16, ResNet18", partial(speed.bf16_ratios, RESNET18, 8, rounds=3)))
    for subject in (TRANSFORMER, WIDE_RESNET):
        parts += [
            (f"training steps, {subject.name}", partial(speed.step_ratios, subject, 4, rounds=2)),
            (f"files, {subject.name}", partial(size.file_ratios, subject, rounds=2)),
            (f"prediction, {subject.name}, batch 1", partial(speed.prediction_ratios, subject, 1, rounds=2)),
        ]
    parts.append(("every method, ResNet18", partial(speed.method_costs, 16, rounds=2)))
    return parts


def write(folder: Path, found: Sequence[Ratio | MethodCost]) -> None:
    """Write results.json and results.md into a folder."""
    document = {
        "machine": machine(),
        "ratios": [asdict(one) | {"met": one.met} for one in found if isinstance(one, Ratio)],
        "methods": [asdict(one) for one in found if isinstance(one, MethodCost)],
    }
    files.write_json(folder / "results.json", document)
    files.write(folder / "results.md", markdown(found).encode())


def markdown(found: Sequence[Ratio | MethodCost]) -> str:
    """Return the results as Markdown."""
    ratios = [one for one in found if isinstance(one, Ratio)]
    methods = [one for one in found if isinstance(one, MethodCost)]
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [
        "# Benchmark",
        "",
        f"Made by `make bench`. {about}.",
        "",
        "Ratios measured side by side in one run: median of the rounds, with the least and the largest.",
        "",
        *pages.table([asdict(one) | {"met": one.met} for one in ratios], digits=3),
    ]
    if methods:
        lines += ["", "Each method on ResNet18-CIFAR, relative to the plain network, batch 16.", ""]
        lines += ["| method | members | parameters | file | training step | prediction |", "|---|---|---|---|---|---|"]
    for cost in methods:
        numbers = (cost.parameters, cost.file, cost.step, cost.prediction)
        lines.append(f"| {cost.method} | {cost.members} | " + " | ".join(f"{n:.2f}" for n in numbers) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
