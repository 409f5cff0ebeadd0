import copy
import sys

import pytest
import torch
from torch import nn

from plures.errors import PluresError
from plures.lab.models import WideResNet, build, mlp, resnet8, resnet18, resnet20, resnet50

SMALL = [
    pytest.param(lambda: resnet8(10, width=4), id="resnet8"),
    pytest.param(lambda: resnet20(10, width=4), id="resnet20"),
    pytest.param(lambda: resnet18(10, width=4), id="resnet18"),
    pytest.param(lambda: resnet18(10, width=4, stem="imagenet"), id="resnet18-imagenet"),
    pytest.param(lambda: resnet50(10, width=4), id="resnet50"),
    pytest.param(lambda: WideResNet(10, depth=10, widen=2, width=4), id="wide_resnet"),
    pytest.param(lambda: mlp(10, channels=3, size=32, width=8), id="mlp"),
]


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("network", "published"),
    [
        (lambda: resnet18(10), 11_173_962),
        (lambda: resnet18(1000, stem="imagenet"), 11_689_512),
        (lambda: resnet50(1000), 25_557_032),
        (lambda: build("wide_resnet28_10", 10, 3), 36_479_194),
        (lambda: resnet20(10), 269_722 + 2_752),  # the paper's network and two projections
    ],
)
def test_published_parameter_counts(network, published):
    with torch.device("meta"):
        assert parameters(network()) == published


@pytest.mark.parametrize("make", SMALL)
def test_trains_under_channels_last_and_bf16(make):
    torch.manual_seed(0)
    network = make().to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(images)
    assert logits.shape == (4, 10)
    nn.functional.cross_entropy(logits.float(), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("make", [param for param in SMALL if param.id in ("resnet8", "wide_resnet")])
def test_compiles_as_one_graph(make):
    torch.manual_seed(0)
    network, images = make().eval(), torch.randn(2, 3, 32, 32)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(network, backend="eager", fullgraph=True)(images), network(images))


@pytest.mark.parametrize("make", SMALL)
def test_convolutions_have_no_bias_and_kaiming_weights(make):
    torch.manual_seed(0)
    for module in make().modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            spread = (2 / fan_out) ** 0.5
            assert module.weight.std().item() == pytest.approx(spread, rel=6 / module.weight.numel() ** 0.5)


def test_digits_of_8_pixels_fit_resnet8():
    network = resnet8(classes=10, channels=1, width=8)
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert network.layer3(network.layer2(network.layer1(torch.randn(1, 8, 8, 8)))).shape == (1, 32, 2, 2)


def test_stems_differ_in_resolution():
    images = torch.randn(1, 3, 32, 32)
    for stem, side in (("cifar", 32), ("imagenet", 8)):
        network = resnet18(10, width=4, stem=stem)
        assert network.maxpool(network.conv1(images)).shape[-1] == side


@pytest.mark.parametrize("make", [param for param in SMALL if param.id != "mlp"])
def test_a_module_can_be_put_before_the_second_convolution_of_every_block(make):
    class Zero(nn.Module):
        def forward(self, x):
            return x * 0

    torch.manual_seed(0)
    network, images = make().eval(), torch.randn(2, 3, 32, 32)
    changed = copy.deepcopy(network)
    blocks = [module for module in changed.modules() if hasattr(module, "between")]
    assert blocks
    for block in blocks:
        assert isinstance(block.relu, nn.ReLU)
        assert {"conv1", "bn1", "conv2", "bn2"} <= {name for name, _ in block.named_children()}
        block.between = Zero()
    assert list(changed.state_dict()) == list(network.state_dict())
    with torch.no_grad():
        assert not torch.equal(changed(images), network(images))
        for block in blocks:
            block.between = nn.Identity()
        assert torch.equal(changed(images), network(images))


def test_wide_resnet_activates_before_it_convolves():
    block = WideResNet(10, depth=10, widen=1, width=4).layer1[0].eval()
    nn.init.zeros_(block.conv2.weight)
    images = -torch.rand(1, 4, 8, 8)
    assert torch.equal(block(images), images)  # nothing on the way of the shortcut, not even a ReLU


def test_build_calls_built_in_names_with_their_options():
    assert parameters(build("resnet18", 10, 3, width=16, size=32)) == parameters(resnet18(10, width=16))
    assert build("mlp", classes=4, channels=3, size=5, stem="cifar")(torch.randn(2, 3, 5, 5)).shape == (2, 4)


@pytest.fixture
def networks(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "def small(classes, channels, size=8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))\n"
        "def everything(**options):\n"
        "    return nn.Linear(len(options), options['classes'])\n"
        "def wrong(classes, channels):\n    return 'a string'\n"
        "def narrow(outputs):\n    return nn.Linear(1, outputs)\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_networks", None)


@pytest.mark.usefixtures("networks")
def test_build_imports_functions():
    network = build("my_networks:small", classes=7, channels=2, size=4, width=99)
    assert network(torch.randn(3, 2, 4, 4)).shape == (3, 7)
    assert build("my_networks:everything", classes=7, channels=2, size=4, width=99).in_features == 4


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("resnet81", "did you mean .*resnet8"),
        ("transformer", "module:function"),
        ("my_networks:missing", "has no 'missing'"),
        ("my_networks:wrong", "returned str"),
        ("my_networks:narrow", "takes classes= and channels="),
        ("my_networks:number", "function or class"),
        ("my_broken:network", "a_module_that_is_not_there"),
        ("no_such_module:network", "cannot be imported"),
        (":network", "cannot be imported"),
    ],
)
def test_build_refuses_in_one_sentence(model, words):
    with pytest.raises(PluresError, match=words) as caught:
        build(model, classes=10, channels=3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: resnet18(10, stem="resnet"),
        lambda: resnet8(0),
        lambda: resnet8(10, width=0),
        lambda: WideResNet(10, depth=27),
        lambda: mlp(10, depth=0),
    ],
)
def test_sizes_that_make_no_sense(make):
    with pytest.raises(PluresError):
        make()


def test_a_network_that_no_memory_has_room_for_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nn.init, "kaiming_normal_", lambda tensor, **_: tensor if tensor.is_meta else pytest.fail("drawn")
    )
    with pytest.raises(PluresError, match="'mlp' of this width and size takes .* but this machine has"):
        build("mlp", classes=10, channels=1, size=8, width=1 << 16)


def test_looking_at_the_size_of_a_network_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    expected = resnet8(10, width=4).state_dict()
    torch.manual_seed(0)
    built = build("resnet8", classes=10, channels=3, width=4).state_dict()
    assert all(built[name].equal(expected[name]) for name in expected)
