"""Disjoint changes to a given network: what members keep, what they change, and the file of the changes."""

import copy
import logging
import pickle
import zlib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

import networks
import plures
from attack.forgery import Forgery
from networks import images, labels
from plures import PluresError
from plures.lab.cli.main import main
from plures.methods.orthogonal_dropout.masks import Change, mask_of, spread
from plures.methods.orthogonal_dropout.method import OrthogonalDropout
from plures.native.library import why_unavailable
from test_together import KINDS


def pretrained(make: Callable[..., nn.Module] = networks.resnet, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = make().to(dtype)
        with torch.no_grad():
            for batch in range(2):
                network.train()(images(8, batch).to(dtype))  # its batch norms have seen something
    return network.eval()


def train(ensemble: plures.Ensemble, stages: int = 100, dtype: torch.dtype = torch.float32) -> Any:
    for _, stage in zip(range(stages), ensemble.stages(), strict=False):
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            stage(images(8, step).to(dtype), labels(8, step)).backward()
            optimizer.step()
        stage.commit()
    return ensemble


@pytest.fixture(scope="module")
def adapted() -> OrthogonalDropout:
    ensemble: OrthogonalDropout = train(plures.adapt(pretrained(), 3, share=0.1))
    return ensemble


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(PluresError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("granularity", ["kernel", "weight"])
def test_together_and_alone_give_the_same_members(make: Callable[[], nn.Module], granularity: str) -> None:
    network = pretrained(make, torch.float64)
    options = {"share": 0.1, "granularity": granularity}
    alone = train(plures.adapt(network, 3, **options), dtype=torch.float64)
    together = train(plures.adapt(network, 3, schedule="together", **options), dtype=torch.float64)
    given = network.state_dict()
    for member in range(3):
        ours, theirs = together.checkout(member).state_dict(), alone.checkout(member).state_dict()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11, msg=f"{name} of member {member}")
        for name, owners in alone.owners.items():
            mine = (spread(owners, given[name]) == member).expand_as(given[name])
            assert torch.equal(theirs[name][~mine], given[name][~mine])
            assert not torch.equal(theirs[name][mine], given[name][mine])


def test_a_stage_trains_its_share_alone() -> None:
    network = pretrained()
    ensemble = plures.adapt(network, 4, share=0.05)
    stage = next(ensemble.stages())
    known = dict(network.named_parameters())
    whole = sum(known[name].numel() for name in ensemble.owners)
    private = sum(one.numel() for name, one in known.items() if ensemble.roles[name] == "private")
    trained = sum(one.numel() for one in stage.parameters() if one.requires_grad)
    assert trained <= 0.05 * whole + private
    assert ensemble.roles["classifier.weight"] == ensemble.roles["norm.weight"] == "private"


def test_a_stage_has_one_copy_of_the_given_weights_and_what_it_trains_is_its_share() -> None:
    """Five members one after the other take the memory of one: little beside the network and the given weights."""
    ensemble = plures.adapt(pretrained(), 5, share=0.02)
    stage = next(ensemble.stages())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    stage(images(), labels()).backward()
    optimizer.step()
    for name in ensemble.owners:  # no copy of them in each step
        weight, mask = attrgetter(name)(stage.network), cast(Change, mask_of(stage.network, name))
        assert weight.data_ptr() == mask.given.data_ptr()
    before = sum(one.nbytes for one in cast(Any, ensemble)._given.buffers())
    assert before < 0.11 * sum(ensemble.network.get_parameter(name).nbytes for name in ensemble.owners)
    trained = [one for one in stage.parameters() if one.grad is not None]
    kept = sum(one.nbytes for state in optimizer.state.values() for one in state.values())
    assert kept + sum(one.nbytes + one.grad.nbytes for one in trained) < 0.3 * ensemble.given.nbytes
    stage.commit()


def test_an_untrained_member_answers_as_the_given_network() -> None:
    network = pretrained()
    ensemble = plures.adapt(network, 2)
    for stage in ensemble.stages():
        assert torch.equal(stage.eval().logits(images()), network(images()))
        stage.commit()
    torch.testing.assert_close(ensemble(images()), network(images()).expand(2, -1, -1))


def test_engines_and_copies_see_the_given_network(adapted: OrthogonalDropout) -> None:
    expected = torch.stack([adapted.checkout(member)(images()) for member in range(3)])
    assert torch.equal(adapted(images()), expected)
    assert torch.equal(copy.deepcopy(adapted)(images()), expected)
    assert adapted.engine().kind == "unfolded", "convolutions run member by member"
    torch.testing.assert_close(adapted.engine("unfolded")(images()), expected)


# --- the file


@pytest.mark.parametrize("share", [None, 0.2, 0.02])
@pytest.mark.parametrize("base", [False, True])
def test_a_file_of_changes(tmp_path: Path, share: float | None, base: bool) -> None:
    network, path = pretrained(networks.transformer), tmp_path / "changes.safetensors"
    ensemble = train(plures.adapt(network, 3, share=share))
    plures.save(ensemble, path, base=base)
    reader = networks.transformer(seed=9) if base else network
    loaded = plures.load(path, reader)
    assert torch.equal(loaded(images()), ensemble(images()))
    plures.save(loaded, tmp_path / "again.safetensors", base=base)
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    stored = {name.partition("/")[0] for name in Forgery(path).tensors}
    assert ("given" in stored) is base
    assert "owners" in stored


class Block(nn.Module):
    """A block of linear layers that notes how many rows it sees; `inplace` changes what it is given."""

    rows: ClassVar[list[Any]] = []

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.act, self.up, self.down = nn.ReLU(inplace), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return x + self.down(torch.relu(self.up(self.act(x)) * mask))


class Blocks(nn.Module):
    """Blocks that torch.fx cannot trace, or can, of which some see what all members share."""

    def __init__(self, inplace: bool = False, traced: bool = False) -> None:
        super().__init__()
        self.stem, self.traced = nn.Linear(6, 12), traced
        self.blocks = nn.ModuleList(Block(inplace) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.traced and x.dim() > 5:
            raise ValueError(x.shape)
        x, mask = self.stem(x), mask[:, None] * 1.0
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def changed(network: nn.Module, last: int | None, members: int = 3) -> OrthogonalDropout:
    ensemble = plures.adapt(network.eval(), members, share=0.1, last=last)
    generator = torch.Generator().manual_seed(0)
    for stage in ensemble.stages():
        with torch.no_grad():
            for one in stage.parameters():
                if one.requires_grad:
                    one.add_(torch.randn(one.shape, generator=generator) * 0.3)
        stage.commit()
    return ensemble


@pytest.mark.skipif(why_unavailable() is not None, reason="the native library is unavailable")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("last", [None, 2])
def test_members_run_side_by_side_after_what_they_share(inplace: bool, traced: bool, last: int | None) -> None:
    ensemble = changed(Blocks(inplace, traced), last)
    engine = ensemble.engine()
    assert engine.kind == "owned"
    for size in (1, 4, 3, 6):
        x = torch.randn(size, 6), torch.rand(size)
        with torch.no_grad():
            expected = torch.stack([ensemble.checkout(member)(*x) for member in range(3)])
        for one in (engine, copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
            with torch.no_grad():
                torch.testing.assert_close(one(*x), expected)
        with torch.inference_mode():
            torch.testing.assert_close(engine(*[part.clone() for part in x]), expected)
        for some in ([0, 2], [1]):
            found = engine.predict(x, members=some).members
            torch.testing.assert_close(found, expected[some].softmax(-1))
    assert "owned" in engine.about, "the first batches are as those of the members"
    Block.rows.clear()
    engine.predict((torch.randn(5, 6), torch.rand(5)))
    assert Block.rows == ([15] * 4 if last is None else [5, 5, 15, 15])
    assert ("run once" in engine.about) == (last is not None)


@pytest.mark.skipif(why_unavailable() is not None, reason="the native library is unavailable")
def test_samples_that_influence_each_other_run_apart(caplog: pytest.LogCaptureFixture) -> None:
    class Mixing(Blocks):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x - x.mean(0), mask)

    ensemble = changed(Mixing(), 2)
    engine = ensemble.engine("owned")
    for size in (4, 3):
        x = torch.randn(size, 6), torch.rand(size)
        with torch.no_grad():
            expected = torch.stack([ensemble.checkout(member)(*x) for member in range(3)])
            torch.testing.assert_close(engine(*x), expected)
    assert sum("runs each member as a separate network" in one.message for one in caplog.records) == 1


def test_the_file_of_a_small_share_is_small(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        network = nn.Sequential(nn.Embedding(3000, 64), nn.Flatten(), *(nn.Linear(256, 256) for _ in range(3)))
        network.append(nn.Linear(256, 4))
    for share, bar in ((0.2, 0.62), (0.02, 0.12)):
        plures.save(plures.adapt(network, 5, share=share), tmp_path / "untrained.safetensors")
        ensemble = plures.adapt(network, 5, share=share)
        for stage in ensemble.stages():
            stage.commit()
        plures.save(ensemble, tmp_path / "small.safetensors")
        size = (tmp_path / "small.safetensors").stat().st_size
        assert size < bar * ensemble.given.nbytes
        assert (tmp_path / "untrained.safetensors").stat().st_size < size
        assert float(repr(ensemble).split()[-5]) == pytest.approx(size / ensemble.given.nbytes, abs=0.02)


def test_half_precision_keeps_changes_that_are_smaller_than_a_bit(tmp_path: Path) -> None:
    network, path = pretrained(networks.mlp), tmp_path / "half.safetensors"
    ensemble = plures.adapt(network, 2, share=0.2)
    for stage in ensemble.stages():
        with torch.no_grad():
            stage.get_parameter("network.1.parametrizations.weight.original").add_(1e-5)
        stage.commit()
    plures.save(ensemble, path, dtype=torch.bfloat16)
    loaded = plures.load(path, network)
    for member in range(2):
        wanted, found = (one.checkout(member).get_parameter("1.weight") for one in (ensemble, loaded))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7)
        assert not torch.equal(found, network.get_parameter("1.weight"))


def test_another_base_is_refused(adapted: OrthogonalDropout, tmp_path: Path) -> None:
    path, other = tmp_path / "changes.safetensors", pretrained()
    plures.save(adapted, path)
    with torch.no_grad():
        other.get_parameter("classifier.weight").add_(1)  # a new head is made at random, and every member has its own
    assert torch.equal(plures.load(path, other)(images()), adapted(images()))
    with torch.no_grad():
        other.get_parameter("blocks.1.conv1.weight")[0, 0, 0, 0] += 1
    assert "another network: 'blocks.1.conv1.weight' differs" in refused(lambda: plures.load(path, other))
    assert "in float32, and 'stem.weight' is in bfloat16" in refused(
        lambda: plures.load(path, pretrained().to(torch.bfloat16))
    )


def test_a_half_trained_file_goes_on(tmp_path: Path, adapted: OrthogonalDropout) -> None:
    ensemble = train(plures.adapt(pretrained(), 3, share=0.1), stages=1)
    plures.save(ensemble, tmp_path / "part.safetensors")
    loaded = plures.load(tmp_path / "part.safetensors", pretrained())
    assert loaded.trained == [0]
    assert torch.equal(train(loaded)(images()), adapted(images()))


def test_forged_changes_are_refused(adapted: OrthogonalDropout, tmp_path: Path) -> None:
    path = tmp_path / "changes.safetensors"
    plures.save(adapted, path)
    name = "blocks.0.conv1.weight"
    place = f"owners/{name}"

    def load(change: Callable[[Forgery], None]) -> str:
        forged = Forgery(path)
        change(forged)
        (tmp_path / "forged.safetensors").write_bytes(forged.file())
        return refused(lambda: plures.load(tmp_path / "forged.safetensors", pretrained()))

    def put(name: str, value: Tensor) -> Callable[[Forgery], None]:
        return lambda forged: forged.tensors.__setitem__(name, value)

    def compressed(owners: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(zlib.compress(owners.numpy().tobytes())), dtype=torch.uint8)

    owners = adapted.owners[name].clone()
    assert "does not hold the owners" in load(put(place, torch.zeros(1, dtype=torch.uint8)))
    assert "cannot be read" in load(put(place, torch.zeros(100)))
    for wrong in (owners[1:], torch.zeros(10**7, dtype=torch.uint8)):
        assert f"does not hold the owners of {owners.numel()} entries" in load(put(place, compressed(wrong)))
    assert "does not hold the owners" in load(put(place, compressed(owners)[:-1]))
    assert "its share is" in load(put(place, compressed(owners.masked_fill(owners == 1, 0))))
    assert "name a member beyond" in load(put(place, compressed(owners.masked_fill(owners == 1, 7))))
    assert "share=0.9" in load(lambda forged: forged.document["options"].update(share=0.9))
    assert "share=" in load(lambda forged: forged.document["options"].update(share="x"))
    assert "background=" in load(lambda forged: forged.document["options"].update(background="x"))
    assert "cannot be read" in load(lambda forged: forged.document["state"].update(base={}))
    assert "is missing" in load(put(f"given/{name}", torch.zeros(16, 16, 3, 3)))


# --- other doors


def test_export(tmp_path: Path) -> None:
    ensemble = train(plures.adapt(networks.mlp(), 2))
    plures.export(ensemble, tmp_path / "birds.pt2", images())
    program = torch.export.load(tmp_path / "birds.pt2").module()
    torch.testing.assert_close(program(images())["members"], ensemble.predict(images()).members)


def test_a_run_folder_contains_the_given_network(tmp_path: Path) -> None:
    few = ["--width", "16", "--limit", "200", "--epochs.train", "1"]
    assert main(["train", "digits", "--method", "deterministic", *few, "--run", str(tmp_path / "one")]) == 0
    changes = ["--set", "background=given", "--set", "share=0.1", "--members", "2", "--weights", str(tmp_path / "one")]
    assert main(["train", "digits", *changes, *few, "--run", str(tmp_path / "changes")]) == 0
    assert main(["evaluate", str(tmp_path / "changes")]) == 0


def test_only_the_last_blocks_change() -> None:
    network = pretrained()
    ensemble = plures.adapt(network, 2, last=1, share=0.1)
    roles = ensemble.roles
    assert {roles[name] for name in roles if name.startswith(("stem", "norm", "blocks.0"))} == {plures.Role.SHARED}
    assert (roles["blocks.1.conv1.weight"], roles["classifier.bias"]) == ("split", "private")
    assert roles == plures.adapt(network, 2, last="blocks.1", share=0.1).roles
    assert roles == plures.adapt(network, 2, last="*.1", share=0.1).roles
    train(ensemble)  # statistics of shared batch norms stay as they are
    kept, given = ensemble.checkout(0).state_dict(), network.state_dict()
    assert all(torch.equal(kept[name], given[name]) for name, role in roles.items() if role == "shared")
    with pytest.raises(PluresError, match="last=3; use a whole number, from 1 to 2"):
        plures.adapt(network, 2, last=3)
    with pytest.raises(PluresError, match="there is no module for last= 'block.1'.*did you mean blocks.1"):
        plures.adapt(network, 2, last="block.1")


def test_embeddings_are_shared_and_what_is_too_small_for_a_share_is_private() -> None:
    network = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, 2), nn.Linear(2, 8))
    roles = plures.adapt(network.append(nn.Linear(8, 3)), 5, share=0.05).roles
    assert roles["0.weight"] == "shared"
    assert (roles["2.weight"], roles["4.weight"], roles["5.weight"]) == ("split", "private", "private")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.3}, "more than there is: take at most 1/members"),
        ({"share": 0}, "share=0; use a number above 0"),
        ({"share": 1e-6}, "none of the 24576 kernels of '1.weight': take at least 4.1e-05"),
        ({"optimize_masks": True}, "own weights at random: no optimize_masks=True"),
        ({"init": "fresh"}, "start from it and own weights at random: no init='fresh'"),
        ({"last": 1, "roles": {}}, "give one of them"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    assert message in refused(lambda: plures.adapt(networks.mlp(), 5, **options))


def test_a_share_needs_a_background() -> None:
    assert "needs background='given'" in refused(lambda: OrthogonalDropout(networks.mlp(), 5, share=0.1))


def test_quantised_networks_and_merged_adapters_are_refused() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)

    quantised = nn.Sequential(nn.Linear(4, 4), Quantised(), nn.Linear(4, 2))
    assert "'1' is quantised" in refused(lambda: plures.adapt(quantised))
    merged = networks.mlp()
    merged.get_submodule("3").merged_adapters = ["default"]  # type: ignore[assignment]
    assert "adapters of '3' are merged" in refused(lambda: plures.adapt(merged))


