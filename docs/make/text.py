"""Measure the roles of a text network's embeddings: private, split or shared; from scratch and pre-trained.

    python docs/make/text.py --seeds 3

The task is small and needs no download: from which package of Python's standard library is a docstring? The network is
a bag of words: an embedding, which is nine tenths of it, and two layers. A quarter of the docstrings is held out. The
table goes to docs/results/text.md; `make docs` puts it into the appendix.
"""

import argparse
import ast
import os
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import plures
from plures import metrics
from plures.lab.costs import machine

PACKAGES = ("asyncio", "ctypes", "email", "http", "logging", "multiprocessing", "tkinter", "unittest")
WORDS, LENGTH, WIDTH = 3000, 40, 64  # of the vocabulary, of a text, of an embedding
EPOCHS, BATCH, RATE = 10, 64, 0.01
FORMS = ("private", "split", "shared")
FIGURES = ("accuracy", "NLL", "ECE", "file")


class Bag(nn.Module):
    """Average the embeddings of a text's words; the last word of the vocabulary stands for none."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=WORDS - 1)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of texts [batch, LENGTH]."""
        logits: Tensor = self.head(self.hidden(self.embedding(words)).relu())
        return logits


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {}
    for seed in range(asked.seeds):
        for name, figures in rows(seed):
            found.setdefault(name, []).append(figures)
            print(seed, name, *(f"{one:.3f}" for one in figures), file=sys.stderr)
    lines = [f"| embeddings | {' | '.join(FIGURES)} |", "|---|" + "---:|" * len(FIGURES)]
    lines += [f"| {name} | {' | '.join(map(spread, zip(*own, strict=True)))} |" for name, own in found.items()]
    texts, labels = corpus()
    command = shlex.join(["python", sys.argv[0], *sys.argv[1:]])
    notes = [
        f"seeds 0 to {asked.seeds - 1}: mean ± standard deviation, on {len(labels) // 4:,} docstrings held out of "
        f"{len(texts):,}",
        f"command: {command}",
        f"machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    text = "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"
    (Path(__file__).parent.parent / "results" / "text.md").write_text(text)
    print(text)


def rows(seed: int) -> Iterator[tuple[str, list[float]]]:
    """Train one network and all forms of a split one, and yield their figures."""
    texts, labels = corpus()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order[: len(order) // 4], order[len(order) // 4 :]
    torch.manual_seed(seed)
    network = Bag(len(PACKAGES))
    single = trained(plures.Deterministic(network, init="given"), texts[training], labels[training], seed)
    yield "one network", figures(single, texts[test], labels[test])
    for init, start in (("fresh", network), ("given", single.checkout(0))):
        for form in FORMS:
            roles = plures.roles(start, embeddings=form)
            ensemble = plures.OrthogonalDropout(start, members=5, roles=roles, init=init, seed=seed)
            done = trained(ensemble, texts[training], labels[training], seed)
            start_name = "from scratch" if init == "fresh" else "from the trained network"
            yield f"{form}, {start_name}", figures(done, texts[test], labels[test])


def trained(ensemble: plures.Ensemble, texts: Tensor, labels: Tensor, seed: int) -> plures.Ensemble:
    """Train every stage for the same number of epochs; the scores for a fifth of it."""
    random = torch.Generator().manual_seed(seed)
    for stage in ensemble.stages():
        epochs = EPOCHS // 5 if stage.phase == "prune" else EPOCHS
        optimizer = torch.optim.Adam([one for one in stage.parameters() if one.requires_grad], lr=RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels), generator=random).split(BATCH):
                optimizer.zero_grad()
                stage(texts[batch], labels[batch]).backward()
                optimizer.step()
            schedule.step()
    return ensemble


def figures(ensemble: plures.Ensemble, texts: Tensor, labels: Tensor) -> list[float]:
    """Return accuracy, NLL, ECE and the size of the file relative to the plain network."""
    probabilities = ensemble.predict(texts).probabilities
    size = sum(tensor.nbytes for tensor in ensemble.tensors().values()) / ensemble.given.nbytes
    found = [measure(probabilities, labels) for measure in (metrics.accuracy, metrics.nll, metrics.ece)]
    return [*found, size]


def corpus() -> tuple[Tensor, Tensor]:
    """Return the docstrings of the packages as numbers of words [texts, LENGTH], and the numbers of their packages."""
    folder = Path(os.__file__).parent
    found = [
        (re.findall(r"[a-z]{2,}", text.lower())[:LENGTH], number)
        for number, package in enumerate(PACKAGES)
        for path in sorted((folder / package).rglob("*.py"))
        if "test" not in path.relative_to(folder / package).parts
        for text in docstrings(path)
    ]
    found = [(text, number) for text, number in found if len(text) >= 4]
    counts = Counter(word for text, _ in found for word in text)
    known = {word: place for place, (word, _) in enumerate(sorted(counts.items(), key=lambda one: (-one[1], one[0])))}
    numbers = torch.full((len(found), LENGTH), WORDS - 1)
    for row, (text, _) in enumerate(found):
        kept = [known[word] for word in text if known[word] < WORDS - 1]
        numbers[row, : len(kept)] = torch.tensor(kept, dtype=torch.long)
    return numbers, torch.tensor([number for _, number in found])


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, none twice."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    yield from dict.fromkeys(text for text in texts if text)


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


if __name__ == "__main__":
    main()
