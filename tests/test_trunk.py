"""The trunk: what is the same for all members is stored once and runs once, or everything runs as always."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from networks import images
from plures.exporting.exported import program_of
from plures.native.library import why_unavailable
from plures.trunk import Trunk, apart

CALLS: list[str] = []  # not in the modules: one that keeps a state runs as always


class Counted(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append("trunk")
        return super().forward(x)


class Network(nn.Module):
    """Two layers that members share, and what happens between and after them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Counted(3, 8, 3, padding=1)
        self.between = nn.ReLU() if between is None else between
        self.second = Counted(8, 8, 3, padding=1)
        self.own = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.first(x)))
        return self.head(F.relu(self.own(x.relu_())).mean((2, 3)))


def frozen(network: nn.Module) -> plures.Ensemble:
    for layer in (network.first, network.between, network.second):
        layer.requires_grad_(False)
    return plures.DeepEnsemble(network, members=3)


def split(network: nn.Module) -> plures.Ensemble:
    roles = {
        name: role if name.startswith(("own", "head")) else "shared" for name, role in plures.roles(network).items()
    }
    return plures.OrthogonalDropout(network, members=3, optimize_masks=False, roles=roles)


def trained(make: Callable[[nn.Module], plures.Ensemble], network: nn.Module) -> plures.Ensemble:
    ensemble = make(network)
    for stage in ensemble.stages():
        with torch.no_grad():
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01 * (1 + stage.member))
    return ensemble


both = pytest.mark.parametrize("make", [frozen, split])


def alone(ensemble: plures.Ensemble, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([ensemble.checkout(member)(x.clone()) for member in ensemble.trained])


def calls(predictor: plures.Ensemble, x: Tensor) -> int:
    """Count the calls of the trunk once it is known."""
    with torch.no_grad():
        predictor(x)
        CALLS.clear()
        predictor(x)
    return len(CALLS)


@both
def test_what_is_shared_runs_once_and_the_bits_are_those_of_the_members(make) -> None:
    ensemble = trained(make, Network())
    for predictor in (ensemble, ensemble.engine("unfolded", fold=False) if make is split else ensemble):
        for x in (images(5), images(2), images(5, seed=1)):
            with torch.no_grad():
                assert torch.equal(predictor(x), alone(ensemble, x))
        assert calls(predictor, images(5)) == 2
        with torch.inference_mode():
            inside = predictor(images(5))
        assert torch.equal(inside, alone(ensemble, images(5)))
        in_parts = predictor.predict(images(5), batch_size=2).members
        torch.testing.assert_close(in_parts, predictor.predict(images(5)).members)


def test_an_engine_says_how_much_runs_once() -> None:
    ensemble = trained(split, Network())
    engine = ensemble.engine("unfolded")
    assert engine.about == "unfolded"
    engine.predict(images())
    assert engine.about == "unfolded, 57% of the parameters run once"
    kept = [network.first.weight for network in engine.networks]
    assert all(one is kept[0] for one in kept)


@pytest.mark.skipif(why_unavailable() is not None, reason="the native library is unavailable")
def test_the_owned_engine_runs_it_once_too() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True))
    network.extend([nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)])
    roles = {name: "shared" if name[0] in "02" else role for name, role in plures.roles(network).items()}
    ensemble = plures.OrthogonalDropout(network, members=3, optimize_masks=False, roles=roles)
    for stage in ensemble.stages():
        stage.commit()
    engine, rows = ensemble.engine("owned"), []
    for layer in engine.network.modules():
        if type(layer) is nn.Conv2d:
            layer.register_forward_hook(lambda layer, args, output: rows.append(len(output)))
    for x in (images(8), images(4)):
        found, expected = engine.predict(x).members, alone(ensemble, x).softmax(2)
        torch.testing.assert_close(found, expected)
        assert torch.equal(x, images(len(x)))
    assert max(rows) == 8, "not once for each member"


