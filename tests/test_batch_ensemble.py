import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import images, labels
from plures.tensors import layers


def open_stage(ensemble):
    return ensemble.open(ensemble.plan()[0])


def commit(ensemble):
    open_stage(ensemble).commit()
    return ensemble


def own(ensemble_or_stage, network):
    """What the members have for themselves: alpha, gamma and bias of each layer, by the layer's name."""
    rewritten = ensemble_or_stage.network.network
    return {name: rewritten.get_submodule(name).members for name in layers(network)}


def member_network(ensemble, network, member):
    """Write one member out as a plain network: its weights are the shared ones times outer(gamma, alpha)."""
    result = copy.deepcopy(network).eval()
    shared = ensemble.network.network.state_dict()
    result.load_state_dict({name: shared[name] for name in result.state_dict() if name in shared}, strict=False)
    for name, factors in own(ensemble, network).items():
        layer = result.get_submodule(name)
        outputs, inputs = layer.weight.shape[:2]
        alpha, gamma = factors.alpha[member], factors.gamma[member]
        groups = getattr(layer, "groups", 1)
        per_output = alpha.reshape(groups, inputs).repeat_interleave(outputs // groups, 0)  # the inputs of its group
        outer = (gamma[:, None] * per_output).reshape(outputs, inputs, *[1] * (layer.weight.dim() - 2))
        layer.weight.data *= outer.detach()
        if layer.bias is not None:
            layer.bias.data.copy_(factors.bias[member])
    return result


class Tokens(nn.Module):
    """Layers that see tokens: as a third axis, and folded into the batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 12)
        self.mix = nn.Conv1d(12, 12, 3, padding=1, groups=3)
        self.each = nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.embed(x.flatten(1, 2)))  # [batch, 48 tokens, 12]
        x = F.relu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        x = F.relu(self.each(x.flatten(0, 1)))  # [batch x 48, 8]
        return self.head(x.unflatten(0, (-1, 48)).mean(1))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, groups=8),
        nn.Flatten(),
        nn.Linear(16 * 36, 4),
    )


@pytest.mark.parametrize("make", [networks.mlp, networks.resnet, networks.tied, Tokens, depthwise])
def test_each_member_is_the_network_with_its_weights_times_an_outer_product(make):
    network = make()
    ensemble = commit(plures.BatchEnsemble(network, members=3, init="given"))
    if make is networks.tied:  # one shared weight, but each of the two layers has factors of its own
        network[5].weight = nn.Parameter(network[5].weight.detach().clone())
    for factor in own(ensemble, network).values():
        if factor.bias is not None:
            factor.bias.data += torch.randn_like(factor.bias)
    logits = ensemble(images())
    for member in range(3):
        expected = member_network(ensemble, network, member)(images())
        torch.testing.assert_close(logits[member], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[0], logits[1])


def batch_norm_network():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def test_batch_norm_in_training_sees_all_members():
    network = batch_norm_network()
    ensemble = plures.BatchEnsemble(network, members=3)
    factors, shared = own(ensemble, network), ensemble.network.network.state_dict()

    def layer(name, x, member):
        f = factors[name]
        return F.linear(x * f.alpha[member], shared[f"{name}.weight"]) * f.gamma[member] + f.bias[member]

    hidden = [layer("1", images().flatten(1), member) for member in range(3)]
    norm = nn.BatchNorm1d(6)
    normed = norm(torch.cat(hidden)).relu().chunk(3)
    expected = torch.stack([layer("4", x, member) for member, x in enumerate(normed)])

    stage = open_stage(ensemble)
    torch.testing.assert_close(stage.logits(images()), expected)
    (trained,) = [module for module in stage.modules() if isinstance(module, nn.BatchNorm1d)]
    torch.testing.assert_close(trained.running_mean, norm.running_mean)
    torch.testing.assert_close(trained.running_var, norm.running_var)


def test_the_loss_is_the_mean_over_members_that_all_see_every_sample():
    stage = open_stage(plures.BatchEnsemble(networks.mlp(), members=3))
    logits = stage.logits(images())
    assert logits.shape == (3, 6, 4)
    expected = sum(F.cross_entropy(member, labels()) for member in logits) / 3
    torch.testing.assert_close(stage(images(), labels()), expected)


def test_weight_decay_leaves_the_factors_alone():
    network = networks.resnet()
    stage = open_stage(plures.BatchEnsemble(network, members=2))
    before = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(stage.parameter_groups(weight_decay=0.5), lr=0.1).step()
    factors = {id(p) for f in own(stage, network).values() for p in (f.alpha, f.gamma)}
    assert len(factors) == 2 * len(layers(network))
    for name, parameter in stage.named_parameters():
        kept = 1.0 if id(parameter) in factors else 0.95
        torch.testing.assert_close(parameter.detach(), before[name] * kept, msg=name)


def test_factors_and_biases_get_half_the_gradient():
    network = nn.Linear(5, 3)
    stage = open_stage(plures.BatchEnsemble(network, members=2))
    layer = stage.network.network
    own_values = {name: p.detach().clone().requires_grad_() for name, p in layer.members.named_parameters()}
    weight = layer.weight.detach().clone().requires_grad_()
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    losses = [
        F.cross_entropy(
            F.linear(x * own_values["alpha"][j], weight) * own_values["gamma"][j] + own_values["bias"][j], y
        )
        for j in range(2)
    ]
    torch.stack(losses).mean().backward()
    stage(x, y).backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    for name, reference in own_values.items():
        torch.testing.assert_close(getattr(layer.members, name).grad, 0.5 * reference.grad)


def test_factors_start_as_published():
    network = nn.Sequential(nn.Linear(2000, 3000), nn.Linear(3000, 10))
    for kind in ("alpha", "gamma"):
        gaussian = getattr(own(plures.BatchEnsemble(network), network)["0"], kind)
        assert gaussian.mean().item() == pytest.approx(1.0, abs=0.02)
        assert gaussian.std().item() == pytest.approx(0.5, abs=0.02)
        assert len({tuple(row.tolist()) for row in gaussian}) == 5  # no two members are alike


def test_a_member_costs_its_factors_and_biases_and_nothing_more():
    for make in (networks.mlp, networks.resnet):
        network = make()
        plain = sum(parameter.numel() for parameter in network.parameters())
        extra = 0
        for layer in layers(network).values():
            outputs, inputs = layer.weight.shape[:2]
            extra += 5 * (inputs + outputs) + (0 if layer.bias is None else 4 * outputs)
        ensemble = plures.BatchEnsemble(network, members=5)
        assert sum(parameter.numel() for parameter in ensemble.parameters()) == plain + extra


def test_given_weights_are_kept_and_fresh_ones_are_drawn():
    network = networks.resnet()
    given = plures.BatchEnsemble(network, init="given").network.network.stem.weight
    fresh = plures.BatchEnsemble(network, init="fresh").network.network.stem.weight
    assert torch.equal(given, network.stem.weight)
    assert not torch.equal(fresh, network.stem.weight)
    assert fresh.std().item() == pytest.approx(network.stem.weight.std().item(), rel=0.2)


def test_members_differ_in_attention_networks_too_with_and_without_gradients():
    ensemble = commit(plures.BatchEnsemble(networks.transformer(), members=2))
    with torch.no_grad():  # nn.TransformerEncoderLayer has a shortcut here that would pass the factors by
        fast = ensemble(images())
    torch.testing.assert_close(ensemble(images()), fast, rtol=1e-4, atol=1e-5)
    inside = ensemble.network.network.encoder.layers[0].linear1.members
    inside.gamma.data *= 2
    with torch.no_grad():
        assert not torch.allclose(ensemble(images()), fast)


def test_channels_last_changes_no_number():
    ensemble = commit(plures.BatchEnsemble(networks.resnet(), members=2))
    expected = ensemble(images())
    ensemble.to(memory_format=torch.channels_last)
    last = ensemble(images().to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


def test_a_table_beside_the_batch_is_not_tiled():
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x, table, scale=1.0):
            return self.fc(x + table) * scale

    ensemble = commit(plures.BatchEnsemble(WithTable(), members=2))
    x, table = torch.randn(3, 5), torch.randn(1, 5)
    torch.testing.assert_close(ensemble(x, table, scale=2.0), ensemble(x + table, torch.zeros(1, 5), scale=2.0))
    with pytest.raises(plures.PluresError, match="without a tensor"):
        ensemble()


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.embed(x).flatten(2).permute(2, 0, 1)).mean(0)  # [sequence, batch, width]


@pytest.mark.parametrize(
    ("network", "inputs", "sentence"),
    [
        (SequenceFirst(), images(), "first axis must be the batch"),
        (nn.Sequential(nn.Linear(5, 4), nn.Flatten(0)), torch.ones(3, 5), "one row of logits for each"),
    ],
)
def test_a_network_whose_first_axis_is_not_the_batch_is_refused_with_the_first_one(network, inputs, sentence):
    stage = open_stage(plures.BatchEnsemble(network, members=2))
    with pytest.raises(plures.PluresError, match=sentence):
        stage.logits(inputs)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (networks.mlp, {"members": 0}, "members=0"),
        (networks.mlp, {"members": 2.0}, "members=2.0"),
        (networks.mlp, {"members": True}, "members=True"),
        (networks.mlp, {"init": "old"}, "init='old'"),
        (nn.ReLU, {}, "no Linear or convolution"),
        (lambda: 3, {}, "must be an nn.Module, not int"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, options, sentence):
    with pytest.raises(plures.PluresError, match=sentence):
        plures.BatchEnsemble(make(), **options)
