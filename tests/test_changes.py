"""A stage writes its changes into its copy of the given network: nobody else may notice."""

import copy
import gc
import weakref
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize

import networks
import plures
from networks import images, labels
from plures.methods.orthogonal_dropout.masks import Change
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.storage import refill
from test_adapt import pretrained, train


def a_stage(ensemble: OrthogonalDropout, steps: int = 2) -> plures.Stage:
    """Open the next stage, and train it for some steps."""
    stage = ensemble.open(next(step for step in ensemble.plan() if not step.committed))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        stage(images(8, step), labels(8, step)).backward()
        optimizer.step()
    return stage


def answers(stage: plures.Stage) -> Tensor:
    """What the network of a stage predicts."""
    with torch.no_grad():
        return stage.eval().outputs(images())[0].clone()


def is_member(stage: plures.Stage, ensemble: OrthogonalDropout, member: int) -> bool:
    """Whether a member has the weights of a stage; the statistics of batch norms change at commit."""
    own = ensemble.checkout(member).state_dict()
    return all(torch.equal(attrgetter(name)(stage.network), own[name]) for name in ensemble.owners)


@pytest.mark.parametrize("share", [None, 0.1])
@pytest.mark.parametrize("make", [networks.mlp, networks.resnet])
def test_members_do_not_notice_an_open_stage(make: Any, share: float | None) -> None:
    ensemble = train(plures.adapt(pretrained(make), 3, share=share), stages=2)
    before, engine, state = ensemble(images()), ensemble.engine(), ensemble.state_dict()
    given = ensemble._split.given()
    stage = a_stage(ensemble)
    assert ensemble(images()).equal(before)
    assert ensemble.engine()(images()).equal(engine(images()))
    assert copy.deepcopy(ensemble)(images()).equal(before)
    assert all(one.equal(given[name]) for name, one in ensemble._split.given().items())
    trained = answers(stage)
    assert all(torch.equal(one, state[name]) for name, one in ensemble.state_dict().items() if isinstance(one, Tensor))
    assert answers(stage).equal(trained)
    stage.commit()
    assert ensemble(images())[:2].equal(before)
    assert is_member(stage, ensemble, 2)


def test_a_stage_that_is_kept_stays_as_it_is() -> None:
    ensemble = plures.adapt(pretrained(), 3, share=0.2)
    first = a_stage(ensemble)
    first.commit()
    expected, copied = answers(first), copy.deepcopy(first)
    assert is_member(first, ensemble, 0)
    second = a_stage(ensemble)
    own = answers(second)
    assert answers(first).equal(expected)
    assert answers(copied).equal(expected)
    assert answers(second).equal(own)
    second.commit()
    assert is_member(second, ensemble, 1)
    assert is_member(first, ensemble, 0)


def test_networks_of_stages_that_are_gone_stay_as_they_are() -> None:
    ensemble, kept = plures.adapt(pretrained(), 3, share=0.2), []
    for _ in range(3):
        stage = a_stage(ensemble)
        stage.commit()
        kept.append((stage.network, answers(stage)))
        del stage
    for network, expected in kept:
        with torch.no_grad():
            assert network(images()).equal(expected)


def test_a_stage_of_another_state_leaves_the_ensemble_alone() -> None:
    ensemble, other = (plures.adapt(pretrained(), 3, share=0.1, seed=seed) for seed in (0, 1))
    train(other)
    stage = a_stage(ensemble)
    ensemble.load_state_dict(other.state_dict())
    answers(stage)
    assert ensemble(images()).equal(other(images()))


def test_an_ensemble_is_filled_again_from_its_file(tmp_path: Path) -> None:
    network = pretrained()
    ensemble = train(plures.adapt(network, 3, share=0.1))
    plures.save(ensemble, tmp_path / "three.safetensors")
    trained = train(plures.adapt(network, 3, share=0.1, seed=5))
    refill(trained, tmp_path / "three.safetensors")
    assert trained(images()).equal(ensemble(images()))
    assert all(torch.equal(one, network.state_dict()[name]) for name, one in trained._split.given().items())


def test_a_file_in_half_precision_holds_changes_of_half_the_bytes(tmp_path: Path) -> None:
    sizes = []
    ensemble = train(plures.adapt(pretrained(), 3, share=0.2))
    for dtype in (torch.float32, torch.bfloat16):
        plures.save(ensemble, tmp_path / "three.safetensors", dtype=dtype)
        held = load_file(tmp_path / "three.safetensors")
        sizes.append(sum(one.nbytes for name, one in held.items() if name.removeprefix("member 0/") in ensemble.owners))
    assert sizes[1] * 2 == sizes[0]


class Clamped(nn.Linear):
    """A layer that writes into its weight."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(inputs)


def test_a_layer_that_writes_into_its_weight_does_not_write_into_the_given_one() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), Clamped(32, 32), nn.Linear(32, 4))
    ensemble = plures.adapt(network, 2, share=0.1)
    given = ensemble._split.given()
    for stage in ensemble.stages():
        stage(torch.randn(6, 192), labels(6)).backward()
        stage.commit()
    assert all(one.equal(given[name]) for name, one in ensemble._split.given().items())


class Normalised(nn.Module):
    """A network that writes into a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 32), nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.body.weight.data.mul_(0.9999)
        return self.head(self.body(inputs).relu())


