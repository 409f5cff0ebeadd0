"""Run the attack: python -m attack --help."""

import argparse
import sys

from attack.files import attack_with_files


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description="Attack plures with bad files, threads and bad inputs.")
    parser.add_argument("--only", choices=["damaged", "malicious", "threads", "commands"], help="one part of it")
    parser.add_argument("--files", type=int, default=10_000, help="damaged files, and as many malicious ones")
    parser.add_argument("--predictions", type=int, default=500, help="in each of 8 threads, for each method and engine")
    parser.add_argument("--inputs", type=int, default=1_000, help="bad inputs to each command")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other files and inputs")
    chosen = parser.parse_args()
    found: list[str] = []
    for kind in ("damaged", "malicious"):
        if chosen.only in (None, kind):
            tally = attack_with_files(kind, chosen.files, chosen.seed)
            print(f"{kind}: {tally}", flush=True)
            found += tally.bad
    for one in found:
        print(one, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
