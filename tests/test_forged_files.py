"""Files by an author who means ill: refused before anything large is read or built."""

from pathlib import Path

import pytest
import torch

import plures
import plures.storage
from attack.forgery import RAW, Forgery
from attack.subjects import Subject, network
from plures import PluresError
from plures.answers import Prediction, Regression


def forgery(tmp_path: Path, method: str, **options) -> Forgery:
    """Take apart the file of an untrained ensemble."""
    path = tmp_path / "good.safetensors"
    plures.save(getattr(plures, method)(network(), **options), path)
    return Forgery(path)


def refused(tmp_path: Path, forged: Forgery) -> str:
    path = tmp_path / "forged.safetensors"
    path.write_bytes(forged.file())
    with pytest.raises(PluresError) as caught:
        plures.load(path, network())
    return str(caught.value)


@pytest.fixture
def _nothing_large(monkeypatch):
    """Fail where more than a megabyte is drawn."""
    drawn = torch.randn

    def bounded(*size, **options):
        shape = torch.Size(size[0] if isinstance(size[0], list | tuple | torch.Size) else size)
        assert shape.numel() < 2**18, f"{list(shape)} numbers are drawn before the file was checked"
        return drawn(*size, **options)

    monkeypatch.setattr(torch, "randn", bounded)


@pytest.mark.usefixtures("_nothing_large")
class TestLargePromises:
    def test_a_packed_ensemble_of_endless_width(self, tmp_path) -> None:
        forged = forgery(tmp_path, "PackedEnsemble", members=2)
        forged.document["options"]["alpha"] = 1e4
        assert "is of shape" in refused(tmp_path, forged)
        forged.document["options"]["alpha"] = 2**31  # a width that not even a sketch without numbers can have
        assert "alpha=2147483648; use a number above 0" in refused(tmp_path, forged)

    def test_a_deep_ensemble_of_two_hundred_single_numbers(self, tmp_path) -> None:
        forged = forgery(tmp_path, "DeepEnsemble", members=2)
        forged.document["options"]["members"] = 200
        forged.document["state"]["committed"] = [True] * 200
        forged.tensors |= {f"networks.{member}.x": torch.zeros(1) for member in range(200)}
        assert "'networks.2.0.weight' is missing" in refused(tmp_path, forged)

    def test_orthogonal_dropout_with_255_copies_that_are_not_there(self, tmp_path, monkeypatch) -> None:
        forged = forgery(tmp_path, "OrthogonalDropout", members=2)
        forged.document["options"]["members"] = 6
        forged.document["state"] |= {"committed": [[]] * 6}
        monkeypatch.setattr(torch.Tensor, "repeat", None)  # how private tensors are copied
        assert "'member 2/1.weight' is missing" in refused(tmp_path, forged)

    @pytest.mark.parametrize("share", [0.1, "x", [0.2], True, {}])
    def test_a_share_of_members_that_see_zeros(self, tmp_path, share: object) -> None:
        forged = forgery(tmp_path, "OrthogonalDropout", members=2)
        forged.document["options"]["share"] = share
        assert "it needs background='given'" in refused(tmp_path, forged)

    def test_slots_and_factors_that_are_not_there(self, tmp_path) -> None:
        forged = forgery(tmp_path, "MIMO", members=2)
        forged.document["options"]["members"] = 200
        forged.tensors["network.network.0.weight"] = torch.zeros(1, 200, 1, 1)
        assert "expected [4, 200, 3, 3]" in refused(tmp_path, forged)
        forged = forgery(tmp_path, "BatchEnsemble", members=2)
        forged.document["options"]["members"] = 200
        forged.tensors["network.network.0.members.alpha"] = torch.zeros(200, 1)
        assert "'network.network.0.members.gamma' is of shape" in refused(tmp_path, forged)

    @pytest.mark.parametrize("method", ["Deterministic", "OrthogonalDropout", "MCDropout"])
    def test_a_tensor_that_is_too_large_is_not_read(self, tmp_path, monkeypatch, method) -> None:
        forged = forgery(tmp_path, method, **({"members": 2} if method == "OrthogonalDropout" else {}))
        name = next(name for name in forged.tensors if name.endswith("4.weight"))
        forged.tensors[name] = torch.zeros(2**20)
        read, checksums = [], plures.storage.checksums

        def noted(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
            read.extend(one.numel() for one in tensors.values())
            return checksums(tensors)

        monkeypatch.setattr("plures.storage.checksums", noted)
        assert f"{name!r} is of shape [1048576]" in refused(tmp_path, forged)
        assert max(read, default=0) < 2**20


COUNTS = {
    "OrthogonalDropout": "members",
    "DeepEnsemble": "members",
    "MCDropout": "passes",
    "BatchEnsemble": "members",
    "MIMO": "members",
    "Masksembles": "members",
    "PackedEnsemble": "members",
}


@pytest.mark.usefixtures("_nothing_large")
@pytest.mark.parametrize("count", ["1000000000", "9223372036854775808", "1e999", "0", "-1"])
@pytest.mark.parametrize("method", COUNTS)
def test_more_members_than_are_stored(tmp_path, method, count) -> None:
    forged = forgery(tmp_path, method, **{COUNTS[method]: 2})
    forged.document["options"][COUNTS[method]] = RAW + count
    refused(tmp_path, forged)


@pytest.mark.usefixtures("_nothing_large")
@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "1e308", "-1"])
@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("PackedEnsemble", "alpha"),
        ("Masksembles", "scale"),
        ("MIMO", "batch_repetition"),
    ],
)
def test_numbers_that_no_option_can_have(tmp_path, method, option, value) -> None:
    forged = forgery(tmp_path, method, members=2)
    forged.document["options"][option] = RAW + value
    refused(tmp_path, forged)