def test_a_network_that_writes_into_a_layer_is_refused_and_the_ensemble_stays() -> None:
    ensemble = plures.adapt(Normalised(), 2, share=0.1)
    given = ensemble._split.given()
    stage = ensemble.open(ensemble.plan()[0])
    stage(torch.randn(6, 192), labels(6)).backward()
    with pytest.raises(plures.PluresError, match="the weights of 'body.weight' outside of its share"):
        stage.commit()
    assert all(one.equal(given[name]) for name, one in ensemble._split.given().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_stage_may_train_in_another_precision(dtype: torch.dtype) -> None:
    ensemble = plures.adapt(pretrained(networks.mlp), 2, share=0.1)
    for stage in ensemble.stages():
        stage.to(dtype)
        stage(images().to(dtype), labels()).backward()
        stage.float()
        stage.commit()
    assert ensemble.trained == [0, 1]


def test_a_file_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    ensemble = train(plures.adapt(pretrained(), 3, share=0.1))
    expected, other = ensemble(images()), pretrained()
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(1.3)
    plures.save(train(plures.adapt(other, 3, share=0.1)), tmp_path / "other.safetensors")
    with pytest.raises(plures.PluresError, match="belong to another network"):
        refill(ensemble, tmp_path / "other.safetensors")
    assert ensemble(images()).equal(expected)


@pytest.mark.parametrize("granularity", ["block", "kernel", "weight"])
def test_a_state_of_other_owners_is_loaded(granularity: Any) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 36), nn.ReLU(), nn.Linear(36, 44), nn.Linear(44, 4))
    several = [plures.adapt(network, 3, share=0.1, granularity=granularity, seed=seed) for seed in range(6)]
    train(several[0])
    for other in several[1:]:
        other.load_state_dict(several[0].state_dict())
        assert other(images()).equal(several[0](images()))


def test_an_ensemble_of_a_network_without_numbers_is_made() -> None:
    ensemble = plures.adapt(networks.mlp().to("meta"), 2, share=0.1, schedule="together")
    assert "of which each member changes" in repr(ensemble)


def test_of_two_stages_of_one_member_each_has_its_own_changes() -> None:
    ensemble = plures.adapt(pretrained(), 2, share=0.2)
    first = a_stage(ensemble, steps=1)
    expected = answers(first)
    second = a_stage(ensemble, steps=3)
    assert not answers(second).equal(expected)
    assert answers(first).equal(expected)
    second.commit()
    assert is_member(second, ensemble, 0)
    assert not is_member(first, ensemble, 0)


def test_a_stage_is_gone_when_its_loop_goes_on() -> None:
    ensemble, gone = plures.adapt(pretrained(), 3, share=0.1), []
    gc.collect()
    gc.disable()  # what waits for the collector is memory that a stage takes
    try:
        for stage in ensemble.stages():
            stage(images(), labels()).backward()
            gone += [weakref.ref(one) for one in stage.modules() if isinstance(one, Change)]
            del stage
        assert len(gone) == 18
        assert not any(one() is not None for one in gone)
    finally:
        gc.enable()


def changed(seed: int, share: float = 0.3) -> tuple[nn.Linear, nn.Linear, Tensor]:
    """A layer that trains changes, one that trains all, and where the changes are."""
    draw = torch.Generator().manual_seed(seed)
    layer, whole = nn.Linear(6, 5), nn.Linear(6, 5)
    whole.load_state_dict(layer.state_dict())
    mask = torch.rand(5, 6, generator=draw) < share
    mask[0, 0] = True
    change = Change(layer.weight.detach().clone(), mask)
    parametrize.register_parametrization(layer, "weight", change, unsafe=True)
    return layer, whole, mask


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from(["plain", "vmap", "functional", "no grad first"]))
def test_the_gradient_of_changes_is_that_of_the_weight_in_their_places(seed: int, uses: int, way: str) -> None:
    layer, whole, mask = changed(seed)
    values = layer.parametrizations.weight.original  # type: ignore[union-attr]
    batches = torch.randn(uses, 4, 6, generator=torch.Generator().manual_seed(seed + 1))
    for step in range(2):
        layer.zero_grad()
        whole.zero_grad()
        if way == "no grad first":
            with torch.no_grad():
                layer(batches[0])
        if way == "functional":
            own = {name: one.detach() for name, one in layer.named_parameters()}
            loss = lambda named: sum(functional_call(layer, named, (x,)).pow(2).sum() for x in batches)  # noqa: E731
            gradient = grad(loss)(own)["parametrizations.weight.original"]
        else:
            run = vmap(layer) if way == "vmap" else lambda xs: torch.stack([layer(x) for x in xs])
            losses = [one.pow(2).sum() for one in run(batches)]
            for loss in losses:  # all uses before the first backward pass, as in a layer that is called twice
                loss.backward(retain_graph=True)
            gradient = values.grad  # type: ignore[union-attr]
        sum(whole(x).pow(2).sum() for x in batches).backward()
        torch.testing.assert_close(gradient, whole.weight.grad[mask])
        with torch.no_grad():
            values.data.add_(0.1 * (step + 1))  # which autograd does not count
            whole.weight[mask] += 0.1 * (step + 1)
        assert layer.weight.equal(whole.weight)


def test_a_backward_pass_after_other_values_is_refused_as_torch_does() -> None:
    layer, _, _ = changed(1)
    output = layer(torch.randn(4, 6, requires_grad=True)).pow(2).sum()
    with torch.no_grad():
        layer.parametrizations.weight.original.add_(1)  # type: ignore[union-attr, operator]
    layer(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("background", ["zero", "given"])
def test_a_cached_stage_uses_the_weight_of_each_layer(background: str) -> None:
    """All layers had the weight of one within `parametrize.cached`, because they share a class."""
    network = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
    ensemble = OrthogonalDropout(network, 2, background=background)  # type: ignore[arg-type]
    stage = ensemble.open(ensemble.plan()[0])
    inputs = torch.randn(4, 30)
    expected = stage.outputs(inputs)
    with parametrize.cached():
        assert stage.outputs(inputs).equal(expected)
