"""Every tensor of a network gets the role that the method needs."""

import pytest
import torch
from torch import nn

import plures
from plures import PluresError, Role
from plures.methods.orthogonal_dropout.roles import check_roles
from plures.tensors import canonical


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 3)
        self.token = nn.Parameter(torch.zeros(1, 8))
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)


def test_roles_of_the_usual_layers() -> None:
    assert plures.roles(Small()) == {
        "token": "private",
        "stem.weight": "split",
        "stem.bias": "private",
        "norm.weight": "private",
        "norm.bias": "private",
        "norm.running_mean": "private",
        "norm.running_var": "private",
        "norm.num_batches_tracked": "private",
        "depthwise.weight": "private",
        "depthwise.bias": "private",
        "grouped.weight": "split",
        "grouped.bias": "private",
        "up.weight": "split",
        "up.bias": "private",
        "hidden.weight": "split",
        "hidden.bias": "private",
        "head.weight": "private",
        "head.bias": "private",
    }


def test_attention_projections_are_split_and_the_last_of_them_is_no_classifier() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    roles = plures.roles(network)
    assert roles["1.in_proj_weight"] == roles["1.out_proj.weight"] == "split"
    assert roles["1.in_proj_bias"] == "private"
    assert roles["0.weight"] == "private", "a small classifier"
    separate = plures.roles(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=4), nn.Linear(8, 2)))
    assert {name for name, role in separate.items() if role == "split"} == {
        "0.q_proj_weight",
        "0.k_proj_weight",
        "0.v_proj_weight",
        "0.out_proj.weight",
    }


def test_the_user_names_the_classifier() -> None:
    roles = plures.roles(Small(), last="hidden")
    assert (roles["hidden.weight"], roles["head.weight"]) == ("private", "split")


def test_classifiers_and_embeddings_are_private_where_they_are_small_and_split_where_they_are_large() -> None:
    network = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 400), nn.Linear(400, 100))
    roles = plures.roles(network)
    assert (roles["0.weight"], roles["2.weight"], roles["2.bias"]) == ("private", "split", "private")
    large = nn.Sequential(nn.Embedding(10_000, 8), nn.Linear(8, 400), nn.Linear(400, 10))
    assert (plures.roles(large)["0.weight"], plures.roles(large)["2.weight"]) == ("split", "private")
    assert plures.roles(large, embeddings="shared")["0.weight"] == "shared"
    with pytest.raises(PluresError, match="embeddings='frozen'; use one of"):
        plures.roles(large, embeddings="frozen")


def test_shared_embeddings_are_no_classifier() -> None:
    network = nn.Sequential(nn.Embedding(10_000, 8), nn.Linear(8, 400), nn.Linear(400, 10))
    roles = plures.roles(network, embeddings="shared")
    assert plures.OrthogonalDropout(network, members=2, roles=roles).options()["classifier"] == "private"
    split = plures.OrthogonalDropout(network, members=2, roles=roles, classifier="split").options()["roles"]
    assert (split["0.weight"], split["2.weight"]) == ("shared", "split")


def test_names_of_modules_are_checked() -> None:
    with pytest.raises(PluresError, match="last='haed' is not a module of the network; did you mean head"):
        plures.roles(Small(), last="haed")
    with pytest.raises(PluresError, match="is a BatchNorm2d"):
        plures.roles(Small(), last="norm")


def test_tied_tensors_have_one_role() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 8)
            self.read = nn.Linear(8, 10)
            self.read.weight = self.words.weight
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.head = nn.Linear(8, 3)

    network = Tied()
    roles = plures.roles(network)
    assert roles["words.weight"] == roles["read.weight"] == "private"
    assert roles["first.weight"] == roles["second.weight"] == "split"
    assert canonical(network)["second.weight"] == "first.weight"
    with pytest.raises(PluresError, match="'first.weight' and 'second.weight' are one tied tensor"):
        check_roles(network, {**roles, "second.weight": "private"})


def test_what_the_network_has_frozen_stays_frozen_and_shared() -> None:
    network = Small()
    network.stem.weight.requires_grad_(False)
    assert plures.roles(network)["stem.weight"] is Role.SHARED