def test_options_that_are_gone_are_read_at_their_default_and_named_otherwise(tmp_path) -> None:
    forged = forgery(tmp_path, "BatchEnsemble", members=2)
    forged.document["options"] |= {"factors": "gaussian", "private_norm": True}
    assert "private_norm" in refused(tmp_path, forged)


@pytest.mark.parametrize("part", ["method", "option", "role", "tensor", "state"])
def test_words_of_a_file_do_not_reach_the_terminal(tmp_path, part) -> None:
    forged, evil = forgery(tmp_path, "OrthogonalDropout", members=2), "a\x1b[31m\r\n\x9b2J\u202eb"
    if part == "method":
        forged.document["method"] = evil
    elif part == "option":
        forged.document["options"]["granularity"] = evil
    elif part == "role":
        forged.document["options"]["roles"] = {evil: evil}
    elif part == "tensor":
        forged.document["shapes"][evil] = [1]
    else:
        forged.document["state"]["committed"] = [[evil]] * 2
    message = refused(tmp_path, forged)
    assert message.isprintable()
    assert r"a\x1b[31m" in message


@pytest.mark.parametrize("method", [*COUNTS, "Deterministic"])
def test_one_number_does_not_pass_for_a_whole_tensor(tmp_path, method) -> None:
    """copy_ would spread it over all places."""
    options = {COUNTS[method]: 2} if method in COUNTS else {}
    good = forgery(tmp_path, method, **options)
    for name in (name for name, tensor in good.tensors.items() if tensor.numel() > 1):
        forged = Forgery(tmp_path / "good.safetensors")
        forged.tensors[name] = forged.tensors[name].reshape(-1)[:1].reshape([1] * forged.tensors[name].dim())
        assert "shape" in refused(tmp_path, forged)


@pytest.mark.parametrize("progress", [[True], [True] * 6, [1, 0, 1, 0, 1], "11111", None, {"0": True}, [[True]] * 5])
def test_progress_that_a_deep_ensemble_cannot_have(tmp_path, progress) -> None:
    forged = forgery(tmp_path, "DeepEnsemble")
    forged.document["state"]["committed"] = progress
    refused(tmp_path, forged)


def test_a_schedule_that_there_is_not(tmp_path) -> None:
    for value in ("later", {"0": "sequential"}, None):
        forged = forgery(tmp_path, "OrthogonalDropout", members=2)
        forged.document["options"]["schedule"] = value
        assert "schedule=" in refused(tmp_path, forged)


@pytest.mark.parametrize("value", ["abc", 1.5, True, None, [0], -1, 2**63])
@pytest.mark.parametrize(
    "method", ["OrthogonalDropout", "Deterministic", "DeepEnsemble", "PackedEnsemble", "MCDropout"]
)
def test_a_seed_is_a_whole_number(method, value) -> None:
    with pytest.raises(PluresError, match="seed="):
        getattr(plures, method)(network(), seed=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("format", True), ("format", 0.5), ("format", "1"), ("own_loss", 1), ("options", []), ("shapes", None)],
)
def test_a_header_of_other_types(tmp_path, name, value) -> None:
    forged = forgery(tmp_path, "Deterministic")
    forged.document[name] = value
    assert name in refused(tmp_path, forged)


@pytest.mark.parametrize("moments", [[0.0, float("1e400")], ["1", "2"], [0.0, 0], [0.0, 10**400], "12", [True, 1.0]])
def test_moments_are_numbers(tmp_path, moments) -> None:
    forged = forgery(tmp_path, "OrthogonalDropout", members=2)
    forged.document["state"]["moments"]["0.weight"] = moments
    refused(tmp_path, forged)


