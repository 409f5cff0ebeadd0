"""Deep ensemble: independent members, in any order, with their own classifiers or one fixed for all."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import CLASSES, images, labels
from plures import DeepEnsemble, PluresError
from plures.stage import Step
from plures.tensors import own_tensors


def train(stage, steps=2):
    torch.manual_seed(stage.member)
    optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=0.01), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        stage(images(6, seed=step), labels(6, seed=step)).backward()
        optimizer.step()


def trained(network, *args, **options):
    ensemble = DeepEnsemble(network, *args, **options)
    for stage in ensemble.stages():
        train(stage)
    return ensemble


def entries(module):
    return sum(parameter.numel() for parameter in module.parameters())


def start_of(ensemble, member):
    return ensemble.open(ensemble.plan()[member]).network


@pytest.mark.parametrize("make_network", networks.ALL, ids=lambda make: make.__name__)
def test_any_network_becomes_members_that_start_and_end_apart(make_network):
    network = make_network()
    ensemble = DeepEnsemble(network, members=2)
    first, second = (start_of(ensemble, member).state_dict() for member in range(2))
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert not torch.equal(first[f"{name}.weight"], second[f"{name}.weight"])
            torch.testing.assert_close(first[f"{name}.weight"].std(), module.weight.std(), rtol=0.2, atol=0.01)
    for stage in ensemble.stages():
        train(stage, steps=1)
    one, other = ensemble(images())
    assert one.shape == (6, CLASSES)
    assert not torch.allclose(one, other)


def test_a_member_starts_as_a_deterministic_network_of_the_same_seed():
    ensemble = DeepEnsemble(networks.resnet(), members=2, seed=7)
    alone = plures.Deterministic(networks.resnet(), init="fresh", seed=7)
    alone_start = alone.open(alone.plan()[0]).network.state_dict()
    for name, tensor in start_of(ensemble, 0).state_dict().items():
        assert torch.equal(tensor, alone_start[name])


def test_given_weights_are_where_every_member_starts():
    network = networks.resnet()
    ensemble = DeepEnsemble(network, members=2, init="given")
    for member in range(2):
        for name, tensor in start_of(ensemble, member).state_dict().items():
            assert torch.equal(tensor, network.state_dict()[name])


@pytest.mark.parametrize("classifier", ["private", "fixed"])
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_members_train_in_any_order_to_the_same_bits(order, classifier):
    expected = trained(networks.resnet(), 3, classifier=classifier)
    ensemble = DeepEnsemble(networks.resnet(), 3, classifier=classifier)
    open_at_once = {member: ensemble.open(ensemble.plan()[member]) for member in order}
    for done, member in enumerate(order):
        train(open_at_once[member])
        open_at_once[member].commit()
        assert ensemble.trained == sorted(order[: done + 1])
        assert len(ensemble(images())) == done + 1
    assert torch.equal(ensemble(images()), expected(images()))
    assert all(step.committed for step in ensemble.plan())


def test_members_trained_elsewhere_come_together():
    here = DeepEnsemble(networks.resnet(), members=2)
    for member in range(2):
        there = DeepEnsemble(networks.resnet(), members=2)  # what another process would build
        stage = there.open(there.plan()[member])
        train(stage)
        file = io.BytesIO()
        torch.save(stage.state_dict(), file)
        file.seek(0)
        stage = here.open(here.plan()[member])
        stage.load_state_dict(torch.load(file, weights_only=True))
        stage.commit()
    assert torch.equal(here(images()), trained(networks.resnet(), 2)(images()))


def test_a_partly_trained_ensemble_predicts_and_goes_on_after_loading(tmp_path):
    ensemble = DeepEnsemble(networks.resnet(), members=3, classifier="fixed")
    stage = ensemble.open(ensemble.plan()[1])
    train(stage)
    stage.commit()
    plures.save(ensemble, tmp_path / "some.safetensors")
    loaded = plures.load(tmp_path / "some.safetensors", networks.resnet(seed=5))
    assert loaded.trained == [1]
    assert torch.equal(loaded(images()), ensemble(images()))
    for stage in loaded.stages():
        assert stage.member in (0, 2)
        train(stage)
    assert torch.equal(loaded(images()), trained(networks.resnet(), 3, classifier="fixed")(images()))


def test_checkout_gives_a_plain_network_of_its_own():
    ensemble = trained(networks.resnet(), 2, classifier="fixed")
    before = ensemble(images())
    member = ensemble.checkout(1)
    assert type(member) is type(networks.resnet())
    assert not member.training
    assert torch.equal(member(images()), before[1])
    plain = networks.resnet(seed=3)
    plain.load_state_dict(ensemble.checkout(1).state_dict())
    assert torch.equal(plain.eval()(images()), before[1])
    with torch.no_grad():
        for parameter in member.parameters():
            parameter.zero_()
    assert torch.equal(ensemble(images()), before)


# --- the classifier


def test_size_is_one_network_per_member_with_a_fixed_classifier_once():
    network = networks.resnet()
    assert entries(DeepEnsemble(network, 5)) == 5 * entries(network)
    fixed = DeepEnsemble(network, 5, classifier="fixed")
    assert entries(fixed) == 5 * entries(network) - 4 * entries(network.classifier)
    stored = fixed.tensors()
    assert sum(tensor.numel() for name, tensor in stored.items() if "classifier" in name) == 32 * CLASSES + CLASSES


def test_a_fixed_classifier_is_the_networks_and_stays():
    network = networks.resnet()
    ensemble = trained(network, 3, classifier="fixed")
    for member in range(3):
        state = ensemble.checkout(member).state_dict()
        assert torch.equal(state["classifier.weight"], network.classifier.weight)
        assert torch.equal(state["classifier.bias"], network.classifier.bias)
    stage = DeepEnsemble(network, 2, classifier="fixed").open(Step("train", 0, False))
    frozen = {name for name, parameter in stage.network.named_parameters() if not parameter.requires_grad}
    assert frozen == {"classifier.weight", "classifier.bias"}
    trainable = {id(p) for group in stage.parameter_groups(0.1) for p in group["params"]}
    assert id(stage.network.classifier.weight) not in trainable


def test_no_stage_can_change_a_fixed_classifier():
    network = networks.resnet()
    ensemble = DeepEnsemble(network, 2, classifier="fixed")
    stage = ensemble.open(ensemble.plan()[0])
    with torch.no_grad():
        stage.network.classifier.weight.zero_()  # a loop that does not care what is frozen
    with pytest.raises(PluresError, match="shared tensor 'classifier.weight' of another ensemble"):
        stage.commit()
    assert torch.equal(ensemble.networks[1].classifier.weight, network.classifier.weight)


def test_a_private_classifier_is_each_members_own():
    ensemble = trained(networks.resnet(), 2)
    first, second = ensemble.checkout(0).state_dict(), ensemble.checkout(1).state_dict()
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])


def test_the_fixed_classifier_stays_one_tensor_when_copied_and_moved():
    ensemble = copy.deepcopy(DeepEnsemble(networks.resnet(), 3, classifier="fixed")).to(torch.float64)
    assert len({id(network.classifier.weight) for network in ensemble.networks}) == 1
    assert ensemble.networks[0].classifier.weight.dtype == torch.float64


def test_frozen_parameters_stay_frozen_and_are_stored_once():
    network = networks.resnet()
    network.stem.weight.requires_grad_(False)
    ensemble = trained(network, 2)
    assert all(torch.equal(ensemble.checkout(m).state_dict()["stem.weight"], network.stem.weight) for m in range(2))
    assert sum("stem" in name for name in ensemble.tensors()) == 1


def test_tied_weights_stay_tied_in_each_member():
    ensemble = trained(networks.tied(), 2)
    for member in range(2):
        network = ensemble.checkout(member)
        assert network[3].weight is network[5].weight
    assert len(ensemble.tensors()) == 2 * len(own_tensors(networks.tied()))


# --- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"members": 0}, "members=0"),
        ({"members": 2.0}, "members=2.0"),
        ({"classifier": "split"}, "classifier='split'; use one of private, fixed"),
        ({"init": "zeros"}, "init='zeros'; use one of given, fresh"),
    ],
)
def test_bad_options_are_refused_at_once(options, sentence):
    with pytest.raises(PluresError, match=sentence):
        DeepEnsemble(networks.resnet(), **options)


def test_a_fixed_classifier_needs_a_linear():
    convolutions = nn.Sequential(nn.Conv2d(3, CLASSES, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(PluresError, match="that could be the classifier"):
        DeepEnsemble(convolutions, 2, classifier="fixed")
    assert len(trained(convolutions, 2)(images())) == 2


def test_wrong_order_of_calls_is_refused():
    ensemble = DeepEnsemble(networks.mlp(), 2)
    with pytest.raises(PluresError, match="no member of this ensemble is trained"):
        ensemble(images())
    with pytest.raises(PluresError, match="member 0 is not trained; trained members: none"):
        ensemble.checkout(0)
    with pytest.raises(PluresError, match="there is no member 2"):
        ensemble.checkout(2)
    first, second = ensemble.open(ensemble.plan()[0]), ensemble.open(ensemble.plan()[0])
    first.commit()
    with pytest.raises(PluresError, match="out of date"):
        second.commit()
    with pytest.raises(PluresError, match="cannot be opened"):
        ensemble.open(ensemble.plan()[0])
    with pytest.raises(PluresError, match="cannot be opened"):
        ensemble.open(Step("finetune", 1, False))


def test_deterministic_is_the_network_itself():
    network = networks.resnet()
    ensemble = plures.Deterministic(network)
    assert torch.equal(ensemble(images())[0], network.eval()(images()))
    assert [(step.phase, step.member) for step in ensemble.plan()] == [("train", 0)]
    stage = next(ensemble.stages())
    expected = F.cross_entropy(copy.deepcopy(network).train()(images()), labels())
    torch.testing.assert_close(stage(images(), labels()), expected)
    train(stage)
    stage.commit()
    member = ensemble.checkout()
    assert type(member) is type(network)
    assert torch.equal(member(images()), ensemble(images())[0])
    assert torch.equal(member(images()), stage.network.eval()(images()))


def test_deterministic_refuses_what_it_cannot_do():
    ensemble = plures.Deterministic(networks.mlp(), init="fresh")
    with pytest.raises(PluresError, match="not trained"):
        ensemble.checkout()
    with pytest.raises(PluresError, match="there is no member 1"):
        ensemble.checkout(1)
    with pytest.raises(PluresError, match="init='zeros'; use one of given, fresh"):
        plures.Deterministic(networks.mlp(), init="zeros")
    with pytest.raises(PluresError, match="must be an nn.Module"):
        plures.Deterministic("resnet18")
    first, second = ensemble.open(ensemble.plan()[0]), ensemble.open(ensemble.plan()[0])
    first.commit()
    with pytest.raises(PluresError, match="out of date"):
        second.commit()
    with pytest.raises(PluresError, match="cannot be opened"):
        ensemble.open(ensemble.plan()[0])
