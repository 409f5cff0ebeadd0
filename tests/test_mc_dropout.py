"""MC dropout: where dropout goes, that batch norm stays in eval mode, and what many passes converge to."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import CLASSES, images, labels
from plures import MCDropout, PluresError

NEVER = 1e-9  # a dropout rate at which nothing is ever dropped


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze, self.conv = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.expand = nn.Conv2d(4, 8, 1)

    def forward(self, x):
        return x + self.expand(F.relu(self.conv(F.relu(self.squeeze(x)))))


def head(inputs):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def plain_convolutions():
    layers = [nn.Conv2d(3, 8, 3), *(layer for _ in range(3) for layer in (nn.ReLU(), nn.Conv2d(8, 8, 3)))]
    return nn.Sequential(nn.Sequential(*layers), head(8))


def with_own_dropout():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(64, CLASSES)
    )


def entering(ensemble_or_stage, name, run):
    """What goes into a module, after dropout, in one call of `run`."""
    seen = []
    handle = ensemble_or_stage.network.get_submodule(name).register_forward_hook(
        lambda module, args, output: seen.append(args[0].detach())
    )
    run()
    handle.remove()
    return seen


# --- where


@pytest.mark.parametrize(
    ("make_network", "expected"),
    [
        (networks.mlp, ["3", "5"]),
        (networks.resnet, ["blocks.0.conv2", "blocks.1.conv2"]),
        (
            networks.transformers_resnet,
            [f"resnet.encoder.stages.{stage}.layers.0.layer.1.convolution" for stage in range(2)],
        ),
        # The projection of nn.MultiheadAttention is never called, so dropout before it would do nothing.
        (networks.transformer, [*(f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)), "head"]),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Bottleneck(), Bottleneck(), head(8)), ["1.conv", "2.conv"]),
        (plain_convolutions, ["0.2", "0.4", "0.6", "1.2"]),
        (with_own_dropout, ["3"]),
    ],
    ids=["mlp", "resnet", "transformers_resnet", "transformer", "bottleneck", "convolutions", "own"],
)
def test_dropout_is_placed_by_rule(make_network, expected):
    assert list(MCDropout(make_network()).sites) == expected


@pytest.mark.parametrize("make_network", networks.ALL, ids=lambda make: make.__name__)
def test_every_site_of_any_network_is_reached(make_network):
    ensemble = MCDropout(make_network(), rate=0.5, passes=2)
    for site in ensemble.sites:
        first, second = entering(ensemble, site, lambda: ensemble.predict(images()))
        assert not torch.equal(first, second)
    first, second = ensemble(images())
    assert not torch.allclose(first, second)


def test_the_user_says_where_and_how_much():
    assert MCDropout(networks.mlp(), sites=["3"]).sites == {"3": 0.1}
    assert MCDropout(networks.mlp(), rate=0.3, sites=["3"]).sites == {"3": 0.3}
    assert MCDropout(networks.mlp(), sites={"1": 0.2, "5": 0.4}).sites == {"1": 0.2, "5": 0.4}


def test_own_dropout_layers_keep_their_rate_unless_told():
    assert MCDropout(with_own_dropout()).sites == {"3": 0.5}
    assert MCDropout(with_own_dropout(), rate=0.2).sites == {"3": 0.2}
    ensemble = MCDropout(with_own_dropout(), rate=0.2, sites=["4"])
    assert ensemble.sites == {"4": 0.2}
    assert ensemble.network[4].p == 0.2


def test_dropout_inside_an_encoder_layer_is_on():
    # In eval mode torch runs such layers in one fused step that knows no dropout.
    network = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4),
        nn.Flatten(2),
        nn.Linear(16, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    first, second = MCDropout(network, passes=2).predict(images()).members
    assert not torch.allclose(first, second)


# --- how much


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_dropped_at_their_rate_and_the_rest_is_scaled(rate):
    ensemble = MCDropout(networks.resnet(), rate=rate, passes=1)
    before = MCDropout(networks.resnet(), rate=NEVER, passes=1)
    (dropped,) = entering(ensemble, "blocks.0.conv2", lambda: ensemble(images(64)))
    (whole,) = entering(before, "blocks.0.conv2", lambda: before(images(64)))
    alive = whole != 0
    kept = dropped[alive] != 0
    assert kept.float().mean().item() == pytest.approx(1 - rate, abs=0.01)
    torch.testing.assert_close(dropped[alive][kept], whole[alive][kept] / (1 - rate))


def test_own_layers_for_channels_drop_them_whole_and_for_each_sample():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.5), nn.Conv2d(8, 4, 1), head(4))
    ensemble = MCDropout(network, passes=1)
    (dropped,) = entering(ensemble, "2", lambda: ensemble(images(64)))
    zeros = (dropped == 0).flatten(2).float().mean(2)
    assert set(zeros.unique().tolist()) == {0.0, 1.0}
    assert zeros.mean().item() == pytest.approx(0.5, abs=0.05)
    assert len(zeros.unique(dim=0)) > 32


def test_the_mean_converges_to_the_mean_over_all_masks():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    x, rate = torch.randn(2, 3), 0.3
    hidden = network[:2](x).detach()
    exact = torch.zeros(2, CLASSES)
    for mask in itertools.product([0.0, 1.0], repeat=6):  # written out: every mask with its probability
        kept = torch.tensor(mask)
        probability = torch.where(kept == 1, 1 - rate, rate).prod()
        exact += probability * network[2](hidden * kept / (1 - rate)).softmax(-1).detach()
    errors = []
    for passes in (40, 4000):
        members = MCDropout(network, rate, passes).predict(x).members
        deviation = members.std(0) / passes**0.5
        assert ((members.mean(0) - exact).abs() < 4.5 * deviation).all()
        errors.append((members.mean(0) - exact).abs().max())
    assert errors[1] < errors[0]


def test_passes_follow_from_the_seed():
    network = networks.resnet()
    few, many = MCDropout(network, passes=2), MCDropout(network, passes=4)
    assert torch.equal(many(images())[:2], few(images()))
    assert not torch.equal(MCDropout(network, passes=2, seed=1)(images()), few(images()))


# --- batch norm


@pytest.mark.parametrize("make_network", [networks.resnet, networks.transformers_resnet, with_own_dropout])
def test_batch_norm_stays_in_eval_mode(make_network):
    network = make_network()
    with torch.no_grad():
        network.train()(images(32, seed=1) * 3 + 1)  # statistics that those of a batch do not resemble
    expected = plures.Deterministic(network)(images())[0]
    ensemble = MCDropout(network, rate=NEVER, passes=2)
    before = {name: buffer.clone() for name, buffer in ensemble.named_buffers()}
    for _ in range(2):
        for logits in ensemble.train()(images()):
            torch.testing.assert_close(logits, expected)
    for name, buffer in ensemble.named_buffers():
        assert torch.equal(buffer, before[name]), name
    # The known mistake, a whole network in train mode, would be seen:
    for module in ensemble.network.modules():
        module.training = True
    assert not torch.allclose(ensemble(images())[0], expected, atol=1e-3)


# --- stages


def test_a_stage_drops_in_training_mode_alone():
    ensemble = MCDropout(networks.resnet(), rate=0.5, passes=2)
    stage = next(ensemble.stages())
    (dropped,) = entering(stage, "blocks.1.conv2", lambda: stage.logits(images()))
    stage.eval()
    (whole,) = entering(stage, "blocks.1.conv2", lambda: stage.logits(images()))
    assert (dropped == 0).float().mean() > (whole == 0).float().mean() + 0.1
    assert torch.equal(stage.logits(images()), stage.logits(images()))
    first, second = ensemble(images())  # the ensemble's own dropout stays on
    assert not torch.equal(first, second)


def test_own_dropout_layers_drop_once():
    ensemble = MCDropout(with_own_dropout(), passes=1)
    stage = next(ensemble.stages())
    stage.network[2].bias.data.fill_(100.0)
    ensemble.network[2].bias.data.fill_(100.0)
    for module, run in ((stage, lambda: stage.logits(images(64))), (ensemble, lambda: ensemble(images(64)))):
        (dropped,) = entering(module, "5", run)
        assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_names_in_the_state_dict_are_those_of_the_plain_network():
    network = networks.resnet()
    ensemble = MCDropout(network)
    assert list(ensemble.network.state_dict()) == list(network.state_dict())
    stage = next(ensemble.stages())
    assert list(stage.network.state_dict()) == list(network.state_dict())
    assert sum(p.numel() for p in ensemble.parameters()) == sum(p.numel() for p in network.parameters())


def test_the_training_loss_is_that_of_a_network_with_dropout():
    ensemble = MCDropout(networks.mlp(), rate=0.5)
    stage = next(ensemble.stages())
    layers = list(networks.mlp())
    by_hand = nn.Sequential(*layers[:3], nn.Dropout(0.5), *layers[3:5], nn.Dropout(0.5), layers[5])
    torch.manual_seed(3)
    loss = stage(images(), labels())
    torch.manual_seed(3)
    torch.testing.assert_close(loss, F.cross_entropy(by_hand(images()), labels()))


def test_sites_and_rates_come_back_from_a_file(tmp_path):
    ensemble = MCDropout(with_own_dropout(), rate=0.3, passes=3)
    plures.save(ensemble, tmp_path / "dropout.safetensors")
    network = with_own_dropout()
    network[3].p, network[4].p = 0.0, 0.9  # the file knows better
    loaded = plures.load(tmp_path / "dropout.safetensors", network)
    assert loaded.sites == {"3": 0.3}
    assert torch.equal(loaded(images()), ensemble(images()))


# --- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rate": 0.0}, "the dropout rate of 'blocks.0.conv2' is 0.0; use a number above 0 and below 1"),
        ({"rate": 1.0}, "use a number above 0 and below 1"),
        ({"rate": -0.1}, "use a number above 0 and below 1"),
        ({"rate": "high"}, "use a number above 0 and below 1"),
        ({"sites": {"stem": 2}}, "the dropout rate of 'stem' is 2"),
        ({"passes": 0}, "passes=0"),
        ({"passes": 1.5}, "passes=1.5"),
        ({"sites": []}, "no place for dropout"),
        ({"sites": ["blocks.0.conv3"]}, "did you mean blocks.0.conv2"),
        ({"sites": "blocks.0.conv3"}, "did you mean blocks.0.conv2"),
        ({"init": "zeros"}, "init='zeros'"),
    ],
)
def test_bad_options_are_refused_at_once(options, sentence):
    with pytest.raises(PluresError, match=sentence):
        MCDropout(networks.resnet(), **options)


def test_a_network_without_a_place_for_dropout_is_refused():
    with pytest.raises(PluresError, match="Sequential has no place for dropout"):
        MCDropout(nn.Sequential(nn.Flatten(), nn.Linear(768, CLASSES)))


def test_a_site_that_gets_no_positional_input_is_refused():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.last(input=self.first(x))

    with pytest.raises(PluresError, match="site 'last' gets its input as a named argument"):
        MCDropout(Named())(torch.randn(2, 4))