@pytest.mark.parametrize("classifier", [1001, "x", []])
def test_a_classifier_of_no_known_kind(tmp_path, classifier) -> None:
    forged = forgery(tmp_path, "OrthogonalDropout", members=2)
    forged.document["options"]["classifier"] = classifier
    assert "classifier=" in refused(tmp_path, forged)


def test_huge_weights_in_a_lean_engine_are_told_without_a_warning() -> None:
    ensemble = plures.OrthogonalDropout(network(), members=2, optimize_masks=False)
    for stage in ensemble.stages():
        with torch.no_grad():
            stage.network[1].weight.fill_(3e38)  # folded into the convolution before it
            stage.network[1].running_var.fill_(1e-6)
    with pytest.raises(PluresError, match="infinite|NaN"):
        ensemble.engine("unfolded").predict(torch.randn(2, 1, 4, 4))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_weights_of_another_kind(tmp_path, dtype) -> None:
    for method in ("Deterministic", "OrthogonalDropout"):
        forged = forgery(tmp_path, method, **({"members": 2} if method == "OrthogonalDropout" else {}))
        name = next(name for name in forged.tensors if name.endswith("0.weight") and not name.startswith("owners"))
        forged.tensors[name] = torch.ones_like(forged.tensors[name]).to(dtype)
        assert "dtype" in refused(tmp_path, forged)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", torch.ones(3)),
        ("temperature", torch.tensor(0.0)),
        ("temperature", torch.tensor(0.0, dtype=torch.float16)),
        ("temperature", torch.tensor(1e-247, dtype=torch.float64)),
        ("temperature", torch.tensor(float("nan"))),
        ("members", torch.tensor(2.5)),
        ("members", torch.tensor(True)),
        ("rank", torch.ones(3, dtype=torch.bool)),
        ("probability", torch.zeros(0)),
        ("rank", torch.ones(3)),
        ("before", torch.full((3,), float("inf"))),
        ("nll", torch.ones(2, dtype=torch.complex64)),
    ],
)
def test_a_calibration_that_none_would_fit(tmp_path, name, value) -> None:
    path = tmp_path / "good.safetensors"
    plures.save(Subject("DeepEnsemble", {"members": 3}, calibrated=True).make(), path)
    forged = Forgery(path)
    forged.tensors[f"calibration.{name}"] = value
    assert "the calibration in the file is damaged" in refused(tmp_path, forged)


class Pair(plures.DeepEnsemble):
    def __init__(self, network, *, members: int = 2, loss=None, seed: int = 0):
        super().__init__(network, members, classifier="fixed", loss=loss, seed=seed)


class Narrow(plures.PackedEnsemble):
    def __init__(self, network, *, loss=None):
        super().__init__(network, 2, alpha=1.0, loss=loss)


@pytest.mark.parametrize("method", [Pair, Narrow])
def test_a_class_derived_from_a_method_has_options_of_its_own(tmp_path, method) -> None:
    ensemble = method(network())
    for _ in ensemble.stages():
        pass
    plures.save(ensemble, tmp_path / "own.safetensors")
    loaded = plures.load(tmp_path / "own.safetensors", network(), method=method)
    assert loaded(torch.ones(2, 1, 4, 4)).equal(ensemble(torch.ones(2, 1, 4, 4)))


def test_a_layer_is_masked_once() -> None:
    with pytest.raises(PluresError, match="name one twice"):
        plures.Masksembles(network(), members=2, layers=["4", "4"])


def test_an_endless_message_loses_its_middle() -> None:
    assert len(str(PluresError("x" * 10**6))) < 3000
    assert str(PluresError(f"first{'x' * 10**6}last")).startswith("first")
    assert str(PluresError(f"first{'x' * 10**6}last")).endswith("last")


@pytest.mark.parametrize("outputs", [[float("inf"), 0.0], [0.0, 100.0], [3e38, 0.0]])
def test_infinite_numbers_are_no_answer(outputs) -> None:
    members = torch.zeros(2, 3, 2)
    members[1, 2] = torch.tensor(outputs)
    with pytest.raises(PluresError, match="infinite numbers for sample 2"):
        Regression.from_outputs(members, variance=True)


def test_infinite_logits_have_no_probabilities() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[1, 2, 0] = float("inf")
    with pytest.raises(PluresError, match="member 1 returned infinite logits for sample 2"):
        Prediction.from_logits(logits)
    ruled_out = torch.zeros(1, 1, 3)
    ruled_out[..., 0] = float("-inf")
    assert Prediction.from_logits(ruled_out).probabilities.tolist() == [[0, 0.5, 0.5]]
