import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from masksembles import common as published
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import images, labels
from plures.methods.masksembles import masks
from plures.tensors import layers


def open_stage(ensemble):
    return ensemble.open(ensemble.plan()[0])


def commit(ensemble):
    open_stage(ensemble).commit()
    return ensemble


def masks_of(ensemble, name):
    return ensemble.network.network.get_submodule(name).members.masks


def member_network(ensemble, network, member):
    """Write one member out as a plain network: a masked input is a column of zeros in the weight."""
    result = copy.deepcopy(network).eval()
    result.load_state_dict({name: ensemble.network.network.state_dict()[name] for name in result.state_dict()})
    for name in ensemble.layers:
        result.get_submodule(name).weight.data[:, ~masks_of(ensemble, name)[member]] = 0
    return result


def mean_overlap(sets):
    together = [np.asarray(each, dtype=float) @ np.asarray(each, dtype=float).T for each in sets]
    return np.mean([shared[~np.eye(len(shared), dtype=bool)].mean() for shared in together])


# --- masks


@pytest.mark.parametrize("scale", [1.0, 1.3, 2.0, 3.5, 6.0])
@pytest.mark.parametrize("members", [1, 2, 4, 5, 10])
def test_masks_are_equally_large_and_use_every_channel(members, scale):
    for channels in (*range(1, 13), 16, 33, 64, 200):
        drawn = masks(channels, members, scale, torch.Generator().manual_seed(0))
        assert drawn.shape == (members, channels)
        assert drawn.dtype == torch.bool
        assert len(set(drawn.sum(1).tolist())) == 1
        assert drawn.any(0).all()


@pytest.mark.parametrize(
    ("channels", "members", "scale"), [(10, 4, 2.0), (16, 5, 2.0), (64, 4, 3.0), (64, 5, 1.5), (128, 5, 2.0)]
)
def test_masks_are_those_of_the_published_package(channels, members, scale):
    before = np.random.get_state()
    np.random.seed(0)  # it draws from numpy's global generator
    theirs = [published.generation_wrapper(channels, members, scale) for _ in range(25)]
    np.random.set_state(before)
    random = torch.Generator().manual_seed(0)
    ours = [masks(channels, members, scale, random) for _ in range(100)]
    ones = {int(mask.sum()) for each in theirs for mask in each}
    assert {int(mask.sum()) for each in ours for mask in each} == ones
    assert mean_overlap(ours) == pytest.approx(mean_overlap(theirs), rel=0.06)


def test_scale_sets_the_overlap():
    random = torch.Generator().manual_seed(0)
    drawn = [masks(256, 5, scale, random) for scale in (1.0, 1.5, 2.0, 4.0)]
    shares = [float(mean_overlap([each]) / each[0].sum()) for each in drawn]  # of a mask's channels, in another mask
    assert shares[0] == 1.0
    assert shares[1:] == pytest.approx([1 / 1.5, 1 / 2.0, 1 / 4.0], rel=0.15)


# --- the ensemble


@pytest.mark.parametrize("make", [networks.mlp, networks.resnet, networks.group_norm_resnet])
def test_each_member_is_the_network_without_the_channels_it_masks(make):
    network = make()
    ensemble = commit(plures.Masksembles(network, members=4))
    logits = ensemble(images())
    for member in range(4):
        expected = member_network(ensemble, network, member)(images())
        torch.testing.assert_close(logits[member], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[0], logits[1])


def test_with_scale_1_all_members_are_the_plain_network():
    network = networks.resnet()
    ensemble = commit(plures.Masksembles(network, members=3, scale=1, init="given"))
    expected = network.eval()(images())
    for logits in ensemble(images()):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


