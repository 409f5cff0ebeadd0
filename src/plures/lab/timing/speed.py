"""The time of training steps and predictions, relative to plain networks."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from plures.lab.data import Augment, batches, open_data
from plures.lab.models import resnet8
from plures.lab.timing import harness
from plures.lab.timing.harness import Action, LeftOut, Ratio, Subject
from plures.lab.training.loop import lay_out
from plures.methods.deterministic import Deterministic
from plures.methods.orthogonal_dropout.masks import TopK
from plures.methods.orthogonal_dropout.method import OrthogonalDropout

MEMBERS = 5
FEW_SECONDS = 5.0  # a pass of as many plain networks that takes longer is compared with the engines alone, and once
LONGEST_PASS = 10.0  # one that takes longer is left out


# Training


def step_ratios(subject: Subject, batch: int, precision: str, rounds: int) -> Iterator[Ratio]:
    """Compare the steps of the first member's three stages with a step of the plain network."""
    network = subject.make()
    rivals, bars = {}, {}
    targets = {"masked training": 1.05, "prune": 1.20, "finetuning": 1.05}
    # A stage is committed, untrained, when the next one is asked for.
    for (name, bar), stage in zip(targets.items(), OrthogonalDropout(network, 5).stages(), strict=False):
        inputs, labels = harness.images(batch)
        skips_zeros = lay_out(stage, batch, inputs.device, mixed=precision in harness.DTYPES)
        rival = f"{name} step / plain step"
        rivals[rival] = harness.training_step(stage, inputs, labels, precision)
        if batch == 64:  # a small batch pays the same for masks
            bars[rival] = 0.6 if skips_zeros else bar
    plain = harness.first_step(Deterministic(network), batch, precision)
    yield from harness.race(f"{subject.name}, batch {batch}, {precision}", plain, rivals, rounds, bars)


class TextbookTopK(nn.Module):
    """Edge-pop as it is usually written: every step sorts all scores."""

    def __init__(self, scores: Tensor, count: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores.clone())
        self.count = count

    def forward(self, weight: Tensor) -> Tensor:
        """Mask the weight with the scores that rank highest."""
        ranked = self.scores.abs()
        order = ranked.detach().flatten().sort(descending=True).indices
        hard = torch.zeros_like(ranked).flatten()
        hard[order[: self.count]] = 1.0
        return weight * (hard.reshape(weight.shape) + (ranked - ranked.detach()))


def mask_ratios(rounds: int) -> Iterator[Ratio]:
    """Compare our mask, forward and backward, with the textbook's full sort, on the largest layer of a ResNet18."""
    shape = (512, 512, 3, 3)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    count = weight.numel() // 5
    masks = TopK(weight, torch.ones(shape, dtype=torch.bool), count), TextbookTopK(weight, count)
    gradient = torch.ones_like(weight)

    def there_and_back(mask: nn.Module) -> Action:
        def run() -> None:
            mask.zero_grad()
            mask(weight).backward(gradient)

        return run

    ours, textbook = map(there_and_back, masks)
    name = "our mask / full sort of the textbook"
    yield from harness.race("2.4 M scores, forward and backward", textbook, {name: ours}, rounds, {name: 0.1})


