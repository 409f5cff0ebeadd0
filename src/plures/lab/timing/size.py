"""Bytes on disk and in memory, and the time to load them."""

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from plures.lab.timing.harness import RESNET18, TRANSFORMER, WIDE_RESNET, Action, Ratio, Subject, finished, images, race
from plures.methods.orthogonal_dropout.method import Kind, OrthogonalDropout
from plures.storage import load, save

Measured = TypeVar("Measured")


def file_ratios(subject: Subject, rounds: int) -> Iterator[Ratio]:
    """Compare an ensemble's file with the plain network's, and the time to load it."""
    network = subject.make()
    bars = {(5, "weight"): 1.085, (10, "weight"): 1.13, (5, "kernel"): 1.025} if subject.name == "ResNet18" else {}
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder, "plain.safetensors"), Path(folder, "ensemble.safetensors")
        save_file(network.state_dict(), plain)
        for members, granularity in ((10, "weight"), (5, "kernel"), (5, "weight")):
            save(finished(network, members, granularity), path)
            bytes_each = path.stat().st_size / plain.stat().st_size
            setting = f"{subject.name}, {members} members, {granularity} granularity, float32"
            yield Ratio.of("file / plain file", setting, [bytes_each], bars.get((members, granularity)))

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


def memory_ratios(subject: Subject, rounds: int, batch: int = 8, *, all_resident: bool = True) -> Iterator[Ratio]:
    """Compare the memory that engines and separate networks take to predict, beyond activations, with one network.

        for ratio in memory_ratios(RESNET18, rounds=3): print(ratio)

    Counted twice: by torch's allocator, which knows every tensor but not what numpy and the convolutions use besides,
    and by the peak resident memory of a process of its own, on Linux. What a plain network needs to predict is taken
    off, as activations, and its weights are put back. Without `all_resident` the second is for the lean engine alone:
    every process must load its libraries and make its networks.
    """
    weights = held(subject.make())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ensemble.safetensors")
        save(finished(subject.make()), path)
        for counted, measure in (("by the allocator", _allocated), ("resident", _resident_elsewhere)):
            if measure is _resident_elsewhere and not CLEAR_REFS.exists():
                continue
            plain = [measure(subject, "plain", path, batch) for _ in range(rounds)]
            for kind, times, bar in (("lean", rounds, 1.45), ("unfolded", 1, None), ("5 separate networks", 1, None)):
                if kind != "lean" and measure is _resident_elsewhere and not all_resident:
                    continue
                found = [measure(subject, kind, path, batch) for _ in range(times)]
                samples = [1 + (other - one) / weights for other, one in zip(found, plain, strict=False)]
                name = f"{kind} peak memory beyond activations / plain weights"
                yield Ratio.of(name, f"{subject.name}, 5 members, {counted}", samples, bar)


def held(network: nn.Module) -> int:
    """Count the bytes of a network's tensors, each once.

    >>> held(nn.Linear(3, 2))
    32
    """
    found = {tensor.data_ptr(): tensor.nbytes for tensor in [*network.parameters(), *network.buffers()]}
    return sum(found.values())


def allocator_peak(action: Action, device: torch.device) -> int:
    """Give the most bytes that torch held at once of what an action allocated."""
    if device.type != "cpu":
        counters = torch.get_device_module(device)
        counters.reset_peak_memory_stats(device)
        before: int = counters.memory_allocated(device)
        action()
        peak: int = counters.max_memory_allocated(device)
        return peak - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), int(event.nbytes())) for event in events if event.name() == "[memory]")
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))


def _allocated(subject: Subject, kind: str, path: Path, batch: int) -> int:
    """Count the tensors of a network and, at the peak, of one prediction."""
    network = MAKERS[kind](subject, path)
    _predict(network, batch)  # what happens only once does not count
    return held(network) + allocator_peak(lambda: _predict(network, batch), next(network.parameters()).device)


def owned_memory(subject: Subject, granularity: str, rounds: int, batch: int = 8) -> list[int]:
    """Measure the bytes that the owned engine of five members takes to predict, beyond activations.

        [found / held(resnet18()) for found in owned_memory(RESNET18, "kernel", rounds=3)]

    On Linux: by how much the resident memory of a process of its own has grown at the peak of one batch, since before
    the ensemble was loaded and its engine made, less the most that the tensors of this batch took at once. So weights,
    lists and the kernels' scratch count. Elsewhere: the tensors that the engine holds.
    """
    ensemble = finished(subject.make(), 5, granularity)
    if not CLEAR_REFS.exists():
        return [held(ensemble.engine("owned"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ensemble.safetensors")
        save(ensemble, path)
        return _elsewhere(_owned_growth, subject.name, path, batch, rounds)


def _owned_growth(name: str, path: Path, batch: int, rounds: int) -> list[int]:
    found = []
    for _ in range(rounds + 1):  # the first touches what is touched only once
        _give_back()
        before = _resident_bytes("VmRSS")
        engine = MAKERS["owned"](_subject(name), path)
        peak = _peak(engine, batch)
        activations = allocator_peak(lambda engine=engine: _predict(engine, batch), torch.device("cpu"))  # type: ignore[misc]
        found.append(peak - before - activations)
        del engine
    return found[1:]


def _resident_elsewhere(subject: Subject, kind: str, path: Path, batch: int) -> int:
    return _elsewhere(_resident, subject.name, kind, path, batch)


def _elsewhere(measure: Callable[..., Measured], *arguments: object) -> Measured:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def _resident(name: str, kind: str, path: Path, batch: int) -> int:
    """Give the peak resident bytes of one prediction, after everything that made the network is gone."""
    subject = _subject(name)
    _give_back()
    for warm in ("plain", "lean"):  # every process touches the same libraries before the measurement
        _predict(MAKERS[warm](subject, path), batch)
    return _peak(MAKERS[kind](subject, path), batch)


def _subject(name: str) -> Subject:
    return next(one for one in (RESNET18, WIDE_RESNET, TRANSFORMER) if one.name == name)


def _give_back() -> None:
    """Give the system what was freed, now and as soon as it is; or some stays with the process, more or less."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 2**16)
    gc.collect()
    libc.malloc_trim(0)


def _peak(network: nn.Module, batch: int) -> int:
    """Give the peak resident bytes of one prediction."""
    _give_back()
    CLEAR_REFS.write_text("5")  # starts a new peak
    _predict(network, batch)
    return _resident_bytes("VmHWM")


def _resident_bytes(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status[field].split()[0]) * 1024


class Separate(nn.Module):
    """Several networks of their own, run one after the other."""

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of all networks, [networks, batch, classes]."""
        return torch.stack([network(inputs) for network in self.networks])


def _engine(kind: Kind) -> Callable[[Subject, Path], nn.Module]:
    return lambda subject, path: cast(OrthogonalDropout, load(path, subject.make)).engine(kind)


MAKERS: dict[str, Callable[[Subject, Path], nn.Module]] = {
    "plain": lambda subject, _: subject.make().eval(),
    "lean": _engine("lean"),
    "unfolded": _engine("unfolded"),
    "owned": _engine("owned"),
    "5 separate networks": lambda subject, _: Separate(subject.make() for _ in range(5)).eval(),
}
MMAP_THRESHOLD = -3  # of mallopt: blocks that are larger are given back to the system as soon as they are freed
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux alone has it


def _predict(network: nn.Module, batch: int) -> None:
    with torch.no_grad():
        network(images(batch)[0])