def test_buffers_that_are_not_saved_have_no_role() -> None:
    network = Small()
    network.register_buffer("table", torch.zeros(3), persistent=False)
    assert "table" not in plures.roles(network)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"stem.wieght": "split"}, "roles name 'stem.wieght', which the network does not have; did you mean"),
        ({"stem.weight": "mine"}, "the role of 'stem.weight' is 'mine'; use one of split, private, shared"),
        ({"norm.running_mean": "split"}, "'norm.running_mean' is a buffer and cannot be split"),
    ],
)
def test_roles_that_cannot_hold_are_refused(edit: dict[str, str], message: str) -> None:
    network = Small()
    with pytest.raises(PluresError, match=message):
        check_roles(network, {**plures.roles(network), **edit})


def test_missing_roles_and_nothing_to_split_are_refused() -> None:
    network = Small()
    with pytest.raises(PluresError, match=r"roles lack 'token'"):
        check_roles(network, {})
    with pytest.raises(PluresError, match="LayerNorm has nothing to split"):
        plures.roles(nn.LayerNorm(4))
    with pytest.raises(PluresError, match="Linear has nothing to split: no tensor .past last=. has the role 'split'"):
        plures.OrthogonalDropout(nn.Linear(4, 3), classifier="fixed")
    assert plures.roles(nn.Linear(4, 3))["weight"] == "split", "the only layer is what there is to split"


@pytest.mark.parametrize("method", ["OrthogonalDropout", "DeepEnsemble", "MCDropout", "Deterministic", "Masksembles"])
def test_a_frozen_network_is_told_that_it_is_frozen(method: str) -> None:
    with pytest.raises(PluresError, match="all parameters of the network are frozen"):
        next(getattr(plures, method)(Small().requires_grad_(False)).stages())


def test_what_adapts_a_frozen_network_is_private_and_the_rest_is_stored_once(tmp_path) -> None:
    frozen = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()).requires_grad_(False)
    network = nn.Sequential(frozen, nn.Linear(100, 3))
    roles = plures.roles(network)
    assert {name for name, role in roles.items() if role is Role.PRIVATE} == {"1.weight", "1.bias"}
    assert {role for name, role in roles.items() if name.startswith("0.")} == {Role.SHARED}
    ensemble = plures.OrthogonalDropout(network, members=3)
    x = torch.randn(8, 6)
    for stage in ensemble.stages():
        assert stage.phase == "train"
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        stage(x, torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
    plures.save(ensemble, tmp_path / "adapted.safetensors")
    loaded = plures.load(tmp_path / "adapted.safetensors", network)
    assert torch.equal(loaded(x), ensemble(x))
    assert torch.equal(loaded.engine().predict(x).members, ensemble.predict(x).members)
    assert not torch.equal(ensemble(x)[0], ensemble(x)[1])
    assert sum(tensor.nbytes for tensor in ensemble.tensors().values()) < 1.2 * ensemble.given.nbytes


def test_the_last_pointwise_convolution_is_the_classifier_of_a_network_without_linear_layers() -> None:
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1))
    assert plures.roles(network)["4.weight"] is Role.PRIVATE
    assert plures.roles(network)["2.weight"] is Role.SPLIT
    assert plures.OrthogonalDropout(network, classifier="fixed").roles["4.weight"] is Role.SHARED
    assert plures.OrthogonalDropout(network).classifier == "private"
    assert plures.OrthogonalDropout(network, classifier="split").roles["4.weight"] is Role.SPLIT
    assert plures.roles(network[:3])["2.weight"] is Role.SPLIT, "a 3x3 convolution is no classifier"


def test_many_members_of_a_tiny_network_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    plures.OrthogonalDropout(network, members=5)
    assert not caplog.messages
    plures.OrthogonalDropout(network, members=100)
    assert "in 100 members takes" in caplog.text
    caplog.clear()
    plures.OrthogonalDropout(network, members=100, schedule="together")
    assert "in 100 members takes" in caplog.text
    assert "take fewer members" in caplog.text