class Folded(nn.Module):
    """Tokens on the batch axis: a sample's tokens must all get the sample's mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 12)
        self.each = nn.Linear(12, 20)
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        x = F.relu(self.embed(x.flatten(1, 2)))  # [batch, 48 tokens, 12]
        x = F.relu(self.each(x.flatten(0, 1)))  # [batch x 48, 20]
        return self.head(x.unflatten(0, (-1, 48)).mean(1))


@pytest.mark.parametrize("make", [networks.mlp, networks.group_norm_resnet, Folded])
@pytest.mark.parametrize("batch", [1, 2, 4, 7, 8, 11])
def test_in_training_contiguous_groups_go_through_one_member_each(make, batch):
    network = make()
    ensemble = plures.Masksembles(network, members=4)
    stage = open_stage(ensemble)
    logits = stage.logits(images(batch))
    assert logits.shape == (1, batch, 4)
    each = torch.stack([member_network(ensemble, network, member)(images(batch)) for member in range(4)])
    fits = (each - logits).abs().amax(2) < 1e-4  # [members, batch]
    assert (fits.sum(0) == 1).all()
    owner = fits.int().argmax(0).tolist()
    changes = sum(first != second for first, second in pairwise(owner))
    assert changes == len(set(owner)) - 1  # each group is one run
    sizes = [owner.count(member) for member in range(4)]
    assert max(sizes) - min(sizes) <= 1
    if batch % 4 == 0:
        assert owner == sorted(owner)
        expected = F.cross_entropy(logits[0], labels(batch))
        torch.testing.assert_close(stage(images(batch), labels(batch)), expected)


def test_small_batches_reach_every_member():
    stage = open_stage(plures.Masksembles(networks.mlp(), members=4))
    torch.manual_seed(0)
    seen = {tuple(stage.logits(images(1)).flatten().tolist()) for _ in range(60)}
    assert len(seen) == 4


def test_a_stage_in_eval_mode_asks_all_members():
    stage = open_stage(plures.Masksembles(networks.resnet(), members=4)).eval()
    logits = stage.logits(images())
    assert logits.shape == (4, 6, 4)
    expected = sum(F.cross_entropy(member, labels()) for member in logits) / 4
    torch.testing.assert_close(stage(images(), labels()), expected)


def test_all_inputs_are_masked_but_the_first_layers():
    network = networks.resnet()
    ensemble = plures.Masksembles(network)
    assert ensemble.layers == list(layers(network))[1:]
    assert ensemble.layers[-1] == "classifier"
    for name in ensemble.layers:
        assert masks_of(ensemble, name).shape == (5, network.get_submodule(name).weight.shape[1])
    assert len({tuple(masks_of(ensemble, f"blocks.0.conv{i}").flatten().tolist()) for i in (1, 2)}) == 2


def test_masks_go_where_the_user_says():
    ensemble = plures.Masksembles(networks.resnet(), layers=["blocks.1.conv2", "stem"])
    masked = [name for name in ensemble.network.state_dict() if name.endswith("masks")]
    assert masked == ["network.stem.members.masks", "network.blocks.1.conv2.members.masks"]


def test_masks_follow_the_seed_alone_and_are_saved(tmp_path):
    def all_masks(ensemble):
        return torch.cat([masks_of(ensemble, name).flatten() for name in ensemble.layers])

    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = plures.Masksembles(networks.resnet(), seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(all_masks(first), all_masks(plures.Masksembles(networks.resnet(seed=1), seed=3)))
    assert not torch.equal(all_masks(first), all_masks(plures.Masksembles(networks.resnet(), seed=4)))

    masks_of(first, "classifier").logical_not_()  # masks that no seed gives
    plures.save(first, tmp_path / "masks.safetensors")
    loaded = plures.load(tmp_path / "masks.safetensors", networks.resnet())
    assert torch.equal(all_masks(loaded), all_masks(first))


def test_masks_are_no_weights():
    stage = open_stage(plures.Masksembles(networks.resnet()))
    plain = sum(parameter.numel() for parameter in networks.resnet().parameters())
    assert sum(parameter.numel() for parameter in stage.parameters()) == plain


def test_layers_narrower_than_ten_channels_are_masked_as_well():
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 3), nn.ReLU(), nn.Linear(3, 1), nn.Linear(1, 4))
    ensemble = commit(plures.Masksembles(network))
    assert masks_of(ensemble, "3").shape == (5, 3)
    assert ensemble(images()).shape == (5, 6, 4)


def test_attention_networks_predict_the_same_with_and_without_gradients():
    ensemble = commit(plures.Masksembles(networks.transformer(), members=3))
    with torch.no_grad():  # nn.TransformerEncoderLayer has a shortcut here that would pass the masks by
        fast = ensemble(images())
    torch.testing.assert_close(ensemble(images()), fast, rtol=1e-4, atol=1e-5)
    masks_of(ensemble, "encoder.layers.0.linear2").zero_()
    with torch.no_grad():
        assert not torch.allclose(ensemble(images()), fast)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (networks.mlp, {"members": 0}, "members=0"),
        (networks.mlp, {"members": "5"}, "members='5'"),
        (networks.mlp, {"scale": 0.9}, "scale=0.9; use a number from 1"),
        (networks.mlp, {"scale": 6.5}, "scale=6.5"),
        (networks.mlp, {"scale": float("nan")}, "scale=nan"),
        (networks.mlp, {"scale": "2"}, "scale='2'"),
        (networks.mlp, {"layers": ["4"]}, "no Linear or convolution for layers= '4'"),
        (networks.resnet, {"layers": ["clasifier"]}, "did you mean classifier"),
        (networks.mlp, {"layers": []}, "no layer to mask"),
        (networks.mlp, {"init": "old"}, "init='old'"),
        (lambda: nn.Linear(5, 4), {}, "no layer to mask"),
        (nn.ReLU, {}, "no Linear or convolution"),
        (lambda: None, {}, "must be an nn.Module"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, options, sentence):
    with pytest.raises(plures.PluresError, match=sentence):
        plures.Masksembles(make(), **options)