def test_dropout_in_the_head_leaves_one_pass_through_the_rest() -> None:
    ensemble = plures.MCDropout(Network(), passes=4, sites=["head"])
    with torch.no_grad():
        first, again = ensemble(images()), ensemble(images())
    assert torch.equal(first, again)
    assert torch.equal(first, ensemble(images()).detach()), "with gradients, each pass runs all layers"
    assert calls(ensemble, images()) == 2


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class View(nn.Module):
    """What it returns is what it was given; what follows changes both."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


class Twice(nn.Module):
    """One layer, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + self.layer(x * 2)


class Counting(nn.Module):
    """A state that the outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + 0 * self.seen


class Parts(nn.Module):
    """A module that returns several tensors, of which the network changes one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)
        self.after = InPlace()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer(x).chunk(2, 1)
        self.after(parts[0])
        return torch.cat(parts, 1)


@both
@pytest.mark.parametrize("between", [InPlace, View, Twice, Counting, Parts], ids=lambda one: one.__name__)
def test_whatever_modules_do_the_members_answer_as_alone(make, between) -> None:
    ensemble = trained(make, Network(between()))
    for seed in range(3):
        x = images(4, seed=seed)
        with torch.no_grad():
            assert torch.equal(ensemble(x), alone(ensemble, x))
        assert torch.equal(x, images(4, seed=seed)), "the batch of the caller"


