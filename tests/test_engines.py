"""Engines give the ensemble's answers, faster or in less memory."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import networks
import plures
from plures import PluresError
from plures.graph import graph_of
from plures.methods.orthogonal_dropout.engines.owned import Owned
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.native import library

needs_library = pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")


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
        assert ensemble.engine("unfolded")(networks.images()).equal(ensemble(networks.images()))


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


# What a user may do with an engine, or with the network that it was made from.


class Dense(nn.Module):
    """A network that the owned engine runs faster."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, networks.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(torch.relu(self.stem(x)))).mean((2, 3)))


def members_of(ensemble: plures.OrthogonalDropout, *given: object) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([ensemble.checkout(member)(*copy.deepcopy(given)) for member in ensemble.trained])


def agrees(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def depthwise(channels: int = 24) -> nn.Module:
    """Inverted residuals, as in MobileNet and EfficientNet-Lite."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, 1), nn.BatchNorm2d(channels), nn.ReLU6()]
    for _ in range(3):
        wide = 6 * channels
        layers += [nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, networks.CLASSES))


@needs_library
def test_depthwise_networks_run_in_the_owned_engine() -> None:
    for members in (2, 5):
        ensemble = trained(depthwise(), members=members, granularity="kernel")
        engine = ensemble.engine()
        assert isinstance(engine, Owned)
        assert not engine.one_by_one
        assert not any(isinstance(layer, nn.ReLU6) for layer in engine.modules())  # fused
        for batch in (1, 2, 20):
            images = networks.images(batch)
            agrees(engine(images), members_of(ensemble, images))
    assert isinstance(trained(Dense(), members=5).engine(), Owned)


@needs_library
def test_weights_that_functions_take_are_named_and_counted() -> None:
    class Functional(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.conv2d(torch.relu(self.stem(x)), self.conv.weight, self.conv.bias, padding=1)
            return self.head(x.mean((2, 3)))

    ensemble = trained(Functional(), members=5)
    assert "conv" in ensemble.engine("owned").one_by_one
    assert isinstance(ensemble.engine(), Unfolded)


@needs_library
def test_hooks_run_or_the_engine_is_refused() -> None:
    network = Dense()
    network.conv.register_forward_hook(lambda layer, given, output: output * 3)
    ensemble = trained(network, members=5)
    images = networks.images(4)
    with pytest.raises(PluresError, match="Dense has hooks"):
        ensemble.engine("owned")
    engine = ensemble.engine()
    assert isinstance(engine, Unfolded)
    agrees(engine(images), members_of(ensemble, images))


def test_hooks_on_what_would_be_folded_run() -> None:
    network = networks.resnet()
    seen = []
    network.norm.register_forward_hook(lambda layer, given, output: seen.append(len(output)))
    ensemble = trained(network, members=2)
    seen.clear()
    ensemble.engine("unfolded").predict(networks.images(3))
    assert seen == [3, 3]


@needs_library
def test_gradients_of_inputs_are_right_or_refused() -> None:
    ensemble = trained(Dense(), members=3)
    images = networks.images(4).requires_grad_()
    owned, unfolded = ensemble.engine("owned"), ensemble.engine("unfolded")
    with pytest.raises(PluresError, match=r"computes no gradients: call it under torch.no_grad"):
        owned(images)
    (found,) = torch.autograd.grad(unfolded(images).square().sum(), images)
    (expected,) = torch.autograd.grad(sum(ensemble.checkout(m)(images).square().sum() for m in range(3)), images)
    agrees(found, expected)
    with torch.no_grad():
        agrees(owned(images), unfolded(images))


@needs_library
@pytest.mark.parametrize("kind", ["owned", "unfolded"])
def test_engines_made_or_run_in_inference_mode(kind) -> None:
    ensemble = trained(networks.resnet(), members=3)
    images = networks.images(5)
    expected = members_of(ensemble, images)
    with torch.inference_mode():
        engine = ensemble.engine(kind)
        agrees(engine(images), expected)
    with torch.no_grad():
        agrees(engine(images[:2]), expected[:, :2])
        agrees(engine(images), expected)


@needs_library
@pytest.mark.parametrize("kind", [None, "owned", "unfolded"])
def test_networks_that_change_their_inputs_get_a_copy(kind) -> None:
    class Changes(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    ensemble = trained(Changes(), members=3)
    images = networks.images(4)
    expected, before = members_of(ensemble, images), images.clone()
    predictor = ensemble if kind is None else ensemble.engine(kind)
    with torch.no_grad():
        for _ in range(2):
            agrees(predictor(images), expected)
            assert images.equal(before)


@needs_library
@pytest.mark.parametrize("kind", [None, "owned", "unfolded"])
def test_a_batch_that_is_not_the_first_axis(kind) -> None:
    class SecondAxis(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1))

    ensemble = plures.OrthogonalDropout(SecondAxis(), members=5, optimize_masks=False)
    for _ in ensemble.stages():
        pass  # members as they start
    images = networks.images(6).transpose(0, 1)
    engine = ensemble.engine(kind)
    with torch.no_grad():
        for some in (images, images[:, :4], images):
            agrees(engine(some), members_of(ensemble, some))


@needs_library
@pytest.mark.parametrize("convert", [torch.float16, torch.bfloat16, torch.float64])
def test_an_ensemble_of_another_type(convert) -> None:
    ensemble = trained(networks.resnet(), members=3).to(convert)
    images = networks.images(4).to(convert)
    with pytest.raises(PluresError, match="multiplies float32"):
        ensemble.engine("owned")
    with torch.no_grad():
        agrees(ensemble.engine()(images).double(), members_of(ensemble, images).double())


@needs_library
@pytest.mark.parametrize("kind", ["owned", "unfolded"])
def test_a_compiled_engine_is_compared_first(kind) -> None:
    class Mixes(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    torch.compiler.reset()
    ensemble = trained(Mixes(), members=3)
    images = networks.images(6)
    compiled = torch.compile(ensemble.engine(kind), backend="aot_eager")
    with torch.no_grad():
        agrees(compiled(images), members_of(ensemble, images))
    torch.compiler.reset()


@needs_library
def test_an_engine_is_not_exported_before_it_was_compared() -> None:
    engine = trained(Dense(), members=3).engine("owned")
    with torch.no_grad(), pytest.raises(PluresError, match="predict two batches of different sizes before exporting"):
        torch.export.export(engine, (networks.images(4),), strict=False)


class Encoder(nn.Sequential):
    """torch's own encoder, whose GELU runs in place in the owned engine."""

    def __init__(self) -> None:
        encoder = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        super().__init__(nn.Linear(8, 16), encoder, nn.LayerNorm(16), nn.Flatten(), nn.Linear(64, 5))


@needs_library
def test_the_owned_engine_of_an_encoder_is_pickled_and_ignores_torchs_default_dtype() -> None:
    torch.manual_seed(0)
    ensemble, rows = plures.OrthogonalDropout(Encoder(), 3, schedule="together"), torch.randn(4, 4, 8)
    for stage in ensemble.stages():
        stage(rows, torch.arange(4)).backward()
    with torch.no_grad():
        expected = ensemble.eval()(rows)
        again = pickle.loads(pickle.dumps(ensemble.engine("owned")))
        torch.testing.assert_close(again(rows), expected, atol=1e-5, rtol=1e-4)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            torch.testing.assert_close(ensemble.engine("owned")(rows), expected, atol=1e-5, rtol=1e-4)
        finally:
            torch.set_default_dtype(before)
