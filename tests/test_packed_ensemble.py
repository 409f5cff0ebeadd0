import math

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


def disturb(ensemble):
    """Give all parameters and statistics other values, so that no two members and no two channels are alike."""
    random = torch.Generator().manual_seed(1)
    for tensor in (*ensemble.parameters(), *ensemble.buffers()):
        if tensor.is_floating_point():
            tensor.data += 0.1 * torch.rand(tensor.shape, generator=random)


class Residual(nn.Module):
    """Convolutions of every kind, a residual, a concatenation, group norm, batch norm, and flatten into a Linear."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(width, 2 * width, 3, padding=1, groups=width)
        self.norm2 = nn.GroupNorm(2, 2 * width)
        self.grouped = nn.Conv2d(2 * width, width, 1, groups=2)
        self.hidden = nn.Conv2d(2 * width, width, 3, stride=4, padding_mode="circular", padding=1)
        self.norm3 = nn.LayerNorm(width)
        self.fc = nn.Linear(width * 4, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        x = x + self.conv1(x)
        y = self.grouped(F.relu(self.norm2(self.depthwise(x))))
        x = F.relu(self.hidden(torch.cat([x, y], 1)))  # [batch, width, 2, 2]
        x = self.norm3(x.movedim(1, -1)).movedim(-1, 1)
        return self.fc(x.flatten(1))


class Tokens(nn.Module):
    """Linear layers that see tokens, as a third axis and on the batch axis, and batch norm over tokens."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.hidden = nn.Linear(width, 2 * width)
        self.fc = nn.Linear(2 * width, 4, bias=False)

    def forward(self, x):
        x = self.norm(self.stem(x.flatten(1, 2)).transpose(1, 2)).transpose(1, 2)  # [batch, 48 tokens, width]
        x = F.relu(self.hidden(x.flatten(0, 1)))  # [batch x 48, 2 width]
        return self.fc(x.unflatten(0, (-1, 48)).mean(1))


def member_network(ensemble, narrow, member):
    """Write one member out as a plain network: its share of every tensor, by blocks along the first axis."""
    packed = ensemble.network.network.state_dict()
    mine = {
        name: (packed[name] if tensor.dim() == 0 else packed[name].reshape(ensemble.members, *tensor.shape)[member])
        for name, tensor in narrow.state_dict().items()
    }
    narrow.load_state_dict(mine)
    return narrow


@pytest.mark.parametrize("make", [Residual, Tokens])
@pytest.mark.parametrize(("members", "alpha"), [(4, 2.0), (2, 1.0), (3, 1.5), (1, 1.0), (2, 3.0)])
def test_each_member_is_a_narrow_network_of_its_own(make, members, alpha):
    ensemble = plures.PackedEnsemble(make(16), members, alpha)
    disturb(ensemble)
    width = round(16 * alpha / members)
    commit(ensemble)
    stage = open_stage(plures.PackedEnsemble(make(16), members, alpha))
    stage.network.load_state_dict(ensemble.network.state_dict())
    predicted, training = ensemble(images()), stage.logits(images())
    assert predicted.shape == (members, 6, 4)
    for member in range(members):
        narrow = member_network(ensemble, make(width), member)
        torch.testing.assert_close(predicted[member], narrow.eval()(images()), rtol=1e-4, atol=1e-4)
        # In training, too: batch norm must see the rows of one member only.
        torch.testing.assert_close(training[member], narrow.train()(images()), rtol=1e-4, atol=1e-4)
    assert members == 1 or not torch.allclose(predicted[0], predicted[1])


def test_running_statistics_are_each_members_own():
    stage = open_stage(plures.PackedEnsemble(networks.resnet(), members=2))
    stage.logits(images())
    stem = stage.network.network.stem
    for member in range(2):
        weight = stem.weight.chunk(2)[member]
        own = F.conv2d(images(), weight, stride=2, padding=1).mean((0, 2, 3))
        torch.testing.assert_close(stage.network.network.norm.running_mean.chunk(2)[member], 0.1 * own)


@pytest.mark.parametrize(("reduction", "divisor"), [("sum", 1), ("mean", 4)])
def test_the_loss_is_that_of_each_member_or_their_mean_and_all_see_every_sample(reduction, divisor):
    stage = open_stage(plures.PackedEnsemble(networks.mlp(), members=4, reduction=reduction))
    logits = stage.logits(images())
    expected = sum(F.cross_entropy(member, labels()) for member in logits) / divisor
    torch.testing.assert_close(stage(images(), labels()), expected)


def test_one_pass_runs_all_members():
    calls = []

    class Counting(nn.Sequential):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    ensemble = commit(plures.PackedEnsemble(Counting(*networks.mlp()), members=4))
    calls.clear()
    ensemble(images())
    assert calls == [24]


