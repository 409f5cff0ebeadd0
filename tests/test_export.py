"""An exported file answers as `predict`, for every method, from one file at any batch, without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import networks
import plures
from networks import images
from plures.exporting.answers import ClassAnswer
from plures.exporting.members import pack_bytes, unpack_bytes
from test_contract import METHODS, RANDOM_PREDICTION, identify, trained

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# One of each method; that of MC dropout draws other masks than `predict`, and has a test of its own.
ONE_OF_EACH = list({method[0]: method for method in METHODS if method[0] not in RANDOM_PREDICTION}.values())
OUTPUTS = ClassAnswer.outputs
SPLIT = ("OrthogonalDropout", {"members": 2})


def run(path, x, name="inputs"):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    assert tuple(output.name for output in session.get_outputs()) == OUTPUTS
    return [dict(zip(OUTPUTS, session.run(None, {name: part.numpy()}), strict=True)) for part in x]


def assert_agrees(path, ensemble, x=images, name="inputs"):
    batches = [x(1), x(3), x(64)]
    for batch, outputs in zip(batches, run(path, batches, name), strict=True):
        expected = ensemble.predict(batch)
        for field, values in outputs.items():
            np.testing.assert_allclose(values, getattr(expected, field), atol=1e-4, rtol=0, err_msg=field)


# --- agreement


@pytest.fixture(scope="module")
def from_pixels(tmp_path_factory):
    """One file for all tests that read it: an export takes seconds."""
    path = tmp_path_factory.mktemp("exported") / "e.onnx"
    ensemble = trained(SPLIT, networks.tied)
    about = {"preprocessing": {"mean": [0.5]}, "provenance": {"data": "birds"}}
    plures.export(ensemble, path, pixels(1), preprocess=FromPixels(), classes=list("abcd"), metadata=about)
    return path, ensemble


class FromPixels(nn.Module):
    def forward(self, pixels):
        return pixels.permute(0, 3, 1, 2).float() / 255


def pixels(batch):
    return torch.randint(0, 256, (batch, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=identify)
def test_every_method_answers_as_predict(method, tmp_path):
    ensemble = trained(method, networks.mlp)
    plures.export(ensemble, tmp_path / "e.onnx", images(1))
    assert_agrees(tmp_path / "e.onnx", ensemble)


@pytest.mark.parametrize("per_member", [False, True])
def test_a_calibrated_ensemble_answers_as_predict(per_member, tmp_path):
    ensemble = trained(SPLIT, networks.mlp)
    ensemble.calibrate(images(64), torch.arange(64) % networks.CLASSES, per_member=per_member)
    plures.export(ensemble, tmp_path / "e.onnx", images(1))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_a_regression_ensemble_answers_as_regress(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
    ensemble = plures.OrthogonalDropout(network, members=3, optimize_masks=False, loss=plures.GaussianNLL())
    committed(ensemble).calibrate(torch.randn(64, 3), torch.randn(64, 2))
    plures.export(ensemble, tmp_path / "e.onnx", torch.randn(2, 3))
    session = onnxruntime.InferenceSession(tmp_path / "e.onnx")
    names = [output.name for output in session.get_outputs()]
    assert names == ["mean", "std", "aleatoric", "epistemic", "members"]
    for batch in (1, 3, 64):
        x = torch.randn(batch, 3)
        expected = ensemble.regress(x)
        for name, values in zip(names, session.run(None, {"inputs": x.numpy()}), strict=True):
            np.testing.assert_allclose(values, getattr(expected, name), atol=1e-4, err_msg=name)


def test_dense_answers_are_refused(tmp_path):
    dense = plures.Deterministic(nn.Conv2d(3, 2, 1))
    with pytest.raises(plures.PluresError, match="\\[members, batch, classes\\] can be exported"):
        plures.export(dense, tmp_path / "e.onnx", torch.randn(1, 3, 4, 4))
    last = plures.Deterministic(nn.Linear(3, 2), loss=plures.CrossEntropy(class_axis=-1))
    with pytest.raises(plures.PluresError, match="trained with CrossEntropy.* cannot be exported"):
        plures.export(last, tmp_path / "e.onnx", torch.randn(1, 5, 3))


@pytest.mark.parametrize("make", [networks.resnet, networks.transformers_vit], ids=identify)
def test_other_networks_answer_as_predict(make, tmp_path):
    ensemble = trained(SPLIT, make)
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_a_network_that_asks_for_the_length_of_its_batch(tmp_path):
    ensemble = trained(("Deterministic", {"init": "fresh"}), networks.transformer)
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_named_inputs_keep_their_names(tmp_path):
    ensemble = trained(("DeepEnsemble", {"members": 2}), networks.transformers_resnet)
    plures.export(ensemble, tmp_path / "e.onnx", {"pixel_values": images(2)})
    assert_agrees(tmp_path / "e.onnx", ensemble, name="pixel_values")


def test_the_passes_of_mc_dropout_are_drawn_once(tmp_path):
    ensemble = trained(("MCDropout", {"passes": 3, "init": "fresh"}), networks.mlp)
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    together, again, alone = run(tmp_path / "e.onnx", [images(5), images(5), images(5)[3:4]])
    np.testing.assert_array_equal(together["members"], again["members"])
    np.testing.assert_allclose(together["members"][:, 3:4], alone["members"], atol=1e-6)
    first, second, _ = together["members"]
    assert not np.allclose(first, second)  # passes differ
    expected = ensemble.predict(images(5)).probabilities.numpy()
    assert np.abs(together["probabilities"] - expected).max() < 0.2  # other masks of the same network


def test_a_partly_trained_ensemble_of_blocks_exports_what_is_trained(tmp_path):
    ensemble = plures.OrthogonalDropout(networks.mlp(), members=3, optimize_masks=False, granularity="block")
    next(iter(ensemble.stages())).commit()
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_preprocessing_is_part_of_the_file(from_pixels):
    path, ensemble = from_pixels
    (outputs,) = run(path, [pixels(3)])
    expected = ensemble.predict(FromPixels()(pixels(3))).probabilities
    np.testing.assert_allclose(outputs["probabilities"], expected, atol=1e-5)


def test_a_program_for_torch_answers_as_predict(tmp_path):
    ensemble = trained(SPLIT, networks.mlp)
    exported = plures.export(ensemble, tmp_path / "e.pt2", images(2), classes=["a", "b", "c", "d"])
    assert exported.format == "pt2"
    extra = {"classes": ""}
    program = torch.export.load(tmp_path / "e.pt2", extra_files=extra)
    assert json.loads(extra["classes"]) == ["a", "b", "c", "d"]
    for batch in (1, 3, 64):
        outputs, expected = program.module()(images(batch)), ensemble.predict(images(batch))
        for field in OUTPUTS:
            torch.testing.assert_close(outputs[field], getattr(expected, field), atol=1e-5, rtol=0)


# --- the file


@given(st.integers(1, 255), st.integers(0, 300), st.integers(0, 2**31))
def test_packed_owners_come_back(base, count, seed):
    digits = torch.randint(base, (count,), generator=torch.Generator().manual_seed(seed))
    packed = pack_bytes(digits, base)
    assert torch.equal(unpack_bytes(packed, base, count).long(), digits)
    assert base > 16 or len(packed) <= (count + 1) / 2 + 1


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 4))


def committed(ensemble):
    for _ in ensemble.stages():
        pass
    return ensemble


def test_a_split_ensemble_has_the_size_of_one_network(tmp_path):
    one = sum(parameter.nbytes for parameter in wide().parameters())
    split = plures.export(
        committed(plures.OrthogonalDropout(wide(), members=5, optimize_masks=False)), tmp_path / "s.onnx", images(2)
    )
    assert split.bytes == (tmp_path / "s.onnx").stat().st_size < 1.12 * one
    assert split.stored == "one network, with the owners of its weights"


def test_the_file_says_what_it_is_and_nothing_of_this_machine(from_pixels):
    path, _ = from_pixels
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    found = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert found["classes"] == list("abcd")
    assert found["preprocessing"] == {"mean": [0.5]}
    assert found["provenance"] == {"data": "birds"}
    assert found["plures"]["method"] == "OrthogonalDropout"
    assert found["plures"]["version"] == plures.__version__
    assert __file__.encode() not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = sys.modules["plures"] = None  # an import of either fails
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
names = [output.name for output in session.get_outputs()]
answer = dict(zip(names, session.run(None, {"inputs": numpy.load(sys.argv[2])})))
numpy.save(sys.argv[3], answer["probabilities"])
"""


