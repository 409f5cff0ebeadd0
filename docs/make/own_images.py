"""Train on 240 images of one's own, by the defaults of `plures train --data FOLDER`.

    python docs/make/own_images.py --data DATA

DATA has tiny-imagenet-20/train.parquet and test.parquet. A folder gets the first four of its classes, 60 training
images and all 50 validation images of each, which are the test images here; then the recipe `images` trains one
network, five members in one, and five networks, with three seeds. The same command continues after an interruption.
The table goes to docs/results/own-images.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet

from plures.lab.costs import machine

RESULTS = Path(__file__).parent.parent / "results"
CLASSES = {0: "goldfish", 1: "centipede", 2: "black stork", 3: "tabby"}
TRAINING = 60  # images of a class


def write_images(data: Path, folder: Path) -> None:
    """Write the images as a folder of files, a folder for each class."""
    for part, most in (("train", TRAINING), ("test", None)):
        rows = pyarrow.parquet.read_table(data / "tiny-imagenet-20" / f"{part}.parquet").to_pylist()
        for label, name in CLASSES.items():
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            images = [row["image"]["bytes"] for row in rows if row["label"] == label][:most]
            for number, image in enumerate(images):
                (place / f"{number}.jpg").write_bytes(image)


def line(row: dict[str, Any]) -> str:
    """Return the line of a method."""

    def cell(metric: str, digits: int, scale: float = 1) -> str:
        found = row["metrics"][metric]
        return f"{scale * found['mean']:.{digits}f} ± {scale * (found['deviation'] or 0):.{digits}f}"

    figures = cell("accuracy", 1, 100), cell("nll", 3), cell("ece", 3), f"{row['costs']['size']:.2f} x"
    return f"| {' | '.join([row['name'], *figures])} |"


def main() -> None:
    """Write the folder, train, and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--runs", type=Path, default=Path("runs/own-images"))
    asked = parser.parse_args()
    write_images(asked.data, asked.runs / "folder")
    methods = ("deterministic", "orthogonal-dropout", "deep-ensemble")
    words = ["--data", str(asked.runs / "folder"), "--methods", *methods, "--seeds", asked.seeds]
    command = [sys.executable, "-m", "plures", "compare", "images", *words, "--runs", str(asked.runs)]
    subprocess.run(command, check=True)
    rows = json.loads((asked.runs / "images/results.json").read_text())["rows"]
    lines = ["| method | accuracy % | NLL | ECE | file |", "|---|---|---|---|---|", *map(line, rows), ""]
    told = [
        f"- 240 training images of 4 classes, 200 test images; mean and standard deviation of {asked.seeds} seeds",
        "- command: python docs/make/own_images.py --data DATA",
        f"- machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    (RESULTS / "own-images.md").write_text("\n".join([*lines, *told]) + "\n")


if __name__ == "__main__":
    main()
