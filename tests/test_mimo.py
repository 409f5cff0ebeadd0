"""MIMO: how batches are formed, what the loss is, which layers change, and which networks are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import networks
import plures
from networks import CLASSES, images, labels
from plures import MIMO, PluresError
from plures.methods.mimo import shuffles


def entries(module):
    return sum(parameter.numel() for parameter in module.parameters())


def train(stage, steps=2):
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        stage(images(6, seed=step), labels(6, seed=step)).backward()
        optimizer.step()


def trained(network, *args, **options):
    ensemble = MIMO(network, *args, **options)
    for stage in ensemble.stages():
        train(stage)
    return ensemble


# --- batch formation and loss


@pytest.mark.parametrize(("members", "repetition"), [(1, 1), (2, 4), (3, 2)])
def test_each_slot_has_its_own_shuffle_of_the_repeated_batch(members, repetition):
    torch.manual_seed(0)
    rows = shuffles(16, members, repetition)
    assert rows.shape == (members, 16 * repetition)
    for row in rows:
        assert row.sort().values.tolist() == sorted(list(range(16)) * repetition)
    assert len(rows.unique(dim=0)) == members
    in_both = sum(bool((rows[:, column] == rows[0, column]).all()) for column in range(rows.shape[1]))
    assert members == 1 or in_both < rows.shape[1] / 4


@pytest.mark.parametrize("make_network", [networks.mlp, networks.group_norm_resnet])
def test_the_loss_is_that_of_a_plain_loop(make_network):
    members, repetition = 3, 2
    ensemble = MIMO(make_network(), members, batch_repetition=repetition)
    stage = next(ensemble.stages())
    x, y = images(5), labels(5)
    torch.manual_seed(11)
    loss = stage(x, y)
    torch.manual_seed(11)
    rows = shuffles(5, members, repetition).tolist()
    total = 0.0
    for sample in range(5 * repetition):
        stacked = torch.cat([x[rows[slot][sample]] for slot in range(members)], dim=0)[None]
        logits = stage.network.network(stacked)[0]
        for slot in range(members):
            head = logits[slot * CLASSES : (slot + 1) * CLASSES]
            total += -head.log_softmax(0)[y[rows[slot][sample]]]
    torch.testing.assert_close(loss, total / (5 * repetition))


def test_the_same_image_goes_into_all_slots_to_predict():
    ensemble = trained(networks.resnet(), 3)
    logits = ensemble(images(4))
    for sample, image in enumerate(images(4)):
        by_hand = ensemble.network.network(torch.cat([image, image, image], 0)[None])[0]
        for member in range(3):
            expected = by_hand[member * CLASSES : (member + 1) * CLASSES]
            torch.testing.assert_close(logits[member, sample], expected, rtol=1e-4, atol=1e-5)


def test_in_eval_mode_the_loss_is_that_of_the_predictions():
    stage = next(MIMO(networks.resnet(), 2).stages())
    stage.eval()
    expected = sum(F.cross_entropy(head, labels()) for head in stage.logits(images()))
    torch.testing.assert_close(stage(images(), labels()), expected)
    torch.testing.assert_close(stage({"x": images()}, labels()), expected)


def test_soft_targets_are_shuffled_with_their_images():
    ensemble = MIMO(networks.mlp(), 2)
    stage = next(ensemble.stages())
    torch.manual_seed(0)
    hard = stage(images(), labels())
    torch.manual_seed(0)
    torch.testing.assert_close(stage(images(), F.one_hot(labels(), CLASSES).float()), hard)


def test_members_learn_to_tell_their_slots_apart():
    torch.manual_seed(0)
    ensemble = MIMO(networks.mlp(), 2)
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            loss = stage(images(8), labels(8))
            loss.backward()
            optimizer.step()
    assert loss < 0.2  # every pair of images, each head its own: impossible for heads that see one slot alike
    assert (ensemble(images(8)).argmax(-1) == labels(8)).all()


# --- the widened network


@pytest.mark.parametrize("members", [1, 2, 4])
def test_only_the_first_and_the_last_layer_grow(members):
    network = networks.resnet()
    widened = MIMO(network, members).network.network
    extra = (members - 1) * (network.stem.weight.numel() + entries(network.classifier))
    assert entries(widened) == entries(network) + extra
    shapes = {name: tensor.shape for name, tensor in widened.state_dict().items()}
    changed = {name for name, tensor in network.state_dict().items() if shapes[name] != tensor.shape}
    assert changed == (set() if members == 1 else {"stem.weight", "classifier.weight", "classifier.bias"})
    assert (widened.stem.in_channels, widened.classifier.out_features) == (3 * members, CLASSES * members)


@pytest.mark.parametrize("make_network", networks.ALL, ids=lambda make: make.__name__)
def test_any_network_of_images_can_be_widened(make_network):
    ensemble = trained(make_network(), 2)
    assert ensemble(images(3)).shape == (2, 3, CLASSES)


def test_sequences_are_stacked_on_their_features():
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Flatten(), nn.Linear(56, CLASSES))
    ensemble = MIMO(network, 3, first="0")
    stage = next(ensemble.stages())
    stage(torch.randn(4, 7, 5), labels(4)).backward()
    stage.commit()
    assert ensemble(torch.randn(4, 7, 5)).shape == (3, 4, CLASSES)


def test_layers_can_be_named():
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.append(nn.Identity())
    ensemble = trained(network, 2, first="0", last="1")
    assert (ensemble.first, ensemble.last) == ("0", "1")
    assert ensemble(images()).shape == (2, 6, CLASSES)


def test_the_start_is_given_or_fresh_and_sums_are_as_large_as_before():
    network = networks.mlp()
    given, fresh = MIMO(network, 4, init="given"), MIMO(network, 4)
    assert torch.equal(given.network.network[3].weight, network[3].weight)
    assert not torch.equal(fresh.network.network[3].weight, network[3].weight)
    for ensemble in (given, fresh):
        first, last = ensemble.network.network[1].weight, ensemble.network.network[5].weight
        torch.testing.assert_close(first.std(), network[1].weight.std() / 2, rtol=0.05, atol=0.0)
        torch.testing.assert_close(last.std(), network[5].weight.std(), rtol=0.2, atol=0.0)
        assert len(first.reshape(32, 4, 768)[:, :, 0].unique()) == 32 * 4  # no slot repeats another


def test_a_file_remembers_the_layers(tmp_path):
    ensemble = trained(networks.resnet(), 3, batch_repetition=1)
    plures.save(ensemble, tmp_path / "mimo.safetensors")
    loaded = plures.load(tmp_path / "mimo.safetensors", networks.resnet(seed=4))
    assert loaded.options() == ensemble.options()
    assert loaded.options()["first"] == "stem"
    assert torch.equal(loaded(images()), ensemble(images()))


# --- refusals


class Auxiliary(nn.Module):
    """A network whose last Linear does not make the logits."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.other = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES), nn.Linear(8, 7)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))