def test_a_process_without_torch_runs_the_file(from_pixels, tmp_path):
    path, ensemble = from_pixels
    np.save(tmp_path / "in.npy", pixels(3).numpy())
    paths = [str(path), str(tmp_path / "in.npy"), str(tmp_path / "out.npy")]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *paths], check=True, capture_output=True)
    expected = ensemble.predict(FromPixels()(pixels(3))).probabilities
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-4)


def test_a_deep_ensemble_has_k_sizes_and_int8_a_quarter_of_them(tmp_path):
    one = sum(parameter.nbytes for parameter in wide().parameters())
    ensemble = committed(plures.DeepEnsemble(wide(), members=2))
    whole = plures.export(ensemble, tmp_path / "f.onnx", images(2))
    assert 2 * one < whole.bytes < 2.05 * one
    assert whole.stored == "2 networks"
    small = plures.export(ensemble, tmp_path / "i.onnx", images(2), int8=images(64), classes=list("abcd"))
    assert small.bytes < 0.3 * whole.bytes
    assert {entry.key for entry in onnx.load(tmp_path / "i.onnx").metadata_props} == {"plures", "classes"}
    batches = [images(1), images(64, seed=3)]
    for batch, outputs in zip(batches, run(tmp_path / "i.onnx", batches), strict=True):
        np.testing.assert_allclose(outputs["probabilities"], ensemble.predict(batch).probabilities, atol=0.02)


