"""The time of training steps and predictions, relative to plain networks."""

import copy
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import (
    DTYPES,
    RESNET18,
    Ratio,
    Subject,
    finished,
    first_step,
    prediction,
    race,
    reordered,
    training_step,
)
from plures.ensemble import Ensemble
from plures.exporting.exported import export
from plures.fitting import lay_out
from plures.lab.costs import Action, file_size, timed
from plures.lab.data import Augment, batches, open_data
from plures.lab.method_names import METHOD_NAMES, method_class, takes
from plures.lab.models import resnet8
from plures.lab.training.loop import resolve
from plures.methods.batch_ensemble import BatchEnsemble
from plures.methods.deterministic import Deterministic
from plures.methods.orthogonal_dropout.masks import TopK
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.methods.packed_ensemble import PackedEnsemble

MEMBERS = 5
LONG_ENOUGH = 0.3  # seconds that each side of an engine's ratio is measured for: single passes differ by a third


def precision_here() -> str:
    """Return the precision that training uses on this machine: bf16 only on processors with tiles for it."""
    return "bf16" if resolve("auto", torch.device("cpu")) == "bf16" else "float32"


# Training


def step_ratios(subject: Subject, batch: int, rounds: int) -> Iterator[Ratio]:
    """Compare the steps of the first member's three stages with a step of the plain network."""
    network, precision = subject.make(), precision_here()
    rivals, bars = {}, {}
    targets = {"masked training": 1.05, "prune": 1.20, "finetuning": 1.05}
    # A stage is committed, untrained, when the next one is asked for.
    for (name, bar), stage in zip(targets.items(), OrthogonalDropout(network, MEMBERS).stages(), strict=False):
        inputs, labels = subject.batch(batch)
        skips_zeros = lay_out(stage, batch, inputs.device, mixed=precision in DTYPES)
        rival = f"{name} step / plain step"
        rivals[rival] = training_step(stage, inputs, labels, precision)
        if batch == 64:  # masks cost a small batch as much as a large one
            bars[rival] = 0.6 if skips_zeros else bar
    plain = first_step(Deterministic(network), subject, batch, precision)
    yield from race(f"{subject.name}, batch {batch}, {precision}", plain, rivals, rounds, bars)


def together_ratios(subject: Subject, batch: int, rounds: int, bar: float) -> Iterator[Ratio]:
    """Compare a step that trains all members together with a step of the plain network."""
    with threads(1 if len(subject.shape) == 1 else None):
        together = first_step(OrthogonalDropout(subject.make(), MEMBERS, schedule="together"), subject, batch, "no")
        plain = first_step(Deterministic(subject.make()), subject, batch, "no")
        name = f"step of {MEMBERS} members together / plain step"
        setting = f"{subject.name}, batch {batch}, float32, {threads_here()}"
        yield from race(setting, plain, {name: together}, rounds, {name: bar})


class TextbookTopK(nn.Module):
    """Edge-popup as it is usually written: every step sorts all scores."""

    def __init__(self, scores: Tensor, count: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores.clone())
        self.count = count

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight with the highest scores."""
        ranked = self.scores.abs()
        order = ranked.detach().flatten().sort(descending=True).indices
        hard = torch.zeros_like(ranked).flatten()
        hard[order[: self.count]] = 1.0
        return weight * (hard.reshape(weight.shape) + (ranked - ranked.detach()))


def mask_ratios(rounds: int) -> Iterator[Ratio]:
    """Compare our mask with the textbook's full sort, on the largest layer of a ResNet18."""
    weight = torch.randn(512, 512, 3, 3, generator=torch.Generator().manual_seed(0))
    count = weight.numel() // MEMBERS
    masks = TopK(weight, torch.ones_like(weight, dtype=torch.bool), count), TextbookTopK(weight, count)
    gradient = torch.ones_like(weight)

    def there_and_back(mask: nn.Module) -> Action:
        def run() -> None:
            mask.zero_grad()
            mask(weight).backward(gradient)

        return run

    ours, textbook = map(there_and_back, masks)
    name = "our mask / full sort of the textbook"
    yield from race("2.4 M scores, forward and backward", textbook, {name: ours}, rounds, {name: 0.1})