def tied_ends():
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    network[2].weight = network[0].weight
    return network


def frozen_stem():
    network = networks.resnet()
    network.stem.weight.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("make_network", "sentence"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8, 2)),
            "cannot widen '0', the first layer: it must be a Linear",
        ),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2)), "cannot widen '0'"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 2, 3)), "cannot widen '1', the last layer"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, CLASSES)), "'1' cannot be the first and the last layer"),
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2)),
            "not frozen, tied or parametrized",
        ),
        (tied_ends, "cannot widen '0'"),
        (frozen_stem, "cannot widen 'stem'"),
    ],
)
def test_a_network_that_cannot_be_widened_is_refused_at_once(make_network, sentence):
    with pytest.raises(PluresError, match=sentence):
        MIMO(make_network(), 2)


def test_naming_the_layer_that_makes_the_logits_helps():
    with pytest.raises(PluresError, match="axis 1 is not the 14 outputs of 'other': name another layer with last="):
        trained(Auxiliary(), 2)
    assert trained(Auxiliary(), 2, last="fc")(images()).shape == (2, 6, CLASSES)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"members": 0}, "members=0"),
        ({"members": 1.5}, "members=1.5"),
        ({"batch_repetition": 0}, "batch_repetition=0"),
        ({"first": "stam"}, "did you mean stem"),
        ({"last": "norm"}, "there is no Linear or convolution for last= 'norm'"),
        ({"first": "classifier"}, "cannot be the first and the last layer"),
        ({"init": "zeros"}, "init='zeros'"),
    ],
)
def test_bad_options_are_refused_at_once(options, sentence):
    with pytest.raises(PluresError, match=sentence):
        MIMO(networks.resnet(), **options)


def test_inputs_other_than_one_tensor_are_refused():
    ensemble = trained(networks.resnet(), 2)
    with pytest.raises(PluresError, match="MIMO stacks one tensor"):
        ensemble(images(), images())
    with pytest.raises(PluresError, match="MIMO stacks one tensor"):
        ensemble(images(), x=images())
    with pytest.raises(PluresError, match="MIMO stacks one tensor"):
        ensemble.predict({"x": images(), "mask": images()})
