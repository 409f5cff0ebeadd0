"""Time torch.compile over all stages of an ensemble: the first step of each stage, and those after it.

    python -m benchmarks.compiling --width 16 --members 5

A stage is compiled in its first step, unless a stage of the same form was compiled before. The
figures go to standard output.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import plures
from plures.lab.models import build

ROUNDS = 5


def main(words: Sequence[str] | None = None) -> None:
    """Time every stage, compiled and not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build("resnet18", classes=10, channels=3, width=asked.width)
    images, labels = torch.randn(asked.batch, 3, 16, 16), torch.arange(asked.batch) % 10
    plain = plures.OrthogonalDropout(network, members=asked.members)
    compiled = plures.OrthogonalDropout(network, members=asked.members)
    print("| stage | first step, compiled, s | step, compiled, ms | step, ms | ratio |")
    print("|---|---:|---:|---:|---:|")
    for usual, other in zip(plain.stages(), compiled.stages(), strict=True):
        compiled_step = step(torch.compile(other), images, labels)
        first = timed(compiled_step)
        own, theirs = (
            statistics.median(timed(run) for _ in range(ROUNDS)) for run in (compiled_step, step(usual, images, labels))
        )
        print(f"| {usual.name} | {first:.1f} | {1e3 * own:.0f} | {1e3 * theirs:.0f} | {own / theirs:.2f} |", flush=True)


def step(stage: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return one training step."""
    optimizer = torch.optim.SGD([one for one in stage.parameters() if one.requires_grad], lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        stage(images, labels).backward()
        optimizer.step()

    return run


def timed(run: Callable[[], None]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
