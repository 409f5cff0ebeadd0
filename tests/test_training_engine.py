"""Training over the kernels that a mask keeps: the same loss, gradients and statistics as the network itself gives."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import plures
from networks import ALL, CLASSES, images, labels, reproducible
from plures.lab.models import build, resnet18
from plures.methods.orthogonal_dropout.masks import mask_of
from plures.methods.orthogonal_dropout.training_engine import TrainingEngine, _tell
from plures.native import library
from plures.native.rows import LinearLayer, linear
from plures.native.training import Convolved, Memory, Normed, blocked, kernels_of, run_layers, unblocked
from plures.stage import Stage

pytestmark = pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
BATCH = 32  # fills the vectors of every level


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agrees(found: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    assert found.shape == expected.shape
    scale = expected.abs().max().clamp(min=1.0)
    assert float((found - expected).abs().max() / scale) < within


def normed(x: Tensor, layer: nn.BatchNorm2d, shortcut: Tensor | None = None, relu: bool = False) -> Tensor:
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    rows = [getattr(layer, name)[None] for name in names]
    return run_layers(x, None, Normed(*rows, layer.momentum, layer.eps), shortcut, relu)


# The functions


@pytest.mark.parametrize(("side", "stride", "biased", "threads"), [(8, 1, False, 1), (8, 2, True, 3), (2, 1, True, 1)])
def test_a_norm_layer_after_a_convolution_gives_the_bits_of_both_alone(side, stride, biased, threads):
    members, channels, memory = 3, 6, Memory()
    random = torch.Generator().manual_seed(0)
    mine = torch.rand(members, channels, channels, generator=random) < 0.4
    lanes = library.load().lanes
    shapes = [(members, 5, channels, side, side, lanes), (channels, channels, 3, 3), *[(members, channels)] * 3]
    results = []
    for together in (False, True, True):  # the last one in memory that was used before
        leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for shape in shapes]
        x, weight, scale, shift, bias = leaves
        layer = Convolved(weight, bias if biased else None, kernels_of(mine), (stride, stride), (1, 1))
        statistics = torch.zeros(members, channels), torch.ones(members, channels), torch.zeros(members)
        shortcut = torch.ones(layer.shape(x))
        options = {"relu": True, "memory": memory if together else None}
        with with_threads(threads if together else 1):
            given = (x, layer) if together else (run_layers(x, layer), None)
            y = run_layers(*given, Normed(scale, shift, *statistics, 0.1, 1e-5), shortcut, **options)
            y.square().sum().backward()
        results.append([y.detach().clone(), *statistics, *(one.grad for one in leaves if one.grad is not None)])
        del y
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 11), st.integers(1, 11)),
    kernel=st.sampled_from([(1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (2, 2), (1, 3)]),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    blocks=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_a_masked_convolution_and_its_gradients_are_torchs_own(
    sizes, kernel, stride, padding, blocks, share, biased, threads, seed
):
    outputs, inputs, *sides = sizes
    height, width = (max(side, k - 2 * p) for side, k, p in zip(sides, kernel, padding, strict=True))
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(outputs, inputs, generator=random) < share
    weight = torch.randn(outputs, inputs, *kernel, generator=random) * mask[:, :, None, None]
    x = torch.randn(blocks * library.load().lanes, inputs, height, width, generator=random)
    bias = torch.randn(outputs, generator=random) if biased else None
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    expected = F.conv2d(x, weight, bias, stride, padding)
    gradient = torch.randn(expected.shape, generator=random)
    to_x, to_weight, *rest = torch.autograd.grad(expected, leaves, gradient)
    with with_threads(threads):
        own = None if bias is None else bias[None]
        found = unblocked(run_layers(blocked(x), Convolved(weight, own, kernels_of(mask[None]), stride, padding)))
        gradients = torch.autograd.grad(found, leaves, gradient)
    agrees(found.detach(), expected.detach())
    for one, other in zip(gradients, [to_x, to_weight * mask[:, :, None, None], *rest], strict=True):
        agrees(one, other, within=1e-4 if one.dim() == 1 else 1e-5)  # torch rounds its sum for the bias, too


@given(
    members=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 80), st.integers(1, 9), st.integers(1, 9)),
    kernel=st.sampled_from([(1, 1), (3, 3), (3, 3), (2, 2), (1, 3)]),
    stride=st.integers(1, 2),
    shared=st.booleans(),
    private=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_members_convolve_at_once_as_each_would_alone(members, sizes, kernel, stride, shared, private, seed):
    outputs, inputs, *sides = sizes
    height, width = map(max, sides, kernel)
    random = torch.Generator().manual_seed(seed)
    owners = torch.randint(0, members, (outputs, inputs), generator=random)
    mine = owners == torch.arange(members)[:, None, None]
    mine = torch.ones_like(mine) if private else mine
    stack = [members] if private else []
    weight = torch.randn(*stack, outputs, inputs, *kernel, generator=random, requires_grad=True)
    bias = torch.randn(members, outputs, generator=random, requires_grad=True)
    images = (1 if shared else members) * library.load().lanes
    x = torch.randn(images, inputs, height, width, generator=random, requires_grad=True)
    expected = torch.cat(
        [
            F.conv2d(part, (weight[i] if private else weight) * mine[i][:, :, None, None], bias[i], stride, 1)
            for i, part in enumerate([x] * members if shared else x.chunk(members))
        ]
    )
    gradient = torch.randn(expected.shape, generator=random)
    given_blocked = blocked(x, 1 if shared else members)
    layer = Convolved(weight, bias, kernels_of(mine, private), (stride, stride), (1, 1))
    found = unblocked(run_layers(given_blocked, layer))
    agrees(found.detach(), expected.detach())
    for one, other in zip(
        *(torch.autograd.grad(y, (x, weight, bias), gradient) for y in (found, expected)), strict=True
    ):
        agrees(one, other)


@given(
    members=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 150), st.integers(1, 150)),
    shared=st.booleans(),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_a_linear_layer_over_the_weights_of_each_member_is_torchs_own(members, sizes, shared, biased, threads, seed):
    rows, inputs, outputs = sizes
    random = torch.Generator().manual_seed(seed)
    mine = torch.randint(members + 1, (outputs, inputs), generator=random) == torch.arange(members)[:, None, None]
    x = torch.randn(1 if shared else members, rows, inputs, generator=random).requires_grad_()
    weight = torch.randn(outputs, inputs, generator=random).requires_grad_()
    leaves = [x, weight, *([torch.randn(members, outputs, generator=random).requires_grad_()] if biased else [])]
    expected = x.double() @ (weight.double() * mine).transpose(1, 2) + (leaves[2][:, None].double() if biased else 0.0)
    gradient = torch.randn(expected.shape, generator=random)
    theirs = torch.autograd.grad(expected, leaves, gradient.double())
    with with_threads(threads):
        found = linear(x, LinearLayer(weight, leaves[2] if biased else None, kernels_of(mine)))
        ours = torch.autograd.grad(found, leaves, gradient)
    agrees(found.detach().double(), expected.detach())
    for one, other in zip(ours, theirs, strict=True):
        agrees(one.double(), other.double())


@pytest.mark.parametrize("rows", [1, 40, 130])
def test_a_chain_of_linear_layers_is_torchs_own(rows):
    random, members = torch.Generator().manual_seed(rows), 3
    mine = torch.randint(members + 1, (70, 65), generator=random) == torch.arange(members)[:, None, None]
    shapes = ((members, rows, 65), (70, 65), (members, 70), (members, 9, 70), (members, 9))
    leaves = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    x, weight, bias, own, last = leaves
    hidden = (x.double() @ (weight * mine).double().transpose(1, 2) + bias.double()[:, None]).relu()
    expected = hidden @ own.double().transpose(1, 2) + last.double()[:, None]
    gradient = torch.randn(expected.shape, generator=random)
    kernels = kernels_of(torch.ones(members, 9, 70, dtype=torch.bool), private=True)
    found = linear(x, LinearLayer(weight, bias, kernels_of(mine), True), LinearLayer(own, last, kernels))
    agrees(found.detach().double(), expected.detach())
    theirs = torch.autograd.grad(expected, leaves, gradient.double())
    for one, other in zip(torch.autograd.grad(found, leaves, gradient), theirs, strict=True):
        agrees(one.double(), other.double())


def test_a_linear_layer_refuses_rows_and_weights_that_do_not_fit():
    kernels = kernels_of(torch.ones(2, 4, 3, dtype=torch.bool))
    for x, weight in [((3, 5, 3), (4, 3)), ((2, 5, 4), (4, 3)), ((2, 0, 3), (4, 3)), ((2, 5, 3), (4, 2))]:
        with pytest.raises(plures.PluresError):
            linear(torch.zeros(x), LinearLayer(torch.zeros(weight), None, kernels))


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 8), st.integers(1, 8)),
    blocks=st.integers(1, 3),
    added=st.booleans(),
    relu=st.booleans(),
    far=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_norm_layer_and_what_follows_it_are_torchs_own(sizes, blocks, added, relu, far, seed):
    channels, height, width = sizes
    random = torch.Generator().manual_seed(seed)
    shape = (blocks * library.load().lanes, channels, height, width)
    x = (torch.randn(shape, generator=random) + 100 * far).requires_grad_()
    shortcut = torch.randn(shape, generator=random).requires_grad_()
    theirs = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(channels, generator=random))
        theirs.bias.copy_(torch.randn(channels, generator=random))
    ours = copy.deepcopy(theirs)
    expected = theirs(x) + shortcut if added else theirs(x)
    expected = expected.relu() if relu else expected
    found = unblocked(normed(blocked(x), ours, blocked(shortcut) if added else None, relu=relu))
    agrees(found.detach(), expected.detach(), within=1e-4 if far else 1e-5)
    gradient = torch.randn(shape, generator=random) * (expected.detach().abs() > 1e-3)  # a ReLU may take sides at zero
    inputs = (x, shortcut) if added else (x,)
    for one, other in zip(
        torch.autograd.grad(found, (*inputs, ours.weight, ours.bias), gradient),
        torch.autograd.grad(expected, (*inputs, theirs.weight, theirs.bias), gradient),
        strict=True,
    ):
        agrees(one, other, within=1e-3 if far else 1e-4)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        agrees(one.float(), other.float())


# Stages


@reproducible
def residual() -> nn.Module:
    return build("resnet8", classes=CLASSES, channels=3, width=8)


@reproducible
def with_pooling() -> nn.Module:
    """A stem for photographs, biases, and activations of its own."""
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(8, 12, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.SiLU()),
        *(nn.Conv2d(12, 12, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)),
    )
    nn.init.constant_(network[1].bias, 0.1)  # an output without kernels is constant: at zero a ReLU would toss a coin
    return network


def opened(network: nn.Module, phase: str = "finetune", **options: object) -> Stage:
    """A stage of the second member, which has some kernels and lacks others."""
    ensemble = plures.OrthogonalDropout(network, members=3, **options)
    return next(stage for stage in ensemble.stages() if stage.phase == phase and stage.member == 1)


def without_engine(stage: Stage) -> Stage:
    copied = copy.deepcopy(stage)
    copied.engine = None
    return copied


def trained(stage: Stage, batch: int = BATCH) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    loss = stage(images(batch), labels(batch))
    loss.backward()
    gradients = {name: one.grad for name, one in stage.named_parameters() if one.grad is not None}
    return loss.item(), gradients, dict(stage.named_buffers())


def ran(stage: Stage, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> bool:
    """Whether the engine ran, and not the network."""
    called: list[int] = []
    network = type(stage.network)
    before = network.forward
    if stage.training:
        stage.engine.output(stage.network, images(BATCH))  # it traces the network, and compares a batch
    monkeypatch.setattr(network, "forward", lambda self, *args: called.append(1) or before(self, *args))
    run()
    monkeypatch.undo()
    return not called


@pytest.mark.parametrize("make", [residual, with_pooling, *ALL])
@pytest.mark.parametrize("phase", ["pretrain", "finetune"])
def test_a_stage_trains_as_without_the_engine(make, phase):
    stage = opened(make(), phase)
    expected = trained(without_engine(stage))
    loss, gradients, buffers = trained(stage)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    assert gradients.keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in gradients.items():  # a bias before a norm layer has nothing but rounding in its gradient
        assert float((gradient - expected[1][name]).abs().max()) < 1e-3 * largest  # a ReLU may take sides at zero
    for name, buffer in buffers.items():
        agrees(buffer.float(), expected[2][name].float(), within=1e-4)


@pytest.mark.parametrize("make", [residual, with_pooling])
@pytest.mark.parametrize("phase", ["pretrain", "finetune"])
def test_networks_of_convolutions_are_run_by_the_engine(make, phase, monkeypatch):
    stage = opened(make(), phase)
    assert ran(stage, monkeypatch, lambda: trained(stage))


def test_training_with_the_engine_leaves_other_members_alone_and_learns():
    ensemble = plures.OrthogonalDropout(residual(), members=2)
    x, y = images(BATCH), labels(BATCH)
    done: dict[int, dict[str, Tensor]] = {}
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            loss = stage(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert stage.phase == "prune" or losses[-1] < 0.7 * losses[0]
        for member, before in done.items():
            assert all(before[name].equal(tensor) for name, tensor in ensemble.checkout(member).state_dict().items())
        if stage.phase == "finetune":
            stage.commit()
            done[stage.member] = ensemble.checkout(stage.member).state_dict()
    assert float((ensemble.predict(x).label == y).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        *(("an odd batch", BATCH + 1), ("no gradients", BATCH), ("evaluation", BATCH), ("autocast", BATCH)),
        *(("a layer in evaluation", BATCH), ("a hook", BATCH), ("single weights", BATCH), ("pruning", BATCH)),
        *(("half precision", BATCH), ("a tuple", BATCH), ("all kernels", BATCH)),
    ],
)
def test_the_network_itself_is_called_where_the_engine_cannot_run(case, batch, monkeypatch):
    options = {"granularity": "weight"} if case == "single weights" else {}
    stage = opened(residual(), "prune" if case == "pruning" else "finetune", **options)
    if case == "all kernels":  # the first member is pre-trained on all of them
        stage = next(plures.OrthogonalDropout(residual()).stages())
    x: object = images(batch)
    seen = []
    if case == "evaluation":
        stage.eval()
    elif case == "a layer in evaluation":
        stage.network.bn1.eval()
    elif case == "a hook":
        stage.network.layer1.register_forward_hook(lambda *_: seen.append(1))
    elif case == "half precision":
        stage.to(torch.bfloat16)
        x = images(batch).bfloat16()
    elif case == "a tuple":
        x = (images(batch),)
    with torch.set_grad_enabled(case != "no gradients"), torch.autocast("cpu", enabled=case == "autocast"):
        assert not ran(stage, monkeypatch, lambda: stage.logits(x))
    assert bool(seen) == (case == "a hook")


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Reversed(torch.autograd.Function):
    """A gradient of its own, which a trace would lose."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class OwnCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Reversed.apply(self.convs(x)).mean((2, 3)))


