"""One file, about the size of one network; equal to the bit; never silently damaged."""

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import plures
from dear import few
from plures import PluresError
from plures.lab.models import resnet18


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )


IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 3])


def train(stage: plures.Stage) -> None:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        stage(IMAGES, TARGETS).backward()
        optimizer.step()


def trained(stages: int = 100, **options) -> plures.OrthogonalDropout:
    ensemble = plures.OrthogonalDropout(network(), **{"members": 3, **options})
    for done, stage in enumerate(ensemble.stages()):
        if done == stages:
            break
        train(stage)
    return ensemble


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "ensemble.safetensors"
    plures.save(trained(), path)
    return path


options = st.fixed_dictionaries(
    {
        "members": st.integers(2, 6),
        "optimize_masks": st.booleans(),
        "classifier": st.sampled_from(["fixed", "split", "private"]),
        "granularity": st.sampled_from(["weight", "kernel", "block"]),
        "init": st.sampled_from(["fresh", "given"]),
        "seed": st.integers(0, 99),
    }
)


@given(options, st.integers(0, 18))
@settings(few, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_save_and_load_are_equal_to_the_bit_at_any_point_of_training(tmp_path, chosen, stages: int) -> None:
    ensemble = trained(stages, **chosen)
    path = tmp_path / "ensemble.safetensors"
    plures.save(ensemble, path)
    with torch.no_grad():  # another network of the same class, with other numbers
        other = network()
        for parameter in other.parameters():
            parameter.add_(1.0)
    loaded = plures.load(path, other)
    assert loaded.options() == ensemble.options()
    assert loaded.plan() == ensemble.plan()
    for name, owners in ensemble.owners.items():
        assert loaded.owners[name].equal(owners)
    if ensemble.trained:
        assert loaded(IMAGES).equal(ensemble(IMAGES))
    # Training goes on from the file as it would have without it.
    for ensemble_stage, loaded_stage in zip(ensemble.stages(), loaded.stages(), strict=True):
        train(ensemble_stage)
        train(loaded_stage)
    assert loaded(IMAGES).equal(ensemble(IMAGES))
    again = tmp_path / "again.safetensors"
    plures.save(ensemble, path)
    plures.save(loaded, again)
    assert path.read_bytes() == again.read_bytes()


def test_the_state_dict_carries_an_ensemble_too() -> None:
    for stages in (1, 2, 4, 100):
        ensemble = trained(stages)
        copy = plures.OrthogonalDropout(network(), members=3)
        copy.load_state_dict(ensemble.state_dict())
        assert copy.plan() == ensemble.plan()
        for mine, theirs in zip(ensemble.stages(), copy.stages(), strict=True):
            train(mine)
            train(theirs)
        assert copy(IMAGES).equal(ensemble(IMAGES))


# Single weights at a quarter of their number, where what each member has of its own weighs more than in `make bench`.
@pytest.mark.parametrize(
    ("members", "granularity", "width", "limit"),
    [(5, "kernel", 64, 1.025), (10, "weight", 32, 1.165)],
)
def test_five_members_take_the_room_of_one(tmp_path, members: int, granularity: str, width: int, limit: float) -> None:
    resnet = resnet18(classes=10, width=width)
    assert width != 64 or sum(p.numel() for p in resnet.parameters()) == 11_173_962
    ensemble = plures.OrthogonalDropout(resnet, members, optimize_masks=False, granularity=granularity)
    for stage in ensemble.stages():
        assert stage.phase == "train"
    save_file(resnet.state_dict(), tmp_path / "plain.safetensors")
    plures.save(ensemble, tmp_path / "ensemble.safetensors")
    ratio = (tmp_path / "ensemble.safetensors").stat().st_size / (tmp_path / "plain.safetensors").stat().st_size
    assert ratio <= limit, ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_may_be_stored_in_half_precision(tmp_path, dtype: torch.dtype) -> None:
    ensemble = trained()
    path = tmp_path / "half.safetensors"
    plures.save(ensemble, path, dtype=dtype)
    loaded = plures.load(path, network())
    for member in range(3):
        for name, tensor in ensemble.checkout(member).state_dict().items():
            rounded = tensor.to(dtype).to(tensor.dtype) if tensor.dim() > 1 else tensor
            assert loaded.checkout(member).state_dict()[name].equal(rounded), name
    with pytest.raises(PluresError, match="dtype=torch.int8"):
        plures.save(ensemble, path, dtype=torch.int8)


def test_loading_draws_no_owners_that_the_file_holds(tmp_path, monkeypatch) -> None:
    ensemble = trained(optimize_masks=False)
    plures.save(ensemble, tmp_path / "random.safetensors")
    monkeypatch.setattr("plures.methods.orthogonal_dropout.owners.Partition.randomise", None)
    again = plures.load(tmp_path / "random.safetensors", network())
    assert again.options()["optimize_masks"] is False
    assert all(owners.equal(again.owners[name]) for name, owners in ensemble.owners.items())


def test_loading_leaves_the_given_network_alone(saved) -> None:
    given = network()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    plures.load(saved, given)
    assert all(tensor.equal(before[name]) for name, tensor in given.state_dict().items())


def test_damaged_copies_are_refused_or_load_to_the_same_outputs(saved, tmp_path) -> None:
    outputs = plures.load(saved, network())(IMAGES)
    original = saved.read_bytes()
    header = 8 + struct.unpack("<Q", original[:8])[0]
    chance = random.Random(0)
    copy = tmp_path / "copy.safetensors"
    refused = 0
    for attempt in range(240):
        damaged = bytearray(original)
        if attempt % 4 == 0:
            del damaged[chance.randrange(len(original)) :]
        else:
            start, stop = [(0, 8), (8, header), (header, len(original))][attempt % 4 - 1]
            for _ in range(chance.choice([1, 1, 3])):
                damaged[chance.randrange(start, stop)] ^= 1 << chance.randrange(8)
        copy.write_bytes(damaged)
        try:
            assert plures.load(copy, network())(IMAGES).equal(outputs)
        except PluresError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 200


def rewritten(saved: Path, path: Path, **changes) -> Path:
    from plures.files import digest

    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        document = json.loads(file.metadata()["plures"].partition(" ")[2])
    text = json.dumps({**document, **changes})
    save_file(tensors, path, metadata={"plures": f"{digest(text.encode())} {text}"})
    return path


def test_files_that_are_none_of_ours(saved, tmp_path) -> None:
    with pytest.raises(PluresError, match="there is no file"):
        plures.load(tmp_path / "nothing.safetensors", network())
    plain = tmp_path / "plain.safetensors"
    save_file(network().state_dict(), plain)
    with pytest.raises(PluresError, match=r"was not written by plures\.save"):
        plures.load(plain, network())
    pickled = tmp_path / "pickled.pt"
    torch.save(network().state_dict(), pickled)
    with pytest.raises(PluresError, match="not a safetensors file"):
        plures.load(pickled, network())
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(PluresError, match="damaged or not a safetensors file"):
        plures.load(tmp_path / "empty", network())
    newer = rewritten(saved, tmp_path / "newer.safetensors", format=99, library="9.0")
    with pytest.raises(PluresError, match=r"has format 99, written by plures 9\.0"):
        plures.load(newer, network())
    unknown = rewritten(saved, tmp_path / "unknown.safetensors", method="Magic")
    with pytest.raises(PluresError, match="contains the method Magic"):
        plures.load(unknown, network())
    bent = rewritten(saved, tmp_path / "bent.safetensors", state={})
    with pytest.raises(PluresError, match="cannot be read as an ensemble"):
        plures.load(bent, network())


def test_another_network_is_refused_with_the_first_differences(saved) -> None:
    other = network()
    other[0] = nn.Conv2d(1, 16, 3)
    with pytest.raises(PluresError, match=r"0\.weight: \[8, 1, 3, 3\] in the file, \[16, 1, 3, 3\] in the network"):
        plures.load(saved, other)
    with pytest.raises(PluresError, match=r"absent in the network.*and \d+ more"):
        plures.load(saved, nn.Linear(3, 3))
    with pytest.raises(PluresError, match="network must be an nn.Module, not int"):
        plures.load(saved, lambda: 3)  # type: ignore[arg-type, return-value]


def test_a_failed_save_leaves_the_old_file_and_no_litter(saved, tmp_path, monkeypatch) -> None:
    path = tmp_path / "ensemble.safetensors"
    ensemble = trained()
    plures.save(ensemble, path)
    before = path.read_bytes()

    def no_room(*_args, **_more) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plures.ensemble.save_file", no_room)
    with pytest.raises(PluresError, match="No space left on device; an existing file is unchanged"):
        plures.save(ensemble, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["ensemble.safetensors"]
    with pytest.raises(PluresError, match="there is no folder"):
        plures.save(ensemble, tmp_path / "missing" / "x.safetensors")


def test_a_file_is_as_readable_as_any_other(tmp_path) -> None:
    (tmp_path / "other").touch()
    plures.save(trained(), tmp_path / "ensemble")
    assert (tmp_path / "ensemble").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_equal_ensembles_give_equal_bytes(tmp_path) -> None:
    plures.save(trained(), tmp_path / "a")
    plures.save(trained(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_only_ensembles_are_saved(tmp_path) -> None:
    with pytest.raises(PluresError, match="save takes an ensemble, not a Sequential"):
        plures.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a.safetensors")


@pytest.mark.parametrize("granularity", ["weight", "kernel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_loads_the_same_with_and_without_the_native_library(tmp_path, monkeypatch, granularity, dtype) -> None:
    ensemble = trained(3, granularity=granularity, optimize_masks=False)
    plures.save(ensemble, tmp_path / "a", dtype=torch.float16)
    loaded = []
    for native in ("", "0"):
        monkeypatch.setenv("PLURES_NATIVE", native)
        loaded.append(plures.load(tmp_path / "a", network().to(dtype)))
        plures.save(ensemble, tmp_path / f"native{native}")
    for one, other in zip(loaded[0].state_dict().values(), loaded[1].state_dict().values(), strict=True):
        assert one.equal(other)
    assert (tmp_path / "native").read_bytes() == (tmp_path / "native0").read_bytes()