# --- bad input


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Rare(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


def one(*layers):
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), *layers, nn.Linear(4, 4))
    return plures.Deterministic(network)


def test_a_network_that_cannot_be_traced_is_told_by_operator_and_module(tmp_path):
    with pytest.raises(plures.PluresError, match=r"__bool__ in 2 \(Branches\) cannot be traced") as caught:
        plures.export(one(Branches()), tmp_path / "e.onnx", images(2))
    assert "\n" not in str(caught.value)
    split = committed(plures.OrthogonalDropout(one(Branches()).network, members=2, optimize_masks=False))
    with pytest.raises(plures.PluresError, match=r"__bool__ in 2 \(Branches\)"):
        plures.export(split, tmp_path / "e.onnx", images(2))
    assert not list(tmp_path.iterdir())


def test_an_operator_that_onnx_lacks_is_told_with_its_module(tmp_path):
    with pytest.raises(plures.PluresError, match=r"ONNX has no prims.bessel_j0.default, which 2 calls"):
        plures.export(one(Rare()), tmp_path / "e.onnx", images(2))
    assert plures.export(one(Rare()), tmp_path / "e.pt2", images(2)).bytes


def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch):
    ensemble = trained(SPLIT, networks.mlp)
    for path, more, words in [
        ("e.tflite", {}, "neither in .onnx nor in .pt2"),
        ("e.onnx", {"format": "tflite"}, "format='tflite'; use one of onnx, pt2"),
        ("none/e.onnx", {}, "there is no folder"),
        ("e.pt2", {"int8": images(4)}, "int8 is made by onnxruntime"),
    ]:
        with pytest.raises(plures.PluresError, match=words):
            plures.export(ensemble, tmp_path / path, images(2), **more)
    with pytest.raises(plures.PluresError, match="at least one sample"):
        plures.export(ensemble, tmp_path / "e.onnx", images(0))
    with pytest.raises(plures.PluresError, match="trained"):
        plures.export(plures.DeepEnsemble(networks.mlp()), tmp_path / "e.onnx", images(2))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(plures.PluresError, match=r"pip install 'plures\[export\]'"):
        plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert not list(tmp_path.iterdir())


# --- the command


def test_a_run_becomes_a_file_that_takes_pixels(tmp_path, capsys):
    from plures.lab.cli.main import main
    from plures.lab.runs.open import open_run

    folder = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"
    assert main(["export", str(folder), str(tmp_path / "digits.onnx"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == (tmp_path / "digits.onnx").stat().st_size
    opened = open_run(folder)
    pixels = torch.randint(0, 256, (5, 8, 8, 1), dtype=torch.uint8)
    (outputs,) = run(tmp_path / "digits.onnx", [pixels])
    expected = opened.ensemble.predict(opened.info.normalise(pixels))
    np.testing.assert_allclose(outputs["members"], expected.members, atol=1e-5)
    about = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "digits.onnx").metadata_props}
    assert about["classes"] == list(opened.info.classes)
    assert about["preprocessing"]["mean"] == list(opened.info.mean)
    assert about["provenance"]["fingerprint"] == opened.fingerprint


def test_int8_tells_the_accuracy_that_it_costs(tmp_path, capsys, monkeypatch):
    from plures.lab.cli.main import main

    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "cache"))
    folder = Path(__file__).parent / "data/v0.1/runs/deep-ensemble"
    assert main(["export", str(folder), str(tmp_path / "digits.onnx"), "--int8"]) == 0
    assert re.search(r"accuracy on \d+ test images: [\d.]+ % in float32, [\d.]+ % in int8", capsys.readouterr().out)