def test_split_warns_of_a_network_that_was_trained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "plures")
    plures.split(networks.resnet(), 2)
    plures.split(pretrained(), 2, init="given")
    assert "plures.adapt" not in caplog.text
    plures.split(pretrained(), 2)
    assert "have seen 2 batches, and splitting it draws new weights: plures.adapt(network) keeps" in caplog.text
    loaded = networks.transformers_vit()
    loaded.config.name_or_path = "google/vit"  # type: ignore[union-attr]
    plures.split(loaded, 2)
    assert "was loaded from google/vit" in caplog.text


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [None, torch.bfloat16])
@pytest.mark.parametrize("read", [torch.float32, torch.bfloat16])
def test_a_file_with_its_base_is_read_in_any_precision(tmp_path, own, stored, read) -> None:
    """Whether values are differences is settled when they are written, not by the network that reads them."""
    ensemble = train(plures.adapt(pretrained(networks.mlp, own), 2, share=0.2), dtype=own)
    plures.save(ensemble, tmp_path / "a.safetensors", dtype=stored, base=True)
    again = plures.load(tmp_path / "a.safetensors", networks.mlp().to(read))
    with torch.no_grad():
        given, found = ensemble(images(8).to(own)).float(), again(images(8).to(read)).float()
    assert (found - given).norm() < 0.03 * given.norm()
