"""The promises of the method, on every kind of network."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import networks
import plures
from dear import few
from plures import OrthogonalDropout, PluresError
from plures.calling import logits_of


def train(stage: plures.Stage, inputs, targets, optimizer=None, clip: float | None = None, steps: int = 3) -> None:
    optimizer = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)))(
        [parameter for parameter in stage.parameters() if parameter.requires_grad]
    )
    for _ in range(steps):
        optimizer.zero_grad()
        stage(inputs, targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(stage.parameters(), clip)
        optimizer.step()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    )


INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=networks.ALL, ids=lambda make: make.__name__, scope="module")
def case(request):
    """A network, a batch for it, and the ensemble of three trained members that the tests below share."""
    network, inputs, targets = request.param(), networks.images(), networks.labels()
    ensemble = OrthogonalDropout(network, members=3)
    outputs = []
    for stage in ensemble.stages():
        train(stage, inputs, targets)
        if ensemble.trained:
            outputs.append(ensemble(inputs).detach())
    outputs.append(ensemble(inputs).detach())
    return network, inputs, ensemble, outputs


def test_owners_partition_every_split_tensor(case) -> None:
    network, _, ensemble, _ = case
    split = [name for name, role in plures.roles(network).items() if role == "split"]
    assert set(ensemble.owners) <= set(split)
    for name, owners in ensemble.owners.items():
        weight = dict(network.named_parameters())[name]
        assert owners.shape == (*weight.shape[:2], *[1] * (weight.dim() - 2)), "whole kernels have one owner"
        count = torch.bincount(owners.flatten().int(), minlength=3)
        assert count.sum() == owners.numel()
        assert count.numel() == 3, "nothing is free in the end"
        assert count.max() - count.min() <= 1


def test_members_share_no_weight(case) -> None:
    _, _, ensemble, _ = case
    states = [ensemble.checkout(member).state_dict() for member in range(3)]
    for name in ensemble.owners:
        used = torch.stack([state[name] != 0 for state in states]).sum(0)
        assert used.max() <= 1


def test_earlier_members_keep_every_bit(case) -> None:
    _, _, _, outputs = case
    for earlier, later in itertools.pairwise(outputs):
        assert later[: len(earlier)].equal(earlier)


def test_a_member_checked_out_is_the_member_inside(case) -> None:
    network, inputs, ensemble, _ = case
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            outputs = ensemble(inputs)
            for member in range(3):
                plain = ensemble.checkout(member)
                assert type(plain) is type(network)
                assert not plain.training
                assert logits_of(plain(inputs)).equal(outputs[member])
            loaded = copy.deepcopy(network)
            loaded.load_state_dict(ensemble.checkout(1).state_dict())
            assert logits_of(loaded.eval()(inputs)).equal(outputs[1])


def test_the_classifier_is_frozen_and_shared(case) -> None:
    network, _, ensemble, _ = case
    for name, role in ensemble.roles.items():
        if role == "shared":
            given = network.state_dict()[name]
            assert all(ensemble.checkout(member).state_dict()[name].equal(given) for member in range(3))


def test_it_saves_and_loads_to_the_bit(case, tmp_path) -> None:
    network, inputs, ensemble, _ = case
    plures.save(ensemble, tmp_path / "ensemble.safetensors")
    loaded = plures.load(tmp_path / "ensemble.safetensors", network)
    assert loaded(inputs).equal(ensemble(inputs))


def test_export_agrees_with_eager(case) -> None:
    network, inputs, _, _ = case
    ensemble = OrthogonalDropout(network, members=2, optimize_masks=False)
    next(ensemble.stages()).commit()
    with torch.no_grad():
        exported = torch.export.export(ensemble, (inputs,))
        torch.testing.assert_close(exported.module()(inputs), ensemble(inputs))


# What the others have for the compiler, these have, too: norm layers with buffers, attention, and outputs by name.
@pytest.mark.parametrize("make", [networks.resnet, networks.transformer, networks.tied, networks.transformers_vit])
def test_compile_agrees_with_eager(make) -> None:
    inputs = networks.images()
    ensemble = OrthogonalDropout(make(), members=2, optimize_masks=False)
    next(ensemble.stages()).commit()
    torch.compiler.reset()
    # The compiler's front end on a member of every network; what it makes of a graph of two is tested once, below.
    compiled = torch.compile(ensemble, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs), ensemble(inputs))


@pytest.mark.slow
def test_compiled_code_agrees_with_eager() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 4))
    ensemble = OrthogonalDropout(network, members=2, optimize_masks=False)
    for _ in ensemble.stages():
        pass
    torch.compiler.reset()
    with torch.no_grad():
        images = networks.images()
        torch.testing.assert_close(torch.compile(ensemble, fullgraph=True)(images), ensemble(images))


@pytest.mark.slow
def test_a_compiled_stage_trains_the_same_member() -> None:
    stage = next(OrthogonalDropout(mlp(), members=3).stages())
    trainable = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    torch.compiler.reset()
    found = []
    for run in (stage, torch.compile(stage, fullgraph=True, backend="aot_eager")):
        loss = run(INPUTS, TARGETS)
        found.append([loss.detach(), *torch.autograd.grad(loss, trainable)])
    torch.testing.assert_close(found[1], found[0])


optimizers = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov and weight decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
}


@given(
    optimizer=st.sampled_from(sorted(optimizers)),
    clip=st.sampled_from([None, 0.1]),
    members=st.integers(2, 6),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(
        {
            "optimize_masks": st.booleans(),
            "classifier": st.sampled_from(["fixed", "split", "private"]),
            "granularity": st.sampled_from(["weight", "kernel"]),
            "init": st.sampled_from(["fresh", "given"]),
        }
    ),
)
@few
def test_no_optimizer_moves_an_earlier_member(optimizer, clip, members, seed, options) -> None:
    ensemble = OrthogonalDropout(mlp(), members=members, seed=seed, **options)
    committed: torch.Tensor | None = None
    for stage in ensemble.stages():
        train(stage, INPUTS, TARGETS, optimizers[optimizer], clip)
        if committed is not None:
            assert ensemble(INPUTS)[: len(committed)].equal(committed)
        committed = ensemble(INPUTS) if ensemble.trained else None
    assert ensemble.trained == list(range(members))
    for owners in ensemble.owners.values():
        count = torch.bincount(owners.flatten().int(), minlength=members)
        assert count.numel() == members
        assert count.max() - count.min() <= 1


def test_the_stages_are_those_of_the_paper(caplog) -> None:
    caplog.set_level("INFO", logger="plures")
    ensemble = OrthogonalDropout(mlp(), members=3)
    seen = [(stage.member, stage.phase, stage.name) for stage in ensemble.stages()]
    assert [(member, phase) for member, phase, _ in seen] == [
        (0, "pretrain"), (0, "prune"), (0, "finetune"),
        (1, "pretrain"), (1, "prune"), (1, "finetune"),
        (2, "pretrain"), (2, "finetune"),
    ]  # fmt: skip
    assert seen[1][2] == "member 0 prune"
    assert "member 2 takes all remaining weights: its prune stage is skipped" in caplog.text
    assert all(step.committed for step in ensemble.plan())
    assert list(ensemble.stages()) == []
    random = OrthogonalDropout(mlp(), members=3, optimize_masks=False)
    assert [(stage.member, stage.phase) for stage in random.stages()] == [(0, "train"), (1, "train"), (2, "train")]
    given_ = OrthogonalDropout(mlp(), members=2, init="given")
    assert [stage.name for stage in given_.stages()] == [
        "member 0 prune",
        "member 0 finetune",
        "member 1 pretrain",
        "member 1 finetune",
    ]


def test_each_stage_trains_what_it_should() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, classifier="fixed")
    for stage in ensemble.stages():
        trainable = {name for name, parameter in stage.named_parameters() if parameter.requires_grad}
        scores = {name for name in trainable if name.endswith("scores")}
        weights = {name for name in trainable if name.endswith("original")}
        assert bool(scores) == (stage.phase == "prune")
        assert bool(weights) == (stage.phase != "prune")
        assert "network.1.weight" in trainable, "norm layers train in every stage"
        assert "network.5.weight" not in trainable, "the classifier is frozen"


def test_pretraining_uses_every_free_weight_and_finetuning_only_the_share() -> None:
    ensemble = OrthogonalDropout(mlp(), members=3)
    for stage in ensemble.stages():
        used = int((stage.network[3].weight != 0).sum())
        free = 576 - 192 * stage.member
        assert used == (free if stage.phase == "pretrain" else 192)


def test_pruning_starts_from_the_largest_weights() -> None:
    ensemble = OrthogonalDropout(mlp(), members=3)
    stages = ensemble.stages()
    pretrained = next(stages).network[3].weight.detach().clone()
    pruned = next(stages).network[3].weight
    assert pretrained[pruned != 0].abs().min() >= pretrained[pruned == 0].abs().max()


def test_a_fresh_start_has_the_scale_of_the_given_network_and_given_its_weights() -> None:
    network = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100), nn.Linear(100, 4))
    nn.init.normal_(network[0].weight, std=0.37)
    fresh = next(OrthogonalDropout(network, members=2).stages()).network[0].weight
    assert fresh.std().item() == pytest.approx(0.37, rel=0.05)
    assert not fresh.equal(network[0].weight)
    other = next(OrthogonalDropout(network, members=2, seed=1).stages()).network[0].weight
    assert not fresh.equal(other)
    again = next(OrthogonalDropout(network, members=2).stages()).network[0].weight
    assert fresh.equal(again)
    given_ = next(OrthogonalDropout(network, members=2, optimize_masks=False, init="given").stages()).network[0].weight
    assert given_[given_ != 0].equal(network[0].weight[given_ != 0])


def test_leaving_the_loop_discards_the_open_stage_and_keeps_the_committed() -> None:
    ensemble = OrthogonalDropout(mlp(), members=3)
    for stage in ensemble.stages():
        train(stage, INPUTS, TARGETS)
        if stage.name == "member 1 prune":
            break
    assert ensemble.trained == [0]
    assert next(step.name for step in ensemble.plan() if not step.committed) == "member 1 prune"
    outputs = ensemble(INPUTS)
    assert outputs.shape == (1, 16, 4)
    assert ensemble.predict(INPUTS).members.shape[0] == 1
    for _ in ensemble.stages():
        pass
    assert ensemble(INPUTS)[:1].equal(outputs)
    assert ensemble.trained == [0, 1, 2]


def test_a_loop_that_fails_loses_only_the_open_stage() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2)
    with pytest.raises(KeyboardInterrupt):
        for stage in ensemble.stages():
            if stage.phase == "finetune":
                raise KeyboardInterrupt
    assert next(ensemble.stages()).name == "member 0 finetune"


def test_stages_are_committed_once_and_in_order() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2)
    stages = ensemble.stages()
    first = next(stages)
    stale = next(ensemble.stages())
    first.commit()
    with pytest.raises(PluresError, match="'member 0 pretrain' is already committed"):
        first.commit()
    with pytest.raises(PluresError, match="out of date: 'member 0 prune' is next"):
        stale.commit()
    assert next(stages).name == "member 0 prune", "a stage committed by hand is not committed again"


def test_a_stage_with_nan_is_not_committed() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2)
    stage = next(ensemble.stages())
    with torch.no_grad():
        stage.network[1].bias[0] = torch.nan
    with pytest.raises(PluresError, match=r"has NaN or infinity in 'network\.1\.bias'"):
        stage.commit()
    assert not any(step.committed for step in ensemble.plan())


def test_a_callers_loss_is_used() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, loss=lambda logits, targets: logits.new_tensor(42.0))
    assert next(ensemble.stages())(INPUTS, TARGETS).item() == 42


@pytest.mark.parametrize("classifier", ["fixed", "split", "private"])
def test_what_becomes_of_the_classifier(classifier: str) -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, classifier=classifier)
    for stage in ensemble.stages():
        train(stage, INPUTS, TARGETS)
    one, two = (ensemble.checkout(member).state_dict()["5.weight"] for member in range(2))
    assert ("5.weight" in ensemble.owners) == (classifier == "split")
    assert one.equal(two) == (classifier == "fixed")
    assert bool(((one != 0) & (two != 0)).any()) == (classifier != "split")


def test_edited_roles_are_followed() -> None:
    network = mlp()
    roles = plures.roles(network)
    roles["0.weight"] = "private"
    ensemble = OrthogonalDropout(network, members=2, roles=roles)
    assert list(ensemble.owners) == ["3.weight"]


def test_the_given_network_is_left_alone_and_half_precision_works() -> None:
    network = mlp().bfloat16()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    ensemble = OrthogonalDropout(network, members=2)
    for stage in ensemble.stages():
        train(stage, INPUTS.bfloat16(), TARGETS, steps=1)
    assert ensemble(INPUTS.bfloat16()).dtype == torch.bfloat16
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())


def test_channels_last_networks_split_the_same_way() -> None:
    def outputs(layout: torch.memory_format) -> torch.Tensor:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        ).to(memory_format=layout)
        ensemble = OrthogonalDropout(network, members=2)
        images = torch.ones(2, 3, 8, 8).to(memory_format=layout)
        for stage in ensemble.stages():
            train(stage, images, torch.tensor([0, 1]))
        with torch.no_grad():
            assert ensemble.checkout(1)(images).equal(ensemble(images)[1])
        return torch.cat([owners.flatten() for owners in ensemble.owners.values()])

    same = outputs(torch.contiguous_format) == outputs(torch.channels_last)
    assert same.float().mean() > 0.95  # kernels differ in the last bits, so that a near tie may fall the other way


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 1}, "members=1; use a whole number, from 2 to 255"),
        ({"members": 300}, "members=300"),
        ({"members": 200}, "'0.weight' has 144 kernels and cannot be split among 200 members"),
        ({"init": "warm"}, "init='warm'; use one of fresh, given"),
        ({"classifier": "none"}, "classifier='none'; use one of private, split, fixed"),
        ({"granularity": "layer"}, "granularity='layer'"),
    ],
)
def test_bad_options_are_refused(options, message: str) -> None:
    with pytest.raises(PluresError, match=message):
        OrthogonalDropout(mlp(), **options)


def test_bad_networks_and_members_are_refused() -> None:
    with pytest.raises(PluresError, match="network must be an nn.Module, not str"):
        OrthogonalDropout("resnet18")  # type: ignore[arg-type]
    with pytest.raises(PluresError, match="that could be the classifier"):
        OrthogonalDropout(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), classifier="fixed")
    ensemble = OrthogonalDropout(mlp(), members=3)
    with pytest.raises(PluresError, match="no member of this ensemble is trained"):
        ensemble.predict(INPUTS)
    with pytest.raises(PluresError, match="member 0 is not trained; trained members: none"):
        ensemble.checkout(0)
    with pytest.raises(PluresError, match="there is no member 3: members count from 0 to 2"):
        ensemble.checkout(3)


def test_two_threads_predict_without_disturbing_each_other() -> None:
    ensemble = OrthogonalDropout(networks.resnet(), members=3, optimize_masks=False)
    for stage in ensemble.stages():
        train(stage, networks.images(), networks.labels(), steps=1)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    for predictor in (ensemble, ensemble.engine("unfolded")):
        batches = [networks.images(seed=seed) for seed in range(8)]
        expected = [predictor.predict(batch).probabilities for batch in batches]
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda batch, predictor=predictor: predictor.predict(batch).probabilities, batches * 5)
            assert all(answer.equal(right) for answer, right in zip(answers, expected * 5, strict=True))
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items())


def test_a_moving_average_of_a_stage_commits_into_the_ensemble() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, optimize_masks=False)
    stages = ensemble.stages()
    average = torch.optim.swa_utils.AveragedModel(next(stages))
    average.module.commit()
    assert ensemble.trained == [0]


def test_a_weight_read_with_and_without_gradient_still_learns() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            with torch.no_grad():
                hint = self.body(x)
            return self.head(self.body(x) + hint)

    stage = next(OrthogonalDropout(Twice(), members=2).stages())
    stage(INPUTS, TARGETS).backward()
    assert stage.network.body.parametrizations.weight.original.grad is not None


def test_a_loss_is_asked_for_again_after_loading(tmp_path) -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, loss=lambda logits, targets: logits.mean())
    for stage in ensemble.stages():
        stage.commit()
        break
    plures.save(ensemble, tmp_path / "e")
    with pytest.raises(PluresError, match="trained with a custom loss"):
        next(plures.load(tmp_path / "e", mlp()).stages())(INPUTS, TARGETS)
    again = plures.load(tmp_path / "e", mlp(), loss=lambda logits, targets: logits.mean())
    next(again.stages())(INPUTS, TARGETS)


def test_a_tied_network_is_another_network(tmp_path) -> None:
    untied = networks.tied()
    untied[5].weight = nn.Parameter(untied[3].weight.detach().clone())
    plures.save(OrthogonalDropout(untied, members=2), tmp_path / "e")
    with pytest.raises(PluresError, match="saved from another network; tied there"):
        plures.load(tmp_path / "e", networks.tied())


def test_statistics_with_nan_are_not_committed() -> None:
    stage = next(OrthogonalDropout(mlp(), members=2).stages())
    stage.network[1].running_mean[0] = torch.nan
    with pytest.raises(PluresError, match="running_mean"):
        stage.commit()


def test_owners_from_a_state_dict_are_checked() -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, optimize_masks=False)
    state = ensemble.state_dict()
    name = next(name for name in state if name.startswith("_partition."))
    state[name] = torch.full_like(state[name], 7)
    with pytest.raises(PluresError, match="beyond 1"):
        ensemble.load_state_dict(state)


def test_memory_formats_change_and_padding_stays_zero() -> None:
    OrthogonalDropout(networks.transformers_convnext(), members=2).to(memory_format=torch.channels_last)
    embedding = nn.Sequential(nn.Embedding(9, 8, padding_idx=2), nn.Flatten(), nn.Linear(24, 24), nn.Linear(24, 3))
    stage = next(OrthogonalDropout(embedding, members=2).stages())
    assert (stage.network[0].weight[2] == 0).all()
    assert stage.network[0].weight[3].abs().sum() > 0


def test_lazy_layers_are_refused_until_they_have_a_shape() -> None:
    with pytest.raises(PluresError, match="has no shape yet: run Sequential on a batch"):
        OrthogonalDropout(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))


def test_numbers_of_numpy_are_stored_as_numbers(tmp_path) -> None:
    ensemble = OrthogonalDropout(mlp(), members=2, seed=np.int64(3), optimize_masks=np.False_)
    plures.save(ensemble, tmp_path / "e")
    assert plures.load(tmp_path / "e", mlp()).options()["seed"] == 3


def test_masks_lie_in_memory_as_their_weights_do() -> None:
    network = networks.resnet().to(memory_format=torch.channels_last)
    stage = next(OrthogonalDropout(network, members=2, granularity="weight").stages())
    weight = stage.network.blocks[0].conv1.parametrizations.weight
    assert weight.original.is_contiguous(memory_format=torch.channels_last)
    assert weight[0].mask.stride() == weight.original.stride()
    assert stage.network.blocks[0].conv1.weight.stride() == weight.original.stride()
