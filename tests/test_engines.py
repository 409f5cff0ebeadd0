"""Engines give the ensemble's answers, faster or in less memory."""

import pytest
import torch
from torch import nn

import networks
import plures
from plures import PluresError
from plures.methods.orthogonal_dropout.engines.engine import foldable
from plures.methods.orthogonal_dropout.engines.lean import Lean, PackedOwners
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.methods.orthogonal_dropout.masks import owned_part


@pytest.fixture(params=networks.ALL, ids=lambda make: make.__name__, scope="module")
def ensemble(request) -> plures.OrthogonalDropout:
    made = plures.OrthogonalDropout(request.param(), members=3)
    for stage in made.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        stage(networks.images(), networks.labels()).backward()
        optimizer.step()
    return made


def test_without_folding_both_engines_give_the_bits_of_the_ensemble(ensemble) -> None:
    images = networks.images(7)
    with torch.no_grad():
        expected = ensemble(images)
        for kind in ("lean", "unfolded"):
            engine = ensemble.engine(kind, fold=False)
            assert engine(images).equal(expected), kind
            assert engine.predict(images, batch_size=3).probabilities.shape == (7, networks.CLASSES)


def test_with_folding_both_engines_give_the_same_bits_near_the_ensemble(ensemble) -> None:
    images = networks.images(7)
    with torch.no_grad():
        lean, unfolded = (ensemble.engine(kind)(images) for kind in ("lean", "unfolded"))
        assert lean.equal(unfolded)
        torch.testing.assert_close(lean, ensemble(images), atol=1e-4, rtol=1e-3)


def test_an_engine_leaves_the_ensemble_alone(ensemble) -> None:
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    images = networks.images()
    for kind in ("lean", "unfolded"):
        ensemble.engine(kind).predict(images)
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items())
    assert all(parameter.requires_grad for parameter in ensemble.parameters())


def trained(network: nn.Module, **options) -> plures.OrthogonalDropout:
    ensemble = plures.OrthogonalDropout(network, optimize_masks=False, **options)
    for stage in ensemble.stages():
        stage(networks.images(), networks.labels())  # moves the statistics of batch norm
    return ensemble


def test_batch_norm_really_goes_into_the_convolutions() -> None:
    ensemble = trained(networks.resnet(), members=2)
    assert foldable(ensemble._split)["stem"] == "norm"
    for engine in (ensemble.engine("lean"), ensemble.engine("unfolded")):
        assert not [module for module in engine.modules() if isinstance(module, nn.BatchNorm2d)]


def test_a_convolution_whose_output_goes_elsewhere_too_is_not_folded() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

        def forward(self, x):
            y = self.conv(x)
            return self.head((y + self.norm(y)).mean((2, 3)))

    ensemble = trained(Forked(), members=2)
    assert foldable(ensemble._split) == {}
    with torch.no_grad():
        assert ensemble.engine()(networks.images()).equal(ensemble(networks.images()))


@pytest.mark.parametrize("granularity", ["weight", "kernel"])
def test_depthwise_convolutions_with_bias_and_kernels_fold_too(granularity: str) -> None:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False)
    network = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    ensemble = trained(network, members=3, granularity=granularity)
    assert foldable(ensemble._split) == {"0": "1", "2": "3"}
    with torch.no_grad():
        lean, unfolded = (ensemble.engine(kind)(networks.images()) for kind in ("lean", "unfolded"))
        assert lean.equal(unfolded)
        torch.testing.assert_close(lean, ensemble(networks.images()), atol=1e-4, rtol=1e-3)


def test_the_memory_allowed_chooses_the_engine(monkeypatch) -> None:
    monkeypatch.setenv("PLURES_NATIVE", "0")
    ensemble = trained(networks.resnet(), members=3)
    one = sum(tensor.nbytes for tensor in ensemble.network.state_dict().values())
    assert isinstance(ensemble.engine(memory=3 * one), Unfolded)
    assert isinstance(ensemble.engine(memory=3 * one - 1), Lean)
    assert isinstance(ensemble.engine(), Unfolded)
    with pytest.raises(PluresError, match="kind='fast'; use one of owned, unfolded, lean"):
        ensemble.engine("fast")  # type: ignore[arg-type]
    for kind in (None, "lean", "unfolded"):
        with pytest.raises(PluresError, match="no member of this ensemble is trained"):
            plures.OrthogonalDropout(networks.mlp()).engine(kind)


def test_the_lean_engine_holds_the_weights_once_and_half_a_byte_per_owner() -> None:
    ensemble = trained(networks.mlp(), members=5)
    weights = sum(ensemble.network.get_parameter(name).nbytes for name in ensemble.owners)
    engine = ensemble.engine("lean")
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in [*engine.parameters(), *engine.buffers()]}
    assert weights < sum(stored.values()) < 1.2 * weights


@pytest.mark.parametrize("members", [3, 15, 16, 40])
@pytest.mark.parametrize(
    ("shape", "owner_shape"),
    [
        ((6, 7), (6, 7)),
        ((5, 3, 3, 3), (5, 3, 3, 3)),
        ((5, 9, 3, 3), (5, 9, 1, 1)),
        ((120,), (120,)),
        ((7, 300, 150),) * 2,
    ],
)
def test_packed_owners_cut_the_same_part(members: int, shape: tuple[int, ...], owner_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(members)
    owners = torch.randint(0, members, owner_shape, generator=generator, dtype=torch.uint8)
    owners.flatten()[0] = 255
    weight = torch.randn(shape, generator=generator)
    scale = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.5
    packed = PackedOwners(owners, members)
    for member in (0, members - 1):
        expected = owned_part(weight, owners, member)
        part = packed.owned_part(weight, member)
        assert part.equal(expected)
        assert not part[part == 0].signbit().any()
        assert packed.owned_part(weight, member, scale).equal(expected * scale)
        half = weight.bfloat16()  # takes the way of other devices and dtypes
        assert packed.owned_part(half, member).equal(owned_part(half, owners, member))


def test_tied_norm_layers_are_not_folded() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.n, self.m, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)
            nn.init.uniform_(self.n.weight)
            self.m.weight = self.n.weight

        def forward(self, x):
            return self.head(self.m(self.b(self.n(self.a(x)))).mean((2, 3)))

    ensemble = trained(Tied(), members=2)
    assert foldable(ensemble._split) == {}
    with torch.no_grad():
        for kind in ("lean", "unfolded"):
            torch.testing.assert_close(ensemble.engine(kind)(networks.images()), ensemble(networks.images()))


def test_changing_an_engine_leaves_the_ensemble_alone() -> None:
    ensemble = trained(networks.resnet(), members=2)
    engine = ensemble.engine("lean").to(memory_format=torch.channels_last).to(torch.bfloat16)
    assert engine.predict(networks.images().bfloat16()).probabilities.isfinite().all()
    assert all(p.dtype == torch.float32 for p in ensemble.parameters())


def test_a_compiled_engine_agrees() -> None:
    ensemble = trained(networks.one_block(), members=2)
    for kind in ("lean", "unfolded"):
        torch.compiler.reset()
        engine = ensemble.engine(kind)
        with torch.no_grad():
            compiled = torch.compile(engine, backend="aot_eager")
            torch.testing.assert_close(compiled(networks.images()), engine(networks.images()), atol=1e-5, rtol=1e-4)
