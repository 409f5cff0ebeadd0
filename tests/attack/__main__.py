"""Run the attack: python -m attack --help."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from attack.commands import attack_with_inputs, in_processes
from attack.files import attack_with_files
from attack.threads import THREADS, attack_with_threads

PARTS = ("damaged", "malicious", "threads", "commands")


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description="Attack plures with bad files, threads and bad inputs.")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--files", type=int, default=10_000, help="damaged files, and as many malicious ones")
    parser.add_argument("--first", type=int, default=0, help="the first of these files: 9999 makes the last one again")
    parser.add_argument("--predictions", type=int, default=500, help="in each of 8 threads, for each method and engine")
    parser.add_argument("--inputs", type=int, default=1_000, help="bad inputs to each command")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other files and inputs")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for part in PARTS:
        if chosen.only in (None, part):
            for line, found in attack(part, chosen):
                print(line, flush=True)
                wrong += len(found)
                print(*found, sep="\n", end="\n" if found else "", file=sys.stderr, flush=True)
    return 1 if wrong else 0


def attack(part: str, chosen: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Give a line of figures for each piece of a part, and what went wrong."""
    if part in ("damaged", "malicious"):
        tally = attack_with_files(part, chosen.files, chosen.seed, chosen.first)  # type: ignore[arg-type]
        yield f"{part}: {tally}", tally.bad
    elif part == "threads":
        with tempfile.TemporaryDirectory() as folder:
            for name, seconds, wrong in attack_with_threads(chosen.predictions, Path(folder)):
                count = THREADS * chosen.predictions
                yield f"threads, {name}: {count} predictions, {len(wrong)} wrong; {seconds:.0f} s", wrong
    else:
        for one in attack_with_inputs(chosen.inputs, chosen.seed):
            yield str(one), one.bad
        count = max(1, chosen.inputs // 50)
        wrong = in_processes(count, chosen.seed)
        yield f"commands in processes of their own: {count} inputs, {len(wrong)} wrong", wrong


if __name__ == "__main__":
    sys.exit(main())
