"""All members in one stage: each trains as it would alone, and the whole has the memory of one network."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import networks
import plures
from plures.methods.orthogonal_dropout import training_engine, training_plan
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.native import library


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(48, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x.flatten(1).view(len(x), 16, 48))[0][:, -1])
        return logits


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(900, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1)[:, :20].mul(100).abs().long().clamp_max(899)
        logits: Tensor = self.head(self.embedding(tokens).mean(1))
        return logits


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(2, (4, 4)),
        nn.Conv3d(3, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 4),
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)),
        *(nn.GELU(), nn.ConvTranspose2d(8, 6, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


KINDS: list[Callable[[], nn.Module]] = [
    *(networks.mlp, networks.resnet, networks.group_norm_resnet, networks.transformer, networks.tied),
    *(networks.transformers_vit, Recurrent, Words, volumes, depthwise),
]


def made(
    make: Callable[[], nn.Module], members: int = 3, dtype: torch.dtype = torch.float64, **options: object
) -> OrthogonalDropout:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make()
    return OrthogonalDropout(network.to(dtype), members, schedule="together", **options)  # type: ignore[arg-type]


def train(ensemble: plures.Ensemble, steps: int = 3, dtype: torch.dtype = torch.float64, batch: int = 8) -> None:
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        for step in range(steps):
            optimizer.zero_grad()
            stage(networks.images(batch, step).to(dtype), networks.labels(batch, step)).backward()
            optimizer.step()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("granularity", ["kernel", "weight"])
def test_each_member_trains_as_it_would_alone(make: Callable[[], nn.Module], granularity: str) -> None:
    together = made(make, granularity=granularity)
    alone = OrthogonalDropout(
        copy.deepcopy(together.network),
        3,
        optimize_masks=False,
        granularity=granularity,  # type: ignore[arg-type]
        roles=together.roles,
    )
    alone._moments = together._moments  # measured before the weights were cast
    train(together), train(alone)  # type: ignore[func-returns-value]
    for member in range(3):
        ours, theirs = together.checkout(member).state_dict(), alone.checkout(member).state_dict()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11, msg=f"{name} of member {member}")


def test_a_stage_has_the_memory_of_one_network() -> None:
    network = networks.resnet()
    stage = next((ensemble := OrthogonalDropout(network, 3, schedule="together")).stages())
    trained = sum(one.numel() for one in stage.parameters() if one.requires_grad)
    once = sum(one.numel() for one in network.parameters())
    private = sum(one.numel() for name, one in network.named_parameters() if ensemble.roles[name] == "private")
    assert trained == once + 2 * private


def test_one_stage_trains_all_members() -> None:
    ensemble = made(networks.mlp)
    assert [step.name for step in ensemble.plan()] == ["train"]
    train(ensemble)
    assert ensemble.trained == [0, 1, 2]


def test_the_loss_is_the_sum_of_the_members() -> None:
    ensemble = made(networks.mlp)
    stage = next(ensemble.stages())
    x, y = networks.images(8).double(), networks.labels(8)
    assert stage(x, y).item() == pytest.approx(
        sum(nn.functional.cross_entropy(one, y).item() for one in stage.logits(x))
    )


def test_a_first_layer_with_fewer_inputs_than_members_is_private() -> None:
    assert OrthogonalDropout(networks.resnet(), 5, schedule="together").roles["stem.weight"] == "private"
    assert OrthogonalDropout(networks.resnet(), 3, schedule="together").roles["stem.weight"] == "split"


class Mixing(nn.Module):
    """A network whose samples influence each other."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.first, self.rest, self.last = nn.Linear(768, 64), nn.Sequential(*layers), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest(self.first(x.flatten(1)))
        logits: Tensor = self.last(x - x.mean(0))
        return logits


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(768, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.GELU()),
        *(nn.LayerNorm(64), nn.Dropout(0.0), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)),
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


FAST = [networks.mlp, convolutions, perceptron]


@pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
@pytest.mark.parametrize("make", [*FAST, *KINDS, Mixing], ids=lambda make: make.__name__)
def test_the_engine_gives_the_gradients_of_the_network_itself(make: Callable[[], nn.Module]) -> None:
    stage = next(made(make, members=5, dtype=torch.float32).stages())
    for one in stage.network.parameters():  # outputs without an input, and no bias, lie at the kink of a ReLU
        nn.init.normal_(one, std=0.1, generator=torch.Generator().manual_seed(one.numel()))
    exact = copy.deepcopy(stage.network).double()
    x = networks.images(32)
    logits = stage.logits(x)
    assert make not in FAST or stage.engine._prepared is not None
    assert make is not Mixing or stage.engine._prepared is None
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    (logits * weights).sum().backward()
    expected = exact(x.double())
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
    theirs = {name: one.grad for name, one in exact.named_parameters() if one.requires_grad}
    largest = max(float(one.abs().max()) for one in theirs.values() if one is not None)
    within = 1e-5 if make in FAST else 1e-4  # torch's own sums of float32
    for name, one in stage.network.named_parameters():
        if one.requires_grad:
            torch.testing.assert_close(one.grad.double(), theirs[name], rtol=0, atol=within * largest, msg=name)
    for name, buffer in stage.network.named_buffers():
        torch.testing.assert_close(buffer.double(), exact.get_buffer(name).double(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["without the library", "as on a GPU"])
@pytest.mark.parametrize("make", [networks.mlp, perceptron, convolutions, depthwise, volumes])
def test_members_run_side_by_side_in_torch_alone(
    make: Callable[[], nn.Module], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLURES_NATIVE", "0")
    if way == "as on a GPU":  # grouped convolutions; here, on the CPU
        monkeypatch.setattr(training_plan, "is_on_cpu", lambda _: False)
    stage = next(made(make, dtype=torch.float32).stages())
    for one in stage.network.parameters():
        nn.init.normal_(one, std=0.1, generator=torch.Generator().manual_seed(one.numel()))
    exact = copy.deepcopy(stage.network).double()
    x = networks.images(7)
    logits = stage.logits(x)
    assert (stage.engine._prepared is not None) == (way == "as on a GPU" or make in (networks.mlp, perceptron))
    expected = exact(x.double())
    logits.square().sum().backward(), expected.square().sum().backward()  # type: ignore[func-returns-value]
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    theirs = {name: one.grad for name, one in exact.named_parameters() if one.requires_grad}
    largest = max(float(one.abs().max()) for one in theirs.values() if one is not None)
    for name, gradient in theirs.items():  # a bias before a norm layer has nothing but rounding in its gradient
        ours = stage.network.get_parameter(name).grad
        torch.testing.assert_close(ours.double(), gradient, rtol=0, atol=1e-4 * largest, msg=name)
    for name, buffer in stage.network.named_buffers():
        torch.testing.assert_close(buffer.double(), exact.get_buffer(name).double(), rtol=1e-4, atol=1e-5, msg=name)


class Scaled(nn.Module):
    """A network with a table as long as a batch of four."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("scale", torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x) * self.scale
        return logits


def test_a_table_as_long_as_the_batch_is_not_taken_for_one() -> None:
    stage = next(made(Scaled, dtype=torch.float32).stages())
    x = networks.images(4)
    stage.logits(networks.images(7))
    assert stage.engine._prepared is not None
    torch.testing.assert_close(stage.logits(x), stage.network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [networks.mlp, convolutions, depthwise])
def test_members_run_side_by_side_on_any_device(make: Callable[[], nn.Module]) -> None:
    network = next(made(make, dtype=torch.float32).stages()).network.to("meta")
    prepared = training_engine._prepared(network)
    assert prepared is not None
    assert prepared.run(networks.images(7).to("meta")).shape == (3, 7, 4)


@pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        ensemble = made(convolutions, dtype=torch.float32)
        train(ensemble, dtype=torch.float32, batch=32)
        found.append(torch.cat([one.flatten() for one in ensemble.state_dict().values() if one.is_floating_point()]))
    torch.set_num_threads(before)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.parametrize("batch", [8, 32])  # by torch alone, and by the engine
def test_dropout_draws_for_each_member(batch: int) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 4))
    stage = next(OrthogonalDropout(network, 2, schedule="together").stages())
    for one in (inner := stage.network.network)[2], inner[4]:
        nn.init.constant_(one.weight, 0.01)  # members differ in nothing but what they own
    with torch.no_grad():
        owners = stage.network.owners()["2.weight"]
        inner[2].weight.copy_((torch.arange(768) % 2 == 0) * 0.01)
    logits = stage.logits(torch.ones(batch, 3, 16, 16))
    assert len({tuple(row) for member in logits.tolist() for row in member}) == 2 * batch
    assert owners.shape == (64, 768)


def test_a_stage_resumes_to_the_bit() -> None:
    """A state dict of the stage and of its optimizer is all that a loop must keep."""
    results = []
    for interrupted in (False, True):
        ensemble = made(convolutions, dtype=torch.float32)
        stage = next(ensemble.stages())
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            if interrupted and step == 2:
                kept = copy.deepcopy(stage.state_dict()), copy.deepcopy(optimizer.state_dict())
                stage = next(made(convolutions, dtype=torch.float32).stages())
                optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
                stage.load_state_dict(kept[0]), optimizer.load_state_dict(kept[1])  # type: ignore[func-returns-value]
            optimizer.zero_grad()
            stage(networks.images(32, step), networks.labels(32, step)).backward()
            optimizer.step()
        results.append(stage.state_dict())
    assert all(tensor.equal(results[1][name]) for name, tensor in results[0].items())


def test_a_stage_can_be_compiled() -> None:
    stage = next(made(networks.mlp, dtype=torch.float32).stages())
    x, y = networks.images(8), networks.labels(8)
    expected = stage(x, y)
    torch.testing.assert_close(torch.compile(stage, backend="aot_eager")(x, y), expected)


def test_a_clipped_norm_is_over_all_members() -> None:
    stage = next(made(networks.mlp).stages())
    stage(networks.images(8).double(), networks.labels(8)).backward()
    gradients = [one.grad.clone() for one in stage.parameters() if one.grad is not None]
    whole = torch.stack([one.norm() for one in gradients]).norm()
    assert torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5 * float(whole)).item() == pytest.approx(float(whole))
    clipped = [one.grad for one in stage.parameters() if one.grad is not None]
    for before, after in zip(gradients, clipped, strict=True):
        torch.testing.assert_close(after, before / 2, rtol=1e-5, atol=1e-6)
