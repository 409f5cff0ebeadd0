"""Measure speed and size, as ratios: `make bench`, or `python -m benchmarks --quick` for the ratios with a target.

The two sides of a ratio run in turn, so a busy machine slows both; an idle machine is still better. Everything is
written into benchmarks/results.json and results.md as it is found, and the figures of the owned engine into README.md
and docs/engines.md at the end. With --quick, nothing is written.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import pages, size, speed
from benchmarks.harness import (
    LITE,
    PERCEPTRON,
    QUARTER,
    RESNET18,
    TRANSFORMER,
    TRANSFORMERS_VIT,
    WIDE_RESNET,
    Ratio,
    Subject,
)
from benchmarks.speed import MethodCost
from plures import files
from plures.lab.costs import machine
from plures.native import library

Part = tuple[str, Callable[[], Iterable[Ratio | MethodCost]]]

PEERS = (speed.FIVE_NETWORKS, speed.UNFOLDED, speed.ONNX, speed.PACKED, speed.BATCH)
# Network, granularity, batch, target, threads (None: all), rounds, and what else is compared with the plain network.
OWNED: tuple[tuple[Subject, str, int, float, int | None, int, tuple[str, ...]], ...] = (
    (RESNET18, "kernel", 1, 1.6, None, 9, PEERS),
    (RESNET18, "kernel", 1, 1.6, 1, 9, ()),
    (RESNET18, "kernel", 16, 1.25, None, 7, (*PEERS, speed.COMPILED)),
    (RESNET18, "weight", 32, 2.8, None, 5, ()),
    (RESNET18, "kernel", 128, 1.3, None, 5, ()),
    (WIDE_RESNET, "kernel", 8, 1.4, None, 5, ()),
    (TRANSFORMER, "block", 8, 1.6, None, 7, (speed.FIVE_NETWORKS, speed.ONNX)),
    (TRANSFORMERS_VIT, "block", 8, 2.0, None, 7, (speed.FIVE_NETWORKS,)),
    *((PERCEPTRON, "weight", batch, 2.0, 1, 9, PEERS) for batch in (1, 32, 512)),
    (PERCEPTRON, "block", 1, 2.0, 1, 9, ()),
    (LITE, "kernel", 1, 3.0, None, 7, (speed.FIVE_NETWORKS,)),
    (LITE, "kernel", 32, 3.0, None, 3, (speed.FIVE_NETWORKS,)),
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
    print("\n".join(map(str, found)))
    if not quick:
        pages.main()


def with_targets() -> list[Part]:
    """Return the parts whose ratios have targets."""
    parts: list[Part] = [
        ("training steps, ResNet18", partial(speed.step_ratios, RESNET18, 64, rounds=5)),
        ("masks", partial(speed.mask_ratios, rounds=7)),
        ("the data pipeline", partial(speed.data_ratios, rounds=9)),
        ("files, ResNet18", partial(size.file_ratios, RESNET18, rounds=9)),
        ("files, ViT-S", partial(size.file_ratios, TRANSFORMER, rounds=5)),
        ("training together, ResNet18", partial(speed.together_ratios, RESNET18, 64, 5, 2.0)),
        ("training together, a quarter of the width", partial(speed.together_ratios, QUARTER, 128, 7, 2.4)),
        ("training together, perceptron", partial(speed.together_ratios, PERCEPTRON, 64, 200, 2.0)),
    ]
    if reason := library.why_unavailable():
        print(f"the owned engine is not measured: {reason}", file=sys.stderr)
        return parts
    for subject, granularity, batch, bar, on_threads, rounds, peers in OWNED:
        title = f"prediction, {subject.name}, batch {batch}, {granularity} granularity"
        measure = partial(speed.owned_ratios, subject, granularity, batch, rounds, bar)
        parts.append((title, partial(measure, on_threads=on_threads, peers=peers)))
    parts.append(("the owned engine, ten members", partial(speed.growth_ratios, RESNET18, 16, 9)))
    for granularity in size.MEMORY_BARS:
        title = f"the memory of the owned engine, {granularity} granularity"
        parts.append((title, partial(size.memory_ratios, granularity)))
    return parts


def others() -> list[Part]:
    """Return the parts without targets: large networks, bf16, and every method on a ResNet18."""
    # Few images: without bf16 instructions they take very long.
    parts: list[Part] = [("bf16, ResNet18", partial(speed.bf16_ratios, RESNET18, 4, rounds=2))]
    for subject in (TRANSFORMER, WIDE_RESNET):
        parts.append((f"training steps, {subject.name}", partial(speed.step_ratios, subject, 4, rounds=2)))
    parts.append(("every method, ResNet18", partial(speed.method_costs, 16, rounds=2)))
    return parts


def write(folder: Path, found: Sequence[Ratio | MethodCost]) -> None:
    """Write results.json and results.md into a folder; what other sets of instructions gave is kept."""
    path, here = folder / "results.json", machine()
    known = json.loads(path.read_text()) if path.exists() else {"machine": here, "others": {}}
    others = known.pop("others", {}) | {known["machine"]["instructions"]: known}
    others.pop(here["instructions"], None)
    document = {
        "machine": here,
        "ratios": [asdict(one) | {"met": one.met} for one in found if isinstance(one, Ratio)],
        "methods": [asdict(one) for one in found if isinstance(one, MethodCost)],
        "others": others,
    }
    files.write_json(path, document)
    files.write(folder / "results.md", pages.results(document).encode())


if __name__ == "__main__":
    main()
