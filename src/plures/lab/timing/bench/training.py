"""What masks and data cost in training."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.lab.data import Augment, batches, open_data
from plures.lab.models import resnet8
from plures.lab.timing.bench.measure import Action, Ratio, race
from plures.lab.timing.bench.subjects import CLASSES, Subject, images
from plures.methods.orthogonal_dropout.masks import TopK
from plures.methods.orthogonal_dropout.method import OrthogonalDropout


def step_ratios(subject: Subject, batch: int, precision: str, rounds: int) -> Iterator[Ratio]:
    """Compare a masked and a pruning step with a step of the plain network.

    for ratio in step_ratios(RESNET18, 64, "float32", rounds=3): print(ratio)
    """
    network = subject.make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stages = OrthogonalDropout(network, 5).stages()
    rivals = {
        "masked training step / plain step": step_of(next(stages), batch, precision),
        "prune step / plain step": step_of(next(stages), batch, precision),
    }
    bars = dict(zip(rivals, (1.05, 1.20), strict=True)) if batch == 64 else {}  # a small batch pays the same for masks
    setting = f"{subject.name}, batch {batch}, {precision}"
    yield from race(setting, step_of(Plain(network), batch, precision), rivals, rounds, bars)


class Plain(nn.Module):
    """A network that returns its loss, as a stage does.

    Plain(network)(images, labels).backward()
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(self.network(inputs), targets)


def step_of(module: nn.Module, batch: int, precision: str) -> Action:
    """Make one training step of a module that returns its loss: forward, backward, SGD with momentum.

    step_of(stage, batch=64, precision="bf16")()
    """
    inputs = images(batch).to(memory_format=torch.channels_last)
    targets = torch.arange(batch) % CLASSES
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = module(inputs, targets)
        loss.backward()
        optimizer.step()

    return step


class TextbookTopK(nn.Module):
    """Edge-pop as it is usually written: every step sorts all scores.

    TextbookTopK(scores, count)(weight)
    """

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
    """Compare our mask, forward and backward, with the textbook's full sort, on the largest layer of a ResNet18.

    for ratio in mask_ratios(rounds=5): print(ratio)
    """
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
    setting = "2.4 M scores, forward and backward"
    for found in race(setting, textbook, {"our mask / full sort of the textbook": ours}, rounds):
        yield Ratio(found.name, setting, found.value, found.low, found.high, bar=0.1)


def data_ratios(rounds: int, steps: int = 20) -> Iterator[Ratio]:
    """Compare training on batches from the pipeline with training on one batch that lies ready.

        for ratio in data_ratios(rounds=3): print(ratio)

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
    rivals: dict[str, Action] = {"training from the data pipeline / on one ready batch": lambda: train(pipeline())}
    bars = dict.fromkeys(rivals, 1.10)
    setting = f"digits, ResNet8, batch 64, {steps} steps"
    yield from race(setting, lambda: train(iter([ready] * steps)), rivals, rounds, bars)