def with_own_layer() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Doubled(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class Traceable(nn.Module):
    """A network with code of its own that can be traced; what it adds is spread over the map."""

    factor = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.small = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 14)
        self.norms = nn.Sequential(*(nn.BatchNorm2d(8) for _ in range(3)))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x))
        both = x * self.factor + self.norms[1](self.conv(x))
        spread = F.relu(self.norms[2](self.small(x)) + both)
        return self.last((both + spread).mean((2, 3)))


class Undecided(Traceable):
    """A network that looks at its activations: torch.fx cannot trace it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Counting(Traceable):
    """A network that counts its calls, which a trace would leave out."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Mixing(Traceable):
    """A network whose samples influence each other, at the end of the network."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - logits.mean(0)


@pytest.mark.parametrize("make", [Traceable, with_own_layer, Mixing])
def test_code_of_the_users_own_is_traced(make, monkeypatch):
    stage = opened(reproducible(make)())
    with torch.no_grad():
        for one in stage.parameters():  # an output without kernels is constant: at zero a ReLU would toss a coin
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())))
    expected = trained(without_engine(stage))
    loss, gradients, _ = trained(stage)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in gradients.items():
        assert float((gradient - expected[1][name]).abs().max()) < 5e-3 * largest
    assert ran(stage, monkeypatch, lambda: trained(stage)) or make is not Traceable


@pytest.mark.parametrize("make", [OwnCode, Undecided, Counting])
def test_code_that_a_trace_would_change_is_called(make, monkeypatch):
    stage = opened(reproducible(make)())
    assert not ran(stage, monkeypatch, lambda: trained(stage))
    assert trained(stage)[0] == trained(without_engine(stage))[0]


def test_a_number_that_changes_in_a_module_is_seen(monkeypatch):
    stage = opened(reproducible(Traceable)())
    stage.network.factor = 1.5
    assert ran(stage, monkeypatch, lambda: trained(stage))
    stage.network.factor = 0.5
    assert not ran(stage, monkeypatch, lambda: trained(stage))


class Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean()


def changed(stage: Stage, what: str) -> None:
    network, layer = stage.network, stage.network.bn1
    if what == "another layer":
        network.layer1[0].bn1 = nn.GroupNorm(2, 8)
    elif what == "another parametrization":
        parametrize.register_parametrization(network.layer1[0].conv1, "weight", Centred())
    elif what == "another momentum":
        layer.momentum = None
    elif what == "another forward":
        layer.forward = lambda x: 2 * nn.BatchNorm2d.forward(layer, x)


@pytest.mark.parametrize("what", ["another layer", "another parametrization", "another momentum", "another forward"])
def test_a_network_that_was_changed_is_called(what, monkeypatch):
    stage = opened(residual())
    assert ran(stage, monkeypatch, lambda: trained(stage))
    changed(stage, what)
    assert not ran(stage, monkeypatch, lambda: trained(stage))


def test_masks_that_are_written_again_are_read_again(monkeypatch):
    stage = opened(residual())
    assert ran(stage, monkeypatch, lambda: trained(stage))
    for buffer in stage.buffers():  # as a resumed run does, and DDP before every step
        buffer.copy_(buffer.clone())
    assert ran(stage, monkeypatch, lambda: trained(stage))
    mask_of(stage.network, "layer1.0.conv1.weight").mask.fill_(1.0)
    expected = trained(without_engine(stage))
    assert ran(stage, monkeypatch, lambda: agrees(torch.tensor(trained(stage)[0]), torch.tensor(expected[0])))


def test_several_threads_train_one_stage():
    stage = opened(residual())
    expected = stage.logits(images(BATCH))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: stage.logits(images(BATCH)), range(24)):
            agrees(found.detach(), expected.detach())


def test_a_layer_that_is_called_twice_keeps_its_statistics_in_order():
    layer = nn.BatchNorm2d(8)
    twice = (nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), layer, nn.ReLU())
    stage = opened(nn.Sequential(*twice, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)))
    expected = trained(without_engine(stage))
    _, _, buffers = trained(stage)
    for name, buffer in buffers.items():
        agrees(buffer.float(), expected[2][name].float())


@pytest.mark.parametrize("shape", [(BATCH, 4, 16, 16), (BATCH, 3, 0, 16)])
def test_images_that_do_not_fit_are_refused(shape):
    with pytest.raises((plures.PluresError, RuntimeError)):
        opened(residual()).logits(torch.zeros(shape))


def test_tensors_of_any_strides_are_read_right():
    mask = torch.ones(4, 3, dtype=torch.bool)
    x, weight, bias = torch.randn(BATCH, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.arange(8.0)[::2]
    layer = Convolved(weight, bias[None], kernels_of(mask[None]), (1, 1), (1, 1))
    found = unblocked(run_layers(blocked(x), layer))
    agrees(found, F.conv2d(x, weight, bias, padding=1))
    with pytest.raises(plures.PluresError, match="float32"):
        run_layers(blocked(x), layer._replace(bias=bias[None].double()))


def test_the_bits_do_not_depend_on_the_number_of_threads():
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(20, 12, generator=random) < 0.5
    weight = (torch.randn(20, 12, 3, 3, generator=random) * mask[:, :, None, None]).requires_grad_()
    x = blocked(torch.randn(2 * BATCH, 12, 9, 9, generator=random)).requires_grad_()
    found = []
    for threads in (1, 2, 3):
        with with_threads(threads):
            layer = nn.BatchNorm2d(20)
            convolved = run_layers(x, Convolved(weight, None, kernels_of(mask[None]), (1, 1), (1, 1)))
            y = normed(convolved, layer, relu=True)
            found.append([y.detach(), *torch.autograd.grad(y, (x, weight, layer.weight), torch.ones_like(y))])
    for others in found[1:]:
        assert all(one.equal(other) for one, other in zip(found[0], others, strict=True))


def test_a_copied_or_pickled_engine_finds_its_network_anew():
    stage = opened(residual())
    trained(stage)
    for engine in (copy.deepcopy(stage.engine), pickle.loads(pickle.dumps(stage.engine))):
        assert isinstance(engine, TrainingEngine)
        assert engine.output(stage.network, images(BATCH)) is not None


def test_without_the_library_the_network_is_called(monkeypatch):
    monkeypatch.setenv("PLURES_NATIVE", "0")
    stage = opened(residual())
    assert not ran(stage, monkeypatch, lambda: trained(stage))


class Choosing(nn.Module):
    """Draw a choice in Python, as LayerDrop and stochastic depth do."""

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.inner, self.draw, self.rate = residual(), draw, rate

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits if self.draw() >= self.rate else 2 * logits


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(), lambda: float(torch.rand(()))])
def test_choices_that_a_network_draws_are_never_frozen(draw, rate, monkeypatch):
    stage = opened(Choosing(draw, rate))
    before = random.getstate(), torch.get_rng_state()
    assert not stage.engine.takes(stage.network, BATCH)
    assert random.getstate() == before[0]
    assert torch.get_rng_state().equal(before[1])
    trained(stage)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rates, self.config = residual(), [1.0], {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x * self.rates[0]) * self.config["scale"]
        return logits


def test_a_list_or_dict_that_changes_in_a_module_is_seen(monkeypatch):
    for change in (lambda one: one.rates.__setitem__(0, 3.0), lambda one: one.config.update(scale=3.0)):
        stage = opened(Configured())
        assert ran(stage, monkeypatch, lambda: trained(stage))  # noqa: B023
        change(stage.network)
        assert trained(stage)[0] == trained(without_engine(stage))[0]


class Fading(nn.Module):
    """A network whose owner, or whose forward, changes a plain attribute between steps."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner, self.counts, self.fading, self.calls = residual(), counts, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        logits: Tensor = self.inner(x) * self.fading
        return logits