def data_ratios(rounds: int, steps: int = 20) -> Iterator[Ratio]:
    """Compare training on batches from the pipeline with training on one batch that is ready.

    The images are the digits of scikit-learn: their small network leaves the pipeline the least time to hide in.
    """
    data = open_data("digits")
    network = resnet8(classes=10, channels=1, width=16)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def train(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
        for _, (inputs, targets) in zip(range(steps), pairs, strict=False):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()

    def pipeline() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(batches(data.train, 64, seed=0, epoch=0, augment=Augment(crop=1), shuffle=True))

    ready = next(pipeline())
    name = "training from the data pipeline / on one ready batch"
    setting = f"digits, ResNet8, batch 64, {steps} steps"
    rivals: dict[str, Action] = {name: lambda: train(pipeline())}
    yield from race(setting, lambda: train(iter([ready] * steps)), rivals, rounds, {name: 1.10})


def bf16_ratios(subject: Subject, batch: int, rounds: int) -> Iterator[Ratio]:
    """Compare the plain network in bf16 with float32: training steps, and prediction of one image."""
    single, network = Deterministic(subject.make()), subject.make().eval()
    steps = (first_step(single, subject, batch, precision) for precision in ("float32", "bf16"))
    passes = (prediction(network, subject.batch(1)[0], precision) for precision in ("float32", "bf16"))
    for what, count, (float32, bf16) in (("training step", batch, steps), ("prediction", 1, passes)):
        name = f"plain {what} in bf16 / in float32"
        yield from race(f"{subject.name}, batch {count}", float32, {name: bf16}, rounds)


# Prediction


def prediction_ratios(subject: Subject, batch: int, rounds: int) -> Iterator[Ratio]:
    """Compare the unfolded engine and the ensemble's own forward with five plain networks in a row."""
    ensemble = finished(subject.make(), MEMBERS)
    networks = [ensemble.checkout(member) for member in range(MEMBERS)]
    inputs, _ = subject.batch(batch)
    unfolded, own = (
        f"{name} / {MEMBERS} plain networks" for name in ("unfolded prediction", "the ensemble's own forward")
    )
    rivals = {unfolded: prediction(ensemble.engine("unfolded"), inputs), own: prediction(ensemble, inputs)}
    plain = prediction(lambda x: [network(x) for network in networks], inputs)
    bars = {unfolded: 0.95} if batch == 128 else {}
    yield from race(f"{subject.name}, batch {batch}, float32", plain, rivals, rounds, bars)


def owned_ratios(
    subject: Subject,
    granularity: str,
    batch: int,
    rounds: int,
    bar: float,
    *,
    on_threads: int | None = None,
    peers: Sequence[str] = (),
    bf16: bool | None = None,
) -> Iterator[Ratio]:
    """Compare five members in the engine that `engine()` chooses with ONE plain network, in its faster memory format.

    `peers`, see `peer`, are compared with the same network in the same rounds. On processors with tiles for bf16 there
    is a ratio to the plain network in bf16, too (`bf16` overrides what the processor says); the engine computes in
    float32.
    """
    with threads(on_threads):
        ensemble = finished(subject.make(), MEMBERS, granularity)
        plain, engine = ensemble.checkout(0), ensemble.engine()
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        inputs, _ = subject.batch(batch)
        other = reordered(inputs)
        actions: list[Action] = [lambda: engine(inputs), lambda: plain(inputs), lambda: last(other)]
        actions += [peer(name, ensemble, subject, inputs) for name in peers]
        bf16 = precision_here() == "bf16" if bf16 is None else bf16
        if bf16:
            actions += [prediction(plain, inputs, "bf16"), prediction(last, other, "bf16")]
        for few in (2, 3):  # which are compared with the members
            engine(inputs[:1].repeat(few, *[1] * (inputs.dim() - 1)))
        found = _rounds(actions, rounds)
        kind = engine.about.split(" ")[0].rstrip(",")
        name = f"{kind} prediction of {MEMBERS} members / one plain network"
        setting = f"{subject.name}, batch {batch}, {granularity} granularity, float32, {threads_here()}"
        yield Ratio.of(name, setting, [ours / min(first, second) for ours, first, second, *_ in found], bar)
        for place, one in enumerate(peers, 3):
            yield Ratio.of(f"{one} / one plain network", setting, [times[place] / min(times[1:3]) for times in found])
        if bf16:
            yield Ratio.of(f"{name} in bf16", setting, [times[0] / min(times[-2:]) for times in found])


FIVE_NETWORKS, UNFOLDED, COMPILED = "five plain networks", "unfolded engine", "torch.compile of the unfolded engine"
ONNX, PACKED, BATCH = "onnxruntime, exported file", "PackedEnsemble (ours)", "BatchEnsemble (ours)"


def peer(name: str, ensemble: OrthogonalDropout, subject: Subject, inputs: Tensor) -> Action:
    """Return how another way to five members predicts."""
    if name == FIVE_NETWORKS:
        networks = [ensemble.checkout(member) for member in range(MEMBERS)]
        return lambda: [network(inputs) for network in networks]
    if name == ONNX:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ensemble.onnx")
            export(ensemble, path, inputs[:1])
            session = onnxruntime.InferenceSession(path.read_bytes(), options)
        given = {"inputs": inputs.numpy()}
        return lambda: session.run(None, given)
    if name in (PACKED, BATCH):
        method: Any = PackedEnsemble if name == PACKED else BatchEnsemble
        other = method(subject.make(), members=MEMBERS)
        for _ in other.stages():
            pass
        return lambda: other(inputs)
    engine = ensemble.engine("unfolded")
    for few in (2, 3):
        engine(inputs[:1].repeat(few, *[1] * (inputs.dim() - 1)))
    run: Any = torch.compile(engine) if name == COMPILED else engine
    return lambda: run(inputs)


def growth_ratios(subject: Subject, batch: int, rounds: int) -> Iterator[Ratio]:
    """Compare ten members with five, both in the owned engine: the cost should not grow with their number."""
    few, many = (finished(subject.make(), members, "kernel").engine("owned") for members in (5, 10))
    inputs, _ = subject.batch(batch)
    samples = [ten / five for five, ten in _rounds([lambda: few(inputs), lambda: many(inputs)], rounds)]
    setting = f"{subject.name}, batch {batch}, kernel granularity, float32, {threads_here()}"
    yield Ratio.of("owned prediction of 10 members / of 5", setting, samples, bar=1.15)


def _rounds(actions: list[Action], rounds: int) -> list[tuple[float, ...]]:
    with torch.inference_mode():
        return list(zip(*timed(actions, rounds, clock=time.perf_counter, shortest=LONG_ENOUGH), strict=True))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many threads; as many as before if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_here() -> str:
    """Return how many threads are in use, in words."""
    return "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"


# Methods


@dataclass(frozen=True)
class MethodCost:
    """One row of the table of methods: everything relative to the plain network."""

    method: str
    members: int
    parameters: float
    file: float
    step: float
    prediction: float

    def __str__(self) -> str:
        return f"{self.method}: step {self.step:.2f}, prediction {self.prediction:.2f}, file {self.file:.2f}"


def method_costs(batch: int, rounds: int, subject: Subject = RESNET18) -> Iterator[MethodCost]:
    """Measure every method with five members (MC dropout: 30 passes).

    A step is one batch of the first stage: of one member if they train one after the other, else of all. Prediction
    is of one batch by the ensemble's own forward.
    """
    precision, network = precision_here(), subject.make()
    single = Deterministic(network)
    plain_step, plain_size = first_step(single, subject, batch, precision), file_size(single)
    inputs, _ = subject.batch(batch)
    for word, name in METHOD_NAMES.items():
        method: Any = method_class(word)
        ensemble: Ensemble = method(network, **({"members": MEMBERS} if takes(method, "members") else {}))
        (step,) = race(name, plain_step, {"": first_step(ensemble, subject, batch, precision)}, rounds)
        for _ in ensemble.stages():
            pass
        plain, ours = (prediction(one.eval(), inputs, precision) for one in (network, ensemble))
        (predicted,) = race(name, plain, {"": ours}, rounds)
        yield MethodCost(
            name,
            len(ensemble(inputs[:2])),
            _parameters(ensemble) / sum(parameter.numel() for parameter in network.parameters()),
            file_size(ensemble) / plain_size,
            step.value,
            predicted.value,
        )


def _parameters(ensemble: Ensemble) -> int:
    """Count the floating numbers that a file contains, without statistics."""
    statistics = {name for name, _ in ensemble.named_buffers()}
    return sum(
        tensor.numel()
        for name, tensor in ensemble.tensors().items()
        if tensor.is_floating_point() and name not in statistics and "running_" not in name
    )
