"""Engines give the ensemble's answers, faster or in less memory."""

import pytest
import torch
from torch import nn

import networks
import plures
from plures import PluresError
from plures.graph import graph_of
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded


@pytest.fixture(params=networks.ALL, ids=lambda make: make.__name__, scope="module")
def ensemble(request) -> plures.OrthogonalDropout:
    made = plures.OrthogonalDropout(request.param(), members=3)
    for stage in made.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        stage(networks.images(), networks.labels()).backward()
        optimizer.step()
    return made


def test_without_folding_the_unfolded_engine_gives_the_bits_of_the_ensemble(ensemble) -> None:
    images = networks.images(7)
    with torch.no_grad():
        engine = ensemble.engine("unfolded", fold=False)
        assert engine(images).equal(ensemble(images))
        assert engine.predict(images, batch_size=3).probabilities.shape == (7, networks.CLASSES)


def test_with_folding_it_agrees(ensemble) -> None:
    images = networks.images(7)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.engine("unfolded")(images), ensemble(images), atol=1e-4, rtol=1e-3)


def test_an_engine_leaves_the_ensemble_alone(ensemble) -> None:
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    images = networks.images()
    ensemble.engine("unfolded").predict(images)
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items())
    assert all(parameter.requires_grad for parameter in ensemble.parameters())


def trained(network: nn.Module, **options) -> plures.OrthogonalDropout:
    ensemble = plures.OrthogonalDropout(network, optimize_masks=False, **options)
    for stage in ensemble.stages():
        stage(networks.images(), networks.labels())  # moves the statistics of batch norm
    return ensemble


def test_batch_norm_really_goes_into_the_convolutions() -> None:
    ensemble = trained(networks.resnet(), members=2)
    assert graph_of(ensemble.network).folds()["stem"] == "norm"
    engine = ensemble.engine("unfolded")
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
    assert graph_of(ensemble.network).folds() == {}
    with torch.no_grad():
        assert ensemble.engine()(networks.images()).equal(ensemble(networks.images()))


@pytest.mark.parametrize("granularity", ["weight", "kernel"])
def test_depthwise_convolutions_with_bias_and_kernels_fold_too(granularity: str) -> None:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False)
    network = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    ensemble = trained(network, members=3, granularity=granularity)
    assert graph_of(ensemble.network).folds() == {"0": "1", "2": "3"}
    with torch.no_grad():
        found = ensemble.engine("unfolded")(networks.images())
        torch.testing.assert_close(found, ensemble(networks.images()), atol=1e-4, rtol=1e-3)


def test_the_memory_allowed_chooses_the_engine(monkeypatch) -> None:
    monkeypatch.setenv("PLURES_NATIVE", "0")
    ensemble = trained(networks.resnet(), members=3)
    one = sum(tensor.nbytes for tensor in ensemble.network.state_dict().values())
    assert isinstance(ensemble.engine(memory=3 * one), Unfolded)
    with pytest.raises(PluresError, match="no engine fits into .* bytes: .*predict with the ensemble itself"):
        ensemble.engine(memory=3 * one - 1)
    assert isinstance(ensemble.engine(), Unfolded)
    with pytest.raises(PluresError, match="kind='fast'; use one of owned, unfolded"):
        ensemble.engine("fast")  # type: ignore[arg-type]
    for kind in (None, "owned", "unfolded"):
        with pytest.raises(PluresError, match="no member of this ensemble is trained"):
            plures.OrthogonalDropout(networks.mlp()).engine(kind)


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
    assert graph_of(ensemble.network).folds() == {}
    with torch.no_grad():
        torch.testing.assert_close(ensemble.engine("unfolded")(networks.images()), ensemble(networks.images()))


def test_changing_an_engine_leaves_the_ensemble_alone() -> None:
    ensemble = trained(networks.resnet(), members=2)
    engine = ensemble.engine("unfolded").to(memory_format=torch.channels_last).to(torch.bfloat16)
    assert engine.predict(networks.images().bfloat16()).probabilities.isfinite().all()
    assert all(p.dtype == torch.float32 for p in ensemble.parameters())


def test_a_compiled_engine_agrees() -> None:
    ensemble = trained(networks.one_block(), members=2)
    torch.compiler.reset()
    engine = ensemble.engine("unfolded")
    with torch.no_grad():
        compiled = torch.compile(engine, backend="aot_eager")
        torch.testing.assert_close(compiled(networks.images()), engine(networks.images()), atol=1e-5, rtol=1e-4)
