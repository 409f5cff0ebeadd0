"""Measure the README's quickstart with every form of the classifier, on digits that are neither trained nor tested on.

    python docs/make/quickstart.py --seeds 3

The loop is that of the README: SGD at 0.1 with momentum 0.9, batches of 128, as many epochs for every stage. Of the
1,347 digits that `tests/test_quickstart.py` trains on, each seed holds a third out. The table goes to
docs/results/quickstart.md; `make docs` puts it into the appendix.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import plures
from plures import metrics
from plures.lab.costs import machine
from scaled import scaled

EPOCHS = (1, 5, 20)
Make = Callable[[nn.Module, int], plures.Ensemble]


def split(classifier: str | None) -> Make:
    """Return a function that splits a network with one form of the classifier."""
    return lambda network, seed: plures.OrthogonalDropout(network, members=5, classifier=classifier, seed=seed)


FORMS: dict[str, Make] = {
    "one network": lambda network, seed: plures.Deterministic(network),
    "fixed, as in the paper": split("fixed"),
    "fixed, one learned scale per member": lambda network, seed: split(None)(scaled(network), seed),
    "split": split("split"),
    "private (the default here)": split(None),
}


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    lines = [
        f"| classifier | epochs per stage: {' | '.join(map(str, EPOCHS))} |",
        "|---|" + "---|" * len(EPOCHS),
    ]
    for name, make in FORMS.items():
        cells = [cell([figures(make, epochs, seed) for seed in range(asked.seeds)]) for epochs in EPOCHS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    notes = [
        f"accuracy % / NLL / mean confidence; seeds 0 to {asked.seeds - 1}: mean, and standard deviation of the NLL",
        "measured on 449 digits held out of the training digits; the test digits were not looked at",
        f"command: {shlex.join(['python', sys.argv[0], *sys.argv[1:]])}",
        f"machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    text = "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"
    (Path(__file__).parent.parent / "results" / "quickstart.md").write_text(text)


def figures(make: Make, epochs: int, seed: int) -> list[float]:
    """Train as the README does, and return accuracy, NLL and mean confidence on held-out digits."""
    (pixels, labels), (held_out, answers) = digits(seed)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ensemble = make(network, seed)
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD([one for one in stage.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(128):
                optimizer.zero_grad()
                stage(pixels[batch], labels[batch]).backward()
                optimizer.step()
    found = ensemble.predict(held_out)
    sure = float(found.confidence.mean())
    return [100 * metrics.accuracy(found.probabilities, answers), metrics.nll(found.probabilities, answers), sure]


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return digits to train on and digits to measure on; the digits of the test are in neither."""
    pixels, labels = load_digits(return_X_y=True)
    pixels, _, labels, _ = train_test_split(pixels / 16, labels, test_size=450, random_state=0, stratify=labels)
    parts = train_test_split(pixels, labels, test_size=449, random_state=seed, stratify=labels)
    kept, held_out = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    return (kept, torch.tensor(parts[2])), (held_out, torch.tensor(parts[3]))


def cell(found: Sequence[Sequence[float]]) -> str:
    """Return accuracy, NLL with its spread, and mean confidence as one cell."""
    accuracy, nll, sure = (list(column) for column in zip(*found, strict=True))
    spread = f" ± {statistics.stdev(nll):.3f}" if len(nll) > 1 else ""
    return f"{statistics.mean(accuracy):.1f} / {statistics.mean(nll):.3f}{spread} / {statistics.mean(sure):.2f}"


if __name__ == "__main__":
    main()
