"""Measure what ensembles from one pre-trained network cost: prediction, memory in training, and files.

    python docs/make/pretrained_costs.py

It needs the packages of docs/make/pretrained.py, and no data. The table goes to docs/results/pretrained-costs.md.
Times are processor times of one thread: the second fastest of nine calls, the median of seven comparisons.
"""

import argparse
import gc
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from plures.lab.costs import machine
from pretrained import RESULTS, TASKS, made

MEMBERS = 5
BATCHES = (1, 8, 32)
NETWORKS = {"MiniLM": ("TREC", (2, "*.layer.4.attention.output")), "EfficientNet-Lite0": ("birds", (2,))}
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144"}  # memory that is freed does not count: glibc would keep it
KINDS = ("one fine-tuning", "five members, one after the other", "five members, last=2, together")


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=KINDS, help="train so, and print the peak of the memory in bytes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if asked.memory:
        print(peak(asked.memory))
        return
    lines = ["| | what changes | batch 1 | batch 8 | batch 32 | largest difference |", "|---|---|---:|---:|---:|---:|"]
    for name, (task, places) in NETWORKS.items():
        lines += [f"| {name}, five members / one | last={last!r} | {ratios(task, last)} |" for last in places]
    command = [sys.executable, __file__, "--memory"]
    memory = {kind: int(subprocess.check_output([*command, kind], env=os.environ | GIVEN_BACK)) for kind in KINDS}
    lines += ["", "| training MiniLM, batch 16 x 16 tokens | MB | / one fine-tuning |", "|---|---:|---:|"]
    lines += [f"| {kind} | {size / 1e6:.0f} | {size / memory[KINDS[0]]:.2f} |" for kind, size in memory.items()]
    lines += ["", "| file of five members, MiniLM | / plain network |", "|---|---:|"]
    for method in ("changes, 20 %", "changes, 5 %", "changes, 2 %", "LoRA ensemble"):
        lines.append(f"| {method} | {file_ratio(method):.4f} |")
    lines += ["", "- command: python docs/make/pretrained_costs.py"]
    lines.append(f"- machine: {', '.join(f'{key} {value}' for key, value in machine().items())}, one thread")
    text = "\n".join(lines) + "\n"
    (RESULTS / "pretrained-costs.md").write_text(text)
    print(text)


def network_of(task: str) -> nn.Module:
    """Return the network of a task."""
    torch.manual_seed(0)
    return TASKS[task].network()


def inputs_of(task: str, batch: int) -> dict[str, Tensor]:
    """Return random inputs: 16 tokens, or 96 x 96 pixels."""
    if task == "birds":
        return {"inputs": torch.randn(batch, 3, 96, 96).contiguous(memory_format=torch.channels_last)}
    return {"input_ids": torch.randint(1000, 20000, (batch, 16)), "attention_mask": torch.ones(batch, 16).long()}


def ratios(task: str, last: int | str) -> str:
    """Return the time of five members relative to one of them, for each batch, and the largest difference."""
    ensemble = plures.adapt(network_of(task), MEMBERS, last=last)
    for stage in ensemble.stages():
        with torch.no_grad():
            for one in stage.parameters():
                if one.requires_grad and one.numel() > 1:
                    one.add_(0.05 * one.std() * torch.randn_like(one))
        stage.commit()
    engine, members = ensemble.engine(), [ensemble.checkout(number) for number in range(MEMBERS)]
    cells, difference = [], 0.0
    with torch.no_grad():
        for batch in BATCHES:
            inputs = inputs_of(task, batch)
            expected = torch.stack([member(**inputs) for member in members])
            difference = max(difference, float((engine(**inputs) - expected).abs().max()))
            pairs = [(spent(engine, inputs), spent(members[0], inputs)) for _ in range(7)]
            cells.append(f"{statistics.median(all_ / one for all_, one in pairs):.2f}")
    return " | ".join([*cells, f"{difference:.0e}"])


def spent(network: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the processor time of a prediction."""
    times = []
    for _ in range(9):
        before = time.process_time()
        network(**inputs)
        times.append(time.process_time() - before)
    return sorted(times)[1]


def peak(kind: str) -> int:
    """Train a few steps, and return the peak of the memory beyond what imports take."""
    torch.ones(100, 100) @ torch.ones(100, 100)
    gc.collect()
    before = highest()
    network = network_of("TREC")
    if kind == KINDS[0]:
        stages: Iterable[nn.Module] = [network.train()]
    elif kind == KINDS[1]:
        stages = plures.adapt(network, MEMBERS).stages()
    else:
        stages = plures.adapt(network, MEMBERS, last=2, schedule="together").stages()
    del network
    gc.collect()  # transformers leaves cycles
    for stage in stages:
        optimizer = torch.optim.AdamW((one for one in stage.parameters() if one.requires_grad), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            inputs, labels = inputs_of("TREC", 16), torch.zeros(16, dtype=torch.long)
            ours = isinstance(stage, plures.Stage)
            loss = stage(inputs, labels) if ours else F.cross_entropy(stage(**inputs), labels)
            loss.backward()
            optimizer.step()
        del stage, optimizer, loss
    return highest() - before


def highest() -> int:
    """Return the largest memory of this process so far; `resource` would count that of its parent before it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def file_ratio(method: str) -> float:
    """Return the size of a trained ensemble's file relative to the plain network."""
    ensemble = made(method, network_of("TREC"), TASKS["TREC"], 0)
    for stage in ensemble.stages():
        stage.commit()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ensemble.safetensors"
        plures.save(ensemble, path)
        return path.stat().st_size / sum(one.numel() * one.element_size() for one in network_of("TREC").parameters())


if __name__ == "__main__":
    main()
