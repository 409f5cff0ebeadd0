"""Run the attack: python -m attack --help."""

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from attack.driver import Part, Results, run

PARTS = ("damaged", "malicious", "networks", "threads", "commands", "folders", "processes", "properties")


def main() -> int:
    """Attack, and return 1 if something went wrong."""
    parser = argparse.ArgumentParser(prog="attack", description="Attack plures with bad files, threads and bad inputs.")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="some parts of it")
    parser.add_argument("--files", type=int, default=10_000, help="damaged files, and as many malicious ones")
    parser.add_argument("--networks", type=int, default=500, help="random networks whose engines are compared")
    parser.add_argument("--predictions", type=int, default=500, help="in each of 8 threads, for each method and engine")
    parser.add_argument("--inputs", type=int, default=1_000, help="bad inputs to each command, and run folders")
    parser.add_argument("--first", type=int, default=0, help="the first of these: 9999 repeats the last file")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other files and inputs")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--results", type=Path, help="store the verdicts in this JSON file; the same command continues")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # what plures says of subjects that are hardly trained
    settings = {name: getattr(chosen, name) for name in ("files", "networks", "predictions", "inputs", "first", "seed")}
    with tempfile.TemporaryDirectory() as folder:
        parts = [part for name in chosen.only for part in parts_of(name, chosen, Path(folder))]
        try:
            failed = bool(run(parts, Results(chosen.results, settings), chosen.jobs, chosen.first))
            return int(failed | ("properties" in chosen.only and properties_fail(chosen.seed)))
        except KeyboardInterrupt:
            print("attack: interrupted; with --results the same command continues", file=sys.stderr)
            return 130


def properties_fail(seed: int) -> bool:
    """Run the property tests of the test suite with 500 new examples each; return whether one of them fails."""
    words = [
        "-m",
        "pytest",
        "-m",
        "hypothesis",
        "--hypothesis-profile=attack",
        f"--hypothesis-seed={seed}",
        "--tb=short",
    ]
    return (
        subprocess.run([sys.executable, *words], cwd=Path(__file__).parent.parent.parent, check=False).returncode != 0
    )


def parts_of(name: str, chosen: argparse.Namespace, folder: Path) -> list[Part]:
    """Return a part of the attack; files that its items share are made once."""
    from attack.commands import Commands, train_one
    from attack.files import Files
    from attack.folders import Folders
    from attack.networks import Networks
    from attack.subjects import save_all
    from attack.threads import Threads
    from plures.lab.cli.main import commands

    if name == "properties":  # pytest judges them
        return []
    if name == "networks":
        return [Networks(chosen.networks, chosen.seed)]
    if name == "threads":
        return [Threads(chosen.predictions)]
    if name in ("damaged", "malicious"):
        if not (folder / "0.safetensors").exists():
            save_all(folder)
        return [Files(name, chosen.files, folder, chosen.seed)]  # type: ignore[arg-type]
    template = folder / "template"
    if not template.exists():
        template.mkdir()
        train_one(template)
    if name == "folders":
        return [Folders("", chosen.inputs, template, chosen.seed)]
    if name == "processes":
        return [Commands("", max(1, chosen.inputs // 50), template, chosen.seed, batch=5, processes=True)]
    return [Commands(command, chosen.inputs, template, chosen.seed) for command in commands()]


if __name__ == "__main__":
    sys.exit(main())