class Keeping(nn.Module):
    """A module that keeps what the network asks it for, where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Conv2d(8, 8, 1), []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.layer(x))
        return self.kept[-1] * 2


class Asking(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        return self.head(self.own(x + self.between.kept.pop()).mean((2, 3)))


def test_a_module_that_keeps_what_the_network_asks_for_runs_for_each_member(caplog: pytest.LogCaptureFixture) -> None:
    ensemble = trained(frozen, Asking(Keeping()))
    caplog.clear()
    with torch.no_grad():
        assert torch.equal(ensemble(images()), alone(ensemble, images()))
    assert "each member runs all of its layers" in caplog.text


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(1)


def test_modules_that_draw_run_for_each_member_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ensemble = trained(frozen, Network(nn.Sequential(Random(), nn.Conv2d(8, 8, 1))))
    caplog.clear()
    with torch.no_grad():
        ensemble(images())
    assert [one.message for one in caplog.records] == [
        "each member runs all of its layers: with shared ones run once, their outputs differ"
    ]
    assert calls(ensemble, images()) == 6


def test_hooks_of_the_user_see_every_member() -> None:
    ensemble = trained(frozen, Network())
    seen = []
    for network in ensemble.networks:
        network.second.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        ensemble(images())
    assert len(seen) == 3


@both
def test_gradients_reach_the_inputs_as_without_a_trunk(make) -> None:
    ensemble = trained(make, Network())
    with torch.no_grad():
        ensemble(images())
    x, y = (images().requires_grad_() for _ in range(2))
    ensemble(x).square().sum().backward()
    torch.stack([ensemble.checkout(member)(y) for member in range(3)]).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_change_of_the_weights_is_noticed() -> None:
    ensemble = trained(frozen, Network())
    assert calls(ensemble, images()) == 2
    with torch.no_grad():
        ensemble.networks[0].first.weight.mul_(2)  # of all members
        assert torch.equal(ensemble(images()), alone(ensemble, images()))
        ensemble.networks[1].first.weight = nn.Parameter(torch.zeros_like(ensemble.networks[1].first.weight))
        assert torch.equal(ensemble(images()), alone(ensemble, images()))


@both
def test_threads_and_copies(make) -> None:
    ensemble = trained(make, Network())
    ensemble = copy.deepcopy(ensemble)
    expected, found = alone(ensemble, images()), []

    def predict() -> None:
        with torch.no_grad():
            found.extend(ensemble(images()) for _ in range(5))

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(torch.equal(one, expected) for one in found)


@both
def test_an_exported_program_has_the_trunk_once(make) -> None:
    _, program = program_of(trained(make, Network()), images(3))
    convolutions = [node for node in program.graph.nodes if str(node.target).startswith("aten.conv2d")]
    assert len(convolutions) == 1 + 3 * 2, "what follows changes the output of the second one in place: it runs again"


@both
def test_stages_borrow_what_is_frozen_until_they_write_to_it(make) -> None:
    ensemble = make(Network())
    stage = next(ensemble.stages())
    own = ensemble.networks[0] if make is frozen else ensemble.network
    before = own.first.weight.detach().clone()
    stage(images(), torch.zeros(6, dtype=torch.int64)).backward()
    assert torch._C._is_cow_tensor(stage.network.first.weight), "no memory of its own"
    assert not torch._C._is_cow_tensor(stage.network.head.weight)
    with torch.no_grad():
        stage.network.first.weight.zero_()  # a loop that does not care what is frozen
    assert torch.equal(own.first.weight, before)
    with pytest.raises(plures.PluresError, match="'first.weight' of another ensemble"):
        stage.commit()


def test_a_frozen_embedding_keeps_what_it_has_for_padding() -> None:
    network = nn.Sequential(nn.Embedding(5, 8, padding_idx=0), nn.Flatten(), nn.Linear(16, 4))
    with torch.no_grad():
        network[0].weight[0] = 3.0  # as in many pre-trained networks
    network[0].requires_grad_(False)
    ensemble = plures.DeepEnsemble(network, members=2)
    assert all((one[0].weight[0] == 3.0).all() for one in ensemble.networks)


class Switched(nn.Module):
    """A layer that behaves as its parent says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tripled = nn.Linear(16, 16), False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (3 if self.tripled else 1)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.child, self.head = nn.Linear(16, 1), Switched(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.child.tripled = bool(self.gate(x).max() > 1)
        return self.head(self.child(x))


def test_a_switch_that_a_parent_sets_reaches_a_shared_module() -> None:
    torch.manual_seed(0)
    network = Parent()
    network.child.requires_grad_(False)
    ensemble = plures.DeepEnsemble(network, 3)
    for _ in ensemble.stages():
        pass
    members = [ensemble.checkout(member) for member in range(3)]
    with torch.no_grad():
        for batch in (torch.zeros(8, 16), *torch.randn(20, 8, 16)):  # all agree on the first
            torch.testing.assert_close(ensemble(batch), torch.stack([member(batch) for member in members]))


@pytest.mark.parametrize(
    "between", [nn.ReLU, nn.Dropout, InPlace, View, Twice, Counting, Parts], ids=lambda one: one.__name__
)
def test_in_training_the_trunk_runs_once_for_all_members_and_without_a_graph(between) -> None:
    """Members start alike: their logits are equal in eval mode, and in training mode if the trunk drops the same."""
    ensemble = plures.adapt(Network(between()), 3, last="own", share=0.1, schedule="together")
    stage = next(ensemble.stages())
    expected = ensemble.network.requires_grad_(False)(images())
    stage(images(), torch.zeros(6, dtype=torch.int64)).backward()
    CALLS.clear()
    logits = stage.logits(images())
    assert len(CALLS) == 2, "of each layer of the trunk one"
    assert torch.equal(logits, logits[:1].expand(3, -1, -1))
    assert torch.equal(stage.logits(images()), logits) is (between is not nn.Dropout)
    assert between is nn.Dropout or torch.equal(logits[0], expected)
    assert not any(one.requires_grad for one in stage.network.network.second.parameters())


def test_in_training_gradients_are_those_without_a_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        stage = next(plures.adapt(Network(), 3, last="own", share=0.1, schedule="together").stages())
        for _ in range(2):
            stage(images(), torch.zeros(6, dtype=torch.int64)).backward()
        return [one.grad for one in stage.parameters() if one.requires_grad]

    found = gradients()
    monkeypatch.setattr(Trunk, "trained", lambda self, batch, members: apart([batch], members))
    for one, expected in zip(found, gradients(), strict=True):
        torch.testing.assert_close(one, expected)