@pytest.mark.parametrize(("counts", "name"), [(False, "fading"), (True, "calls")])
def test_an_attribute_that_changes_in_training_is_told_once(counts, name, caplog):
    _tell.cache_clear()
    for _ in range(2):
        stage = opened(Fading(counts))
        for _ in range(3):
            trained(stage)
            stage.network.fading *= 0.5
    told = [one.getMessage() for one in caplog.records if "faster engine" in one.getMessage()]
    assert told == [f"the network trains without its faster engine, because its attribute {name} changes in training"]


def test_channels_last_is_compared_like_any_other_layout(monkeypatch):
    """Torch's batch norm on a CPU rounds so much in this layout that the engine seemed to be wrong."""
    refused = 0
    for seed in range(4):
        torch.manual_seed(seed)
        stage = opened(resnet18(CLASSES, width=8)).to(memory_format=torch.channels_last)
        x = torch.rand(BATCH, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        refused += stage.engine.output(stage.network, x) is None
    assert not refused


def test_a_first_batch_of_nan_settles_nothing():
    stage = next(plures.OrthogonalDropout(reproducible(Mixing)(), 3, schedule="together").stages())
    assert stage.engine.takes(stage.network, BATCH)
    assert stage.engine.output(stage.network, torch.full((BATCH, 3, 16, 16), torch.nan)) is None
    assert stage.engine.output(stage.network, images(BATCH)) is None  # its samples influence each other
    stage = opened(residual())
    assert stage.engine.output(stage.network, torch.full((BATCH, 3, 16, 16), torch.nan)) is None
    assert stage.engine.output(stage.network, images(BATCH)) is not None