def data_ratios(rounds: int, steps: int = 20) -> Iterator[Ratio]:
    """Compare training on batches from the pipeline with training on one batch that lies ready.

    The images are the digits of scikit-learn, whose small network leaves the pipeline the least time to hide in.
    """
    data = open_data("digits")
    augment = Augment(crop=1)
    network = resnet8(classes=10, channels=1, width=16)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def train(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
        for _, (inputs, targets) in zip(range(steps), pairs, strict=False):
            optimizer.zero_grad()
            loss: Tensor = F.cross_entropy(network(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def pipeline() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(batches(data.train, 64, seed=0, epoch=0, augment=augment, shuffle=True))

    ready = next(pipeline())
    name = "training from the data pipeline / on one ready batch"
    setting = f"digits, ResNet8, batch 64, {steps} steps"
    rivals: dict[str, Action] = {name: lambda: train(pipeline())}
    yield from harness.race(setting, lambda: train(iter([ready] * steps)), rivals, rounds, {name: 1.10})


# Prediction


def prediction_ratios(
    subject: Subject, batch: int, precision: str, rounds: int, *, engines_only: bool = False
) -> Iterator[Ratio]:
    """Compare the engines, the ensemble's own forward and vmap with five plain networks run one after the other.

    With `engines_only` the two engines alone, without a run to warm up: for passes of some seconds.
    """
    ensemble = harness.finished(subject.make(), MEMBERS)
    networks = [ensemble.checkout(member) for member in range(MEMBERS)]
    inputs, _ = harness.images(batch)
    unfolded, lean = ensemble.engine("unfolded"), ensemble.engine("lean")
    rivals: dict[str, Callable[[Tensor], Any]] = {"unfolded prediction": unfolded, "lean prediction": lean}
    if not engines_only:
        rivals |= {"the ensemble's own forward": ensemble, "vmap over stacked members": stacked(networks)}
    setting = f"{subject.name}, batch {batch}, {precision}"
    bars = {"unfolded prediction": 0.95, "lean prediction": 1.10} if batch == 128 else {}
    suffix = f" / {MEMBERS} plain networks"
    named = {name + suffix: harness.prediction(rival, inputs, precision) for name, rival in rivals.items()}
    bars = {name + suffix: bar for name, bar in bars.items()}
    plain = harness.prediction(lambda x: [network(x) for network in networks], inputs, precision)
    yield from harness.race(setting, plain, named, rounds, bars, warm_up=not engines_only)


def affordable_ratios(subject: Subject, sizes: Sequence[int], precision: str, rounds: int) -> Iterator[Ratio | LeftOut]:
    """Compare predictions at each of the batch sizes that a large network gets through in reasonable time.

    What a pass of five plain networks will take is computed from one image. Up to 32 images it may take ten seconds,
    above that a few.
    """
    one_image = harness.prediction(subject.make().eval(), harness.images(1)[0], precision)
    per_image = MEMBERS * min(harness.timed([one_image], rounds=3)[0])
    for batch in sizes:
        expected = per_image * batch
        longest = LONGEST_PASS if batch <= 32 else FEW_SECONDS
        if expected > longest:
            why = f"a pass of {MEMBERS} plain networks would take {expected:.0f} s, more than {longest:.0f} s"
            yield LeftOut(f"prediction / {MEMBERS} plain networks", f"{subject.name}, batch {batch}, {precision}", why)
            continue
        slow = expected > FEW_SECONDS
        passes = 1 if slow else rounds
        yield from prediction_ratios(subject, batch, precision, passes, engines_only=slow)


def bf16_ratios(subject: Subject, batch: int, rounds: int) -> Iterator[Ratio]:
    """Compare the plain network in bf16 with float32: training steps, and prediction of one image."""
    single = Deterministic(subject.make())
    float32, bf16 = (harness.first_step(single, batch, precision) for precision in ("float32", "bf16"))
    rivals = {"plain training step in bf16 / in float32": bf16}
    yield from harness.race(f"{subject.name}, batch {batch}", float32, rivals, rounds)
    network = subject.make().eval()
    float32, bf16 = (harness.prediction(network, harness.images(1)[0], precision) for precision in ("float32", "bf16"))
    rivals = {"plain prediction in bf16 / in float32": bf16}
    yield from harness.race(f"{subject.name}, batch 1", float32, rivals, rounds)


def stacked(networks: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Run all networks at once by vmap over their stacked parameters."""
    parameters, buffers = stack_module_state(networks)
    skeleton = copy.deepcopy(networks[0]).to("meta")

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        result: Tensor = functional_call(skeleton, (parameters, buffers), (inputs,))
        return result

    every = vmap(one, in_dims=(0, 0, None))

    def run(inputs: Tensor) -> Tensor:
        result: Tensor = every(parameters, buffers, inputs)
        return result

    return run