def weights(network, *, hidden=False):
    found = [module.weight for module in network.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    matrices = [weight for weight in found if weight.dim() > 1]
    return sum(weight.numel() for weight in (matrices[1:-1] if hidden else matrices))


@pytest.mark.parametrize("make", [networks.mlp, networks.resnet])
def test_with_alpha_sqrt_members_there_are_as_many_weights_as_in_the_network(make):
    network = make()
    packed = plures.PackedEnsemble(network, members=4, alpha=2.0).network
    assert weights(packed, hidden=True) == weights(network, hidden=True)
    # The first layer makes alpha times the channels from the same input; the last has all classes for each member.
    first, *_, last = [layer.weight.numel() for layer in layers(network).values()]
    assert weights(packed) == weights(network) + first + last


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_alpha_scales_the_weights_as_published(alpha):
    network = networks.resnet()
    packed = plures.PackedEnsemble(network, members=4, alpha=alpha).network
    assert weights(packed, hidden=True) == weights(network, hidden=True) * alpha**2 / 4


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("make", [networks.mlp, networks.resnet, networks.group_norm_resnet, networks.tied])
def test_alpha_left_out_suits_any_number_of_members(make, members):
    ensemble = plures.PackedEnsemble(make(), members)
    coarse = make is networks.group_norm_resnet  # 16 channels in 4 groups: a member may have 4, 8, 12 ... of them
    assert ensemble.alpha == pytest.approx(math.sqrt(members), rel=0.35 if coarse else 0.1)
    if members in (1, 4):
        assert ensemble.alpha == math.sqrt(members)


def test_an_alpha_that_makes_no_whole_width_is_refused_with_one_that_does():
    with pytest.raises(
        plures.PluresError, match=r"6.4 of the 16 channels of 'stem'; use alpha=1.875 or 2.1875"
    ) as info:
        plures.PackedEnsemble(networks.resnet(), members=5, alpha=2.0)
    assert "leave it out" in str(info.value)
    for alpha in (1.875, 2.1875):
        assert plures.PackedEnsemble(networks.resnet(), members=5, alpha=alpha).alpha == alpha


def test_members_start_at_the_scale_of_the_network():
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    network.append(nn.Linear(256, 4))
    ensemble = plures.PackedEnsemble(network, members=4)
    start = ensemble.network.network
    plain = {name: layer.weight.std().item() for name, layer in layers(network).items()}
    assert start[1].weight.std().item() == pytest.approx(plain["1"], rel=0.05)  # as many inputs as before
    assert start[3].weight.std().item() == pytest.approx(plain["3"] * math.sqrt(2), rel=0.05)  # half as many
    members = start[3].weight.detach().flatten(1)
    assert torch.corrcoef(members).triu(1).abs().max() < 0.05  # and no two alike


def test_constant_values_stay_as_the_network_has_them():
    network = networks.resnet()
    nn.init.zeros_(network.blocks[0].norm2.weight)
    nn.init.zeros_(network.classifier.weight)
    start = plures.PackedEnsemble(network, members=4).network.network
    assert not start.blocks[0].norm2.weight.any()
    assert not start.classifier.weight.any()
    assert (start.blocks[0].norm1.weight == 1).all()


def test_tied_weights_stay_tied():
    start = plures.PackedEnsemble(networks.tied(), members=4).network.network
    assert start[3].weight is start[5].weight
    twice = nn.Linear(8, 8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), twice, nn.ReLU(), twice, nn.Linear(8, 4))
    start = plures.PackedEnsemble(network, members=4).network.network
    assert start[2] is start[4]


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.body = nn.Linear(768, 8)

    def forward(self, x):
        return self.head(F.relu(self.body(x.flatten(1))))


def test_the_first_and_last_layer_may_be_named():
    ensemble = commit(plures.PackedEnsemble(HeadFirst(), members=2, first="body", last="head"))
    assert ensemble(images()).shape == (2, 6, 4)


def test_channels_last_changes_no_number():
    ensemble = commit(plures.PackedEnsemble(networks.resnet(), members=4))
    expected = ensemble(images())
    ensemble.to(memory_format=torch.channels_last)
    last = ensemble(images().to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


def frozen():
    network = networks.mlp()
    network[3].requires_grad_(False)
    return network


def normalised(network):
    nn.utils.parametrizations.weight_norm(network[3])
    return network


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (networks.mlp, {"members": 0}, "members=0"),
        (networks.mlp, {"members": 2.5}, "members=2.5"),
        (networks.mlp, {"alpha": 0}, "alpha=0; use a number above 0"),
        (networks.mlp, {"alpha": float("nan")}, "alpha=nan"),
        (networks.mlp, {"alpha": "2"}, "alpha='2'"),
        (networks.mlp, {"alpha": 0.01}, "use alpha=0.125, or"),
        (networks.group_norm_resnet, {"alpha": 2.5}, "10 of the 16 channels of 'norm', in 4 groups; use alpha=2 or 3"),
        (networks.mlp, {"first": "2"}, "there is no Linear or convolution for first= '2'"),
        (networks.resnet, {"last": "clasifier"}, "did you mean classifier"),
        (networks.transformer, {}, "the network itself, Encoder, has parameters"),
        (lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4)), {}, "Embedding '0' has parameters"),
        (lambda: nn.Sequential(nn.Linear(9, 8), nn.LayerNorm([2, 4]), nn.Linear(8, 4)), {}, "several axes"),
        (frozen, {}, "Linear '3' is frozen"),
        (lambda: normalised(networks.mlp()), {}, "'3' has parameters"),
        (nn.ReLU, {}, "no Linear or convolution"),
        (dict, {}, "must be an nn.Module"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, options, sentence):
    with pytest.raises(plures.PluresError, match=sentence):
        plures.PackedEnsemble(make(), **options)
