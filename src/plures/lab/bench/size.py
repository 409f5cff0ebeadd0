"""Bytes on disk and in memory, and the time to load them."""

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from plures.lab.bench.measure import Action, Ratio, race, ratio
from plures.lab.bench.subjects import RESNET18, TRANSFORMER, WIDE_RESNET, Subject, finished, images
from plures.methods.orthogonal_dropout import OrthogonalDropout
from plures.storage import load, save


def file_ratios(subject: Subject, rounds: int) -> Iterator[Ratio]:
    """Compare an ensemble's file with the plain network's, and the time to load it.

    for ratio in file_ratios(RESNET18, rounds=3): print(ratio)
    """
    network = subject.make()
    bars = {(5, "weight"): 1.085, (10, "weight"): 1.13, (5, "kernel"): 1.025} if subject.name == "ResNet18" else {}
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder, "plain.safetensors"), Path(folder, "ensemble.safetensors")
        save_file(network.state_dict(), plain)
        for members, granularity in ((10, "weight"), (5, "kernel"), (5, "weight")):
            save(finished(network, members, granularity), path)
            bytes_each = path.stat().st_size / plain.stat().st_size
            setting = f"{subject.name}, {members} members, {granularity} granularity, float32"
            yield ratio("file / plain file", setting, [bytes_each], bars.get((members, granularity)))

        def load_plain(count: int) -> Action:
            def run() -> None:
                for _ in range(count):
                    subject.make().load_state_dict(load_file(plain))

            return run

        setting = f"{subject.name}, from the file to a network that can run"
        whole = {"load 5 members / load five plain files": lambda: load(path, subject.make)}
        yield from race(setting, load_plain(5), whole, rounds, dict.fromkeys(whole, 0.6) if bars else {})
        part = {"load 1 of 5 members / load one plain file": lambda: load(path, subject.make, members=[2])}
        yield from race(setting, load_plain(1), part, rounds)


def memory_ratio(subject: Subject, rounds: int, batch: int = 8) -> Ratio:
    """Compare the peak memory of the lean engine with that of the plain network, both beyond activations.

        print(memory_ratio(RESNET18, rounds=3))

    Each runs in a process of its own, which reports its peak resident memory during prediction. What both have in
    common (libraries, activations) cancels in the difference, which is added to one network's weights. Linux only.
    """
    weights = sum(tensor.nbytes for tensor in subject.make().state_dict().values())
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ensemble.safetensors")
        save(finished(subject.make()), path)
        for _ in range(rounds):
            plain, lean = (_in_own_process(subject.name, kind, path, batch) for kind in ("plain", "lean"))
            samples.append(1 + (lean - plain) / weights)
    return ratio("lean peak memory beyond activations / plain weights", f"{subject.name}, 5 members", samples, bar=1.45)


def _in_own_process(subject: str, kind: str, path: Path, batch: int) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (subject, kind, path, batch))


def _peak(name: str, kind: str, path: Path, batch: int) -> int:
    """Give the peak resident bytes of one prediction, after everything that made the network is gone."""
    subject = next(one for one in (RESNET18, WIDE_RESNET, TRANSFORMER) if one.name == name)
    makers: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: subject.make().eval(),
        "lean": lambda: _lean(path, subject),
    }
    for make in makers.values():  # both processes touch the same libraries before the measurement
        _predict(make(), batch)
    runs = makers[kind]()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # starts a new peak
    _predict(runs, batch)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) * 1024


def _lean(path: Path, subject: Subject) -> nn.Module:
    return cast(OrthogonalDropout, load(path, subject.make)).engine("lean")


def _predict(network: nn.Module, batch: int) -> None:
    with torch.no_grad():
        network(images(batch))
