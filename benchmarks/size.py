"""Bytes on disk and in memory, and the time to load them."""

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import RESNET18, Ratio, Subject, finished, race
from benchmarks.speed import MEMBERS, threads_here
from plures.lab.costs import Action
from plures.storage import load, save

MEMORY_BARS = {"kernel": 1.3, "weight": 2.2}
MMAP_THRESHOLD = -3  # of mallopt: larger blocks are returned to the system as soon as they are freed
CLEAR_REFS = Path("/proc/self/clear_refs")  # only Linux has it


def file_ratios(subject: Subject, rounds: int) -> Iterator[Ratio]:
    """Compare an ensemble's file with the plain network's, and the time to load it."""
    network = subject.make()
    bars = {(5, "weight"): 1.085, (10, "weight"): 1.13, (5, "kernel"): 1.025} if subject is RESNET18 else {}
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder, "plain.safetensors"), Path(folder, "ensemble.safetensors")
        save_file(network.state_dict(), plain)
        for members, granularity in ((10, "weight"), (5, "kernel"), (5, "weight")):
            save(finished(network, members, granularity), path)
            size = path.stat().st_size / plain.stat().st_size
            setting = f"{subject.name}, {members} members, {granularity} granularity, float32"
            yield Ratio.of("file / plain file", setting, [size], bars.get((members, granularity)))

        def load_plain(count: int) -> Action:
            def run() -> None:
                for _ in range(count):
                    subject.make().load_state_dict(load_file(plain))

            return run

        setting = f"{subject.name}, from the file to a network that can run"
        whole = {"load 5 members / load five plain files": lambda: load(path, subject.make)}
        yield from race(setting, load_plain(5), whole, rounds, dict.fromkeys(whole, 0.5 if bars else 1.0))


def memory_ratios(granularity: str, rounds: int = 2, batch: int = 8) -> Iterator[Ratio]:
    """Compare the memory in which the owned engine of a ResNet18 predicts, beyond activations, with one network.

    This is the growth of the resident memory of a process of its own, from before the ensemble is loaded to the peak
    of one batch, less the largest total size of this batch's tensors. So weights, lists and the scratch memory of the
    kernels count. Only Linux tells it.
    """
    if not CLEAR_REFS.exists():
        return
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        path = Path(folder, "ensemble.safetensors")
        save(finished(RESNET18.make(), MEMBERS, granularity), path)
        grown = pool.apply(owned_growth, (path, batch, rounds))
    plain = held(RESNET18.make())
    counted = f"growth of resident memory at the peak of a batch of {batch}, less the tensors of that batch"
    setting = f"{RESNET18.name}, {MEMBERS} members, {granularity} granularity, {counted}, {threads_here()}"
    name = "owned peak memory beyond activations / plain weights"
    yield Ratio.of(name, setting, [one / plain for one in grown], MEMORY_BARS[granularity])


def owned_growth(path: Path, batch: int, rounds: int) -> list[int]:
    """Return by how many bytes this process grows when it loads an ensemble and predicts with its owned engine."""
    return resident_growth(lambda: load(path, RESNET18.make).engine("owned"), batch, rounds)


def resident_growth(make: Callable[[], nn.Module], batch: int, rounds: int) -> list[int]:
    """Return by how many bytes this process grows when it makes a network and predicts, less the activations."""
    found = []
    for _ in range(rounds + 1):  # the first one touches what is touched only once
        _return_memory()
        before = _resident_bytes("VmRSS")
        network = make()
        for few in (2, 3):  # an engine compares two batches with the members, and then lets these go
            _predict(network, few)
        _return_memory()
        CLEAR_REFS.write_text("5")  # starts a new peak
        _predict(network, batch)
        peak = _resident_bytes("VmHWM")
        found.append(peak - before - allocator_peak(lambda network=network: _predict(network, batch)))
        del network
    return found[1:]


def held(network: nn.Module) -> int:
    """Return the bytes of a network's tensors, each counted once."""
    return sum({one.data_ptr(): one.nbytes for one in [*network.parameters(), *network.buffers()]}.values())


def allocator_peak(action: Action) -> int:
    """Return the largest total size of the tensors that an action allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), int(event.nbytes())) for event in events if event.name() == "[memory]")
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))


def _return_memory() -> None:
    """Return freed memory to the system, now and as soon as it is freed: otherwise the process keeps some of it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 2**16)
    gc.collect()
    libc.malloc_trim(0)


def _resident_bytes(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status[field].split()[0]) * 1024


def _predict(network: nn.Module, batch: int) -> None:
    with torch.no_grad():
        network(RESNET18.batch(batch)[0])
