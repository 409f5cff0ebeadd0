"""The promises that every method keeps, on every kind of network.

A new method joins with one entry in METHODS: its name in `plures`, and options that make it small and its start
random (it follows from `seed`, not from the network's weights). Where it stands out, its name goes into one of the sets
below. What only it promises is tested in a file of its own.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import CLASSES, DEVICE, images, labels

METHODS = [
    ("OrthogonalDropout", {"members": 2}),
    ("OrthogonalDropout", {"members": 3, "optimize_masks": False, "classifier": "split"}),
    ("OrthogonalDropout", {"members": 3, "schedule": "together"}),
    ("adapt", {"members": 3}),
    ("adapt", {"members": 2, "share": 0.2, "schedule": "together"}),
    ("Deterministic", {"init": "fresh"}),
    ("MCDropout", {"passes": 3, "init": "fresh"}),
    ("DeepEnsemble", {"members": 2}),
    ("DeepEnsemble", {"members": 3, "classifier": "fixed"}),
    ("BatchEnsemble", {"members": 2}),
    ("MIMO", {"members": 2}),
    ("Masksembles", {"members": 4}),
    ("PackedEnsemble", {"members": 2}),
]
NETWORKS = [networks.mlp, networks.resnet, networks.transformers_resnet]
RANDOM_PREDICTION = {"MCDropout"}  # its answer for a sample depends on the place of the sample in the batch
CHANGES = {"adapt"}  # its file belongs to the weights of the network, and not to its code alone
NEVER_ONE = {"OrthogonalDropout", "adapt", "MCDropout"}  # there is no ensemble of one, or it is not the plain network

SMALL_STEP = 0.01
UNTRAINED = {}
TRAINED = {}


def identify(value):
    if isinstance(value, tuple):
        name, options = value
        return "-".join([name, *(str(option) for option in options.values())])
    return value.__name__


every_method = pytest.mark.parametrize("method", METHODS, ids=identify)


def every_method_but(names):
    return pytest.mark.parametrize("method", [one for one in METHODS if one[0] not in names], ids=identify)


every_network = pytest.mark.parametrize("make_network", NETWORKS, ids=identify)


def build(method, network, **more):
    name, options = method
    return getattr(plures, name)(network, **{**options, **more})


def to_load_into(method, make_network):
    return make_network(seed=0 if method[0] in CHANGES else 9)


def count(method):
    options = method[1]
    return options.get("members", options.get("passes", 1))


def train(stage, steps=2):
    """Train for a moment, with random numbers that depend on the stage alone."""
    torch.manual_seed(sum(map(ord, stage.name)))
    optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=1e-4), lr=SMALL_STEP)
    for step in range(steps):
        optimizer.zero_grad()
        stage(images(6, seed=step), labels(6, seed=step)).backward()
        optimizer.step()


def train_all(ensemble):
    for stage in ensemble.stages():
        train(stage)
    return ensemble


def untrained(method, make_network):
    """An ensemble for one test alone: built once, copied for each test."""
    key = identify(method), make_network.__name__
    if key not in UNTRAINED:
        UNTRAINED[key] = build(method, make_network())
    return copy.deepcopy(UNTRAINED[key])


def trained(method, make_network):
    key = identify(method), make_network.__name__
    if key not in TRAINED:
        TRAINED[key] = train_all(untrained(method, make_network))
    return copy.deepcopy(TRAINED[key])


def first_open(ensemble):
    return ensemble.open(next(step for step in ensemble.plan() if not step.committed))


def state_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


# --- prediction


@every_network
@every_method
def test_logits_have_one_shape_for_any_batch(method, make_network):
    ensemble = trained(method, make_network)
    for batch in (1, 2, 5):
        logits = ensemble(images(batch))
        assert logits.shape == (count(method), batch, CLASSES)
        assert logits.isfinite().all()
    prediction = ensemble.predict(images(5), batch_size=2)  # the last batch is ragged
    assert prediction.members.shape == (count(method), 5, CLASSES)


@every_network
@every_method_but(RANDOM_PREDICTION)
def test_a_prediction_does_not_depend_on_the_rest_of_the_batch(method, make_network):
    ensemble = trained(method, make_network)
    together, alone = ensemble(images(5)), [ensemble(image[None]) for image in images(5)]
    torch.testing.assert_close(torch.cat(alone, 1), together, rtol=1e-4, atol=1e-5)
    in_batches = ensemble.predict(images(5), batch_size=2).probabilities
    torch.testing.assert_close(in_batches, ensemble.predict(images(5)).probabilities, rtol=1e-4, atol=1e-5)


@every_network
@every_method
def test_the_same_batch_gets_the_same_answer(method, make_network):
    ensemble = trained(method, make_network)
    before = torch.get_rng_state()
    assert torch.equal(ensemble(images()), ensemble(images()))
    assert torch.equal(before, torch.get_rng_state())


@every_method
def test_named_inputs_work_as_well(method):
    ensemble = trained(method, networks.transformers_resnet)
    assert torch.equal(ensemble(pixel_values=images()), ensemble(images()))
    by_name = ensemble.predict({"pixel_values": images()})
    assert torch.equal(by_name.probabilities, ensemble.predict(images()).probabilities)


@every_network
@every_method
def test_an_untrained_ensemble_does_not_predict(method, make_network):
    ensemble = untrained(method, make_network)
    with pytest.raises(plures.PluresError, match="trained"):
        ensemble(images())


@every_network
@every_method_but(NEVER_ONE)
def test_an_ensemble_of_one_equals_its_network(method, make_network):
    one = {"members": 1} if "members" in method[1] else {}
    ensemble = build(method, make_network(), **one)
    for stage in ensemble.stages():
        train(stage)
    stage.eval()
    expected = stage.logits(images()).reshape(1, 6, CLASSES)
    torch.testing.assert_close(ensemble(images()), expected, rtol=1e-5, atol=1e-6)


@every_network
@every_method
def test_train_and_eval_are_restored_and_predicting_changes_nothing(method, make_network):
    ensemble = trained(method, make_network)
    expected = ensemble.eval().predict(images()).probabilities
    before = state_of(ensemble)
    for mode in (True, False):
        ensemble.train(mode)
        assert torch.equal(ensemble.predict(images()).probabilities, expected)
        assert ensemble.training is mode
        norms = [module for module in ensemble.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        assert not any(norm.training for norm in norms)
    assert_same(state_of(ensemble), before)


@every_method
def test_what_is_no_network_is_refused_at_once(method):
    with pytest.raises(plures.PluresError, match="must be an nn.Module, not str"):
        build(method, "resnet18")


# --- seeds and training


@every_network
@every_method
def test_same_seed_same_weights_other_seed_other_weights(method, make_network):
    def start(seed):
        torch.manual_seed(seed + 100)  # nothing may depend on torch's own seed
        stage = first_open(build(method, make_network(), seed=seed))
        return state_of(stage) | dict(stage.named_buffers())  # masks are not in the state dict

    same, again, other = start(0), start(0), start(1)
    assert_same(same, again)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in same.items())


@every_network
@every_method
def test_every_trainable_parameter_learns_and_stands_in_one_group(method, make_network):
    for stage in untrained(method, make_network).stages():
        train(stage)
        parameters = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        assert parameters
        without = [name for name, parameter in parameters.items() if parameter.grad is None]
        assert without == []
        groups = stage.parameter_groups(weight_decay=0.125)
        grouped = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(map(id, parameters.values()))
        assert {group["weight_decay"] for group in groups} <= {0.0, 0.125}


@every_method
def test_training_lowers_the_loss(method):
    ensemble = untrained(method, networks.mlp)
    stage = first_open(ensemble)
    stage.eval()
    before = stage(images(), labels()).item()
    stage.train()
    for _ in range(10):
        train(stage, steps=1)
    stage.eval()
    assert stage(images(), labels()).item() < before


@every_network
@every_method
def test_any_batch_size_trains(method, make_network):
    stage = first_open(untrained(method, make_network))
    for batch in (1, 3, 6):
        assert stage(images(batch), labels(batch)).isfinite()


@every_method
def test_the_loss_is_the_users(method):
    ensemble = build(method, networks.mlp(), loss=lambda logits, targets: 0 * F.cross_entropy(logits, targets))
    assert first_open(ensemble)(images(), labels()) == 0


@every_network
@every_method
def test_a_stage_that_is_not_committed_leaves_no_trace(method, make_network):
    ensemble = untrained(method, make_network)
    before = state_of(ensemble)
    train(first_open(ensemble))
    assert_same(state_of(ensemble), before)


@every_network
@every_method
def test_the_users_network_is_left_alone(method, make_network):
    network = make_network().train()
    before, logits = state_of(network), plures.Deterministic(network)(images())
    train_all(build(method, network)).predict(images())
    assert network.training
    assert_same(state_of(network), before)
    assert torch.equal(plures.Deterministic(network)(images()), logits)


# --- storage, copies, devices


@every_network
@every_method
def test_save_and_load_are_bit_equal(method, make_network, tmp_path):
    ensemble = trained(method, make_network)
    plures.save(ensemble, tmp_path / "first.safetensors")
    torch.manual_seed(99)
    loaded = plures.load(tmp_path / "first.safetensors", to_load_into(method, make_network))
    assert torch.equal(loaded(images()), ensemble(images()))
    assert loaded.plan() == ensemble.plan()
    plures.save(loaded, tmp_path / "second.safetensors")
    assert (tmp_path / "first.safetensors").read_bytes() == (tmp_path / "second.safetensors").read_bytes()


@every_network
@every_method
def test_resumed_training_equals_uninterrupted_training(method, make_network, tmp_path):
    path = tmp_path / "ensemble.safetensors"
    ensemble = untrained(method, make_network)
    while not all(step.committed for step in ensemble.plan()):
        plures.save(ensemble, path)
        ensemble = plures.load(path, to_load_into(method, make_network))  # every stage in a new process
        stage = first_open(ensemble)
        train(stage)
        stage.commit()
    assert torch.equal(ensemble(images()), trained(method, make_network)(images()))


@every_network
@every_method
def test_state_dict_and_deepcopy_carry_everything(method, make_network):
    ensemble = trained(method, make_network)
    other = build(method, make_network(seed=9))
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other(images()), ensemble(images()))
    assert torch.equal(copy.deepcopy(ensemble)(images()), ensemble(images()))
    ensemble.load_state_dict(untrained(method, make_network).state_dict())  # back to the start
    assert not any(step.committed for step in ensemble.plan())


@every_network
@every_method
def test_to_moves_all_state(method, make_network):
    ensemble = trained(method, make_network)
    doubled = copy.deepcopy(ensemble).to(torch.float64)
    logits = doubled(images().double())
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), ensemble(images()), rtol=1e-3, atol=1e-4)
    # A tensor left behind on the CPU would not mix with those on another device.
    elsewhere = ensemble.to("meta")
    assert {tensor.device.type for tensor in elsewhere.state_dict().values()} <= {"meta", "cpu"}
    assert all(tensor.is_meta for tensor in (*elsewhere.parameters(), *elsewhere.buffers()))
    assert elsewhere(images().to("meta")).shape == (count(method), 6, CLASSES)


@every_network
@every_method
def test_bfloat16_autocast_trains_and_predicts(method, make_network):
    ensemble = untrained(method, make_network)
    stage = first_open(ensemble)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = stage(images(), labels())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in stage.parameters() if p.requires_grad)
    ensemble = trained(method, make_network)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        logits = ensemble(images())
    torch.testing.assert_close(logits.float(), ensemble(images()), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("method", {name: (name, options) for name, options in METHODS}.values(), ids=identify)
def test_stages_and_ensembles_compile(method):
    torch.compiler.reset()
    stage = first_open(untrained(method, networks.mlp))
    compiled = torch.compile(stage, backend="eager")
    torch.manual_seed(0)
    loss = compiled(images(), labels())
    torch.manual_seed(0)
    torch.testing.assert_close(loss, stage(images(), labels()))
    loss.backward()
    ensemble = trained(method, networks.mlp)
    compiled = torch.compile(ensemble, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), ensemble(images()))
    torch.compiler.reset()


@every_method
def test_an_ensemble_has_few_public_names(method) -> None:
    ensemble = untrained(method, networks.mlp)
    own = set(dir(ensemble)) - set(dir(nn.Module()))
    public = sorted(name for name in own if not name.startswith("_"))
    assert len(public) <= 25, public
    missing = [name for name in public if not getattr(getattr(plures, method[0]), name, name).__doc__]
    assert not missing, f"public names without a docstring: {missing}"


@every_method
def test_some_members_predict_what_they_predict_among_all(method) -> None:
    ensemble = trained(method, networks.mlp)
    every = ensemble.predict(images(5))
    some = [ensemble.trained[-1], *ensemble.trained[:-1]]
    found = ensemble.predict(images(5), members=some)
    torch.testing.assert_close(found.members, every.members[[ensemble.trained.index(one) for one in some]])
    assert ensemble.engine().trained == ensemble.trained == list(range(count(method)))
    for wrong in ([], [99], [0, 0]):
        with pytest.raises(plures.PluresError, match="members=.*use one or more of"):
            ensemble.predict(images(5), members=wrong)


@every_method
def test_an_untrained_ensemble_has_no_member_that_can_predict(method) -> None:
    assert untrained(method, networks.mlp).trained == []


@every_method
def test_arrays_and_losses_that_are_none_get_one_sentence(method) -> None:
    ensemble = trained(method, networks.mlp)
    with pytest.raises(plures.PluresError, match="numpy array: convert it with torch.from_numpy"):
        ensemble.engine().predict(images().cpu().numpy())


def test_a_loss_is_a_function() -> None:
    with pytest.raises(plures.PluresError, match="loss='mse'; give a function"):
        plures.DeepEnsemble(networks.mlp(), 2, loss="mse")


# --- a frozen network with adapters


@pytest.mark.parametrize("method", [METHODS[0], ("DeepEnsemble", {"members": 2})], ids=identify)
def test_adapters_are_the_members_and_the_frozen_network_is_there_once(method, tmp_path):
    pytest.importorskip("peft")
    test_save_and_load_are_bit_equal(method, networks.adapted, tmp_path)
    test_resumed_training_equals_uninterrupted_training(method, networks.adapted, tmp_path)
    test_state_dict_and_deepcopy_carry_everything(method, networks.adapted)
    test_to_moves_all_state(method, networks.adapted)
    test_every_trainable_parameter_learns_and_stands_in_one_group(method, networks.adapted)
    network, ensemble = networks.adapted(), trained(method, networks.adapted)
    trains = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
    once = sum(tensor.numel() for tensor in network.state_dict().values()) - sum(trains.values())
    most = once + (count(method) + 1) * sum(trains.values())  # and the start of each member
    for one in (ensemble, copy.deepcopy(ensemble), copy.deepcopy(ensemble).double()):
        assert sum(p.numel() for p in one.parameters()) <= most
        assert sum(tensor.numel() for tensor in one.tensors().values()) <= most
    first, second = (ensemble.checkout(member).state_dict() for member in range(2))
    assert {name for name, value in first.items() if not torch.equal(value, second[name])} == set(trains)
    starts = untrained(method, networks.adapted)
    if method[0] == "DeepEnsemble":
        first, second = (one.state_dict() for one in starts.networks)
        assert {name for name in trains if not torch.equal(first[name], second[name])} == {
            name for name in trains if "lora_B" not in name
        }
