"""The cost of all members in the owned engine, relative to ONE plain network in its faster memory format."""

import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from plures.lab.timing import harness
from plures.lab.timing.harness import RESNET18, TRANSFORMER, WIDE_RESNET, Action, LeftOut, Ratio, Subject
from plures.lab.timing.size import held, owned_memory
from plures.lab.training.distributed import resolve
from plures.native import library

# Network, granularity, members, batch and bar (AVX-512, AVX2): the bar of a CPU without either is AVX2's.
ROWS = (
    (RESNET18, "kernel", 5, 1, (2.0, 2.0)),
    (RESNET18, "kernel", 5, 16, (1.5, 1.9)),
    (RESNET18, "kernel", 5, 32, (1.5, 1.9)),
    (RESNET18, "weight", 5, 32, (2.8, 2.8)),
    (TRANSFORMER, "block", 5, 8, (2.5, 2.5)),
    (WIDE_RESNET, "kernel", 5, 8, (1.8, 1.8)),
    (RESNET18, "kernel", 5, 128, (1.5, 1.9)),
)
MEMORY_BARS = {"kernel": 1.3, "weight": 2.2}
SHORTEST = 0.5  # seconds that each side of a ratio is measured for in a round: single passes differ by a third


def owned_ratios(rounds: int = 5, threads: int | None = None) -> Iterator[Ratio | LeftOut]:
    """Measure the owned engine on every network, or say why it cannot be had.

        for ratio in owned_ratios(threads=1): print(ratio)

    With `threads=1` processor time of one thread counts, which a busy machine falsifies least.
    """
    reason = library.why_unavailable()
    if reason is not None:
        yield LeftOut("owned prediction / one plain network", "all", reason)
        return
    wide = library.load().instructions == "avx512"
    for subject, granularity, members, batch, bars in ROWS:
        yield from owned_ratio(subject, granularity, members, batch, rounds, bars[0 if wide else 1], threads)
    yield growth_ratio(RESNET18, 16, rounds, threads)
    for granularity, bar in MEMORY_BARS.items():
        yield memory_ratio(RESNET18, granularity, bar)


def owned_ratio(
    subject: Subject,
    granularity: str,
    members: int,
    batch: int,
    rounds: int,
    bar: float | None,
    threads: int | None,
    bf16: bool | None = None,
) -> Iterator[Ratio]:
    """Compare all members in the owned engine with one plain network, plain or channels last, whichever is faster.

    Where `precision="auto"` is bf16, a second ratio is to the plain network in bf16; the engine itself multiplies
    float32. `bf16` says so in the processor's place.
    """
    ensemble = harness.finished(subject.make(), members, granularity)
    plain = ensemble.checkout(0)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs, _ = harness.images(batch)
    reordered = inputs.contiguous(memory_format=torch.channels_last)
    engine = ensemble.engine("owned")
    dense: list[Action] = [lambda: plain(inputs), lambda: last(reordered)]
    half: list[Action] = [harness.prediction(plain, inputs, "bf16"), harness.prediction(last, reordered, "bf16")]
    if bf16 is None:
        bf16 = resolve("auto", inputs.device) == "bf16"
    found = list(_rounds([lambda: engine(inputs), *dense, *(half if bf16 else [])], rounds, threads))
    setting = f"{subject.name}, batch {batch}, {granularity} granularity, float32, {_about(threads)}"
    name = f"owned prediction of {members} members / one plain network"
    yield Ratio.of(name, setting, [owned / min(first, second) for owned, first, second, *_ in found], bar)
    if bf16:
        yield Ratio.of(f"{name} in bf16", setting, [one[0] / min(one[3:]) for one in found])


def growth_ratio(subject: Subject, batch: int, rounds: int, threads: int | None, bar: float = 1.25) -> Ratio:
    """Compare ten members with five, both in the owned engine: the cost should not grow with their number."""
    few, many = (harness.finished(subject.make(), members, "kernel").engine("owned") for members in (5, 10))
    inputs, _ = harness.images(batch)
    samples = [ten / five for five, ten in _rounds([lambda: few(inputs), lambda: many(inputs)], rounds, threads)]
    setting = f"{subject.name}, batch {batch}, kernel granularity, float32, {_about(threads)}"
    return Ratio.of("owned prediction of 10 members / of 5", setting, samples, bar)


def memory_ratio(subject: Subject, granularity: str, bar: float, rounds: int = 2) -> Ratio:
    """Compare what the owned engine of five members takes to predict, beyond activations, with one plain network."""
    plain = held(subject.make())
    samples = [found / plain for found in owned_memory(subject, granularity, rounds)]
    counted = "growth of resident memory at the peak of a batch of 8, less the tensors of that batch"
    setting = f"{subject.name}, 5 members, {granularity} granularity, {counted}, {_about(None)}"
    return Ratio.of("owned peak memory beyond activations / plain weights", setting, samples, bar)


def _rounds(actions: list[Action], rounds: int, threads: int | None) -> Iterator[tuple[float, ...]]:
    with torch.inference_mode(), harness.one_thread() if threads == 1 else nullcontext(time.perf_counter) as clock:
        yield from zip(*harness.timed(actions, rounds, clock=clock, shortest=SHORTEST), strict=True)


def _about(threads: int | None) -> str:
    return f"{library.load().instructions}, {threads or torch.get_num_threads()} threads"
