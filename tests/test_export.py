"""An exported file answers as `predict`, for every method, from one file at any batch, without torch."""

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional as F

import networks
import plures
from networks import images
from plures.exporting.inference import CLASS_OUTPUTS, Inference, pack_bytes, unpack_bytes
from plures.lab.models import ResNet
from test_contract import METHODS, RANDOM_PREDICTION, identify, train, trained

# One of each method; MC dropout cannot be exported.
ONE_OF_EACH = list({method[0]: method for method in METHODS if method[0] not in RANDOM_PREDICTION}.values())
IN_ONNX = {"OrthogonalDropout", "Masksembles", "PackedEnsemble"}  # the operators of the others are those of networks
OUTPUTS = CLASS_OUTPUTS
SPLIT = ("OrthogonalDropout", {"members": 2})
GUIDE = Path(__file__).parent.parent / "docs/guide/deploying.md"


@pytest.fixture(scope="module", autouse=True)
def one_table_of_operators():
    """Let torch build its table of ONNX operators once, not in each export: a third of an export's time."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from torch.onnx._internal.exporter import _registration

    table = functools.cache(_registration.ONNXRegistry.from_torchlib)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registration.ONNXRegistry, "from_torchlib", staticmethod(table))
        yield


def run(path, x, name="inputs", outputs=OUTPUTS):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    assert tuple(output.name for output in session.get_outputs()) == outputs
    assert {axes.shape[0] for axes in session.get_inputs()} == {"batch"}
    return [dict(zip(outputs, session.run(None, {name: part.numpy()}), strict=True)) for part in x]


def assert_agrees(path, ensemble, x=images, name="inputs", normalise=lambda batch: batch):
    batches = [x(1), x(3), x(64)]
    for batch, outputs in zip(batches, run(path, batches, name), strict=True):
        assert_same(outputs, ensemble.predict(normalise(batch)))


def assert_same(outputs, expected):
    for field, values in outputs.items():
        np.testing.assert_allclose(values, getattr(expected, field), atol=1e-4, rtol=0, err_msg=field)


# --- agreement


@pytest.fixture(scope="module")
def from_pixels(tmp_path_factory):
    """One file for all tests that read it: an export takes seconds."""
    path = tmp_path_factory.mktemp("exported") / "e.onnx"
    ensemble = trained(("OrthogonalDropout", {"members": 3, "optimize_masks": False}), wide_and_tied)
    about = {"preprocessing": {"mean": [0.5]}, "provenance": {"data": "birds"}}
    plures.export(ensemble, path, pixels(1), preprocess=FromPixels(), classes=list("abcd"), metadata=about)
    return path, ensemble


@networks.reproducible
def wide_and_tied():
    """Two layers with one weight, which outweighs everything else in a file."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU())
    network.append(nn.Linear(768, networks.CLASSES))
    network[3].weight = network[1].weight
    return network


class FromPixels(nn.Module):
    def forward(self, pixels):
        return pixels.permute(0, 3, 1, 2).float() / 255


def pixels(batch, size=16, channels=3):
    shape = (batch, size, size, channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@networks.reproducible
def two_layers():
    """Every layer of every member costs the exporter a tenth of a second."""
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, networks.CLASSES))


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=identify)
def test_every_method_answers_as_predict_calibrated(method, tmp_path):
    ensemble = copy.deepcopy(trained(method, two_layers))
    ensemble.calibrate(images(64), torch.arange(64) % networks.CLASSES)
    if method[0] in IN_ONNX:
        plures.export(ensemble, tmp_path / "e.onnx", images(1))
        assert_agrees(tmp_path / "e.onnx", ensemble)
        return
    plures.export(ensemble, tmp_path / "e.pt2", images(1))
    program = torch.export.load(tmp_path / "e.pt2").module()
    for count in (1, 3, 64):
        with torch.no_grad():
            outputs = program(images(count))
        assert_same({field: outputs[field] for field in OUTPUTS}, ensemble.predict(images(count)))


def regression(loss):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
    ensemble = committed(plures.OrthogonalDropout(network, members=3, optimize_masks=False, loss=loss))
    return ensemble.calibrate(torch.randn(64, 3), torch.randn(64, 2 if isinstance(loss, plures.GaussianNLL) else 4))


def test_a_regression_ensemble_answers_as_regress(tmp_path):
    ensemble = regression(plures.GaussianNLL())
    plures.export(ensemble, tmp_path / "e.onnx", torch.randn(2, 3))
    batches = [torch.randn(1, 3), torch.randn(3, 3), torch.randn(64, 3)]
    names = ("mean", "std", "aleatoric", "epistemic", "members")
    for batch, outputs in zip(batches, run(tmp_path / "e.onnx", batches, outputs=names), strict=True):
        assert_same(outputs, ensemble.regress(batch))
    means, x = regression(F.mse_loss), batches[-1]
    assert_same(untraced(means, x), means.regress(x))


def untraced(ensemble, x):
    """What a file would answer, before it is traced: most of what can go wrong does so there, and it takes no time."""
    with torch.no_grad():
        return Inference(ensemble, x)(x)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.up(self.down(x).relu())


def test_maps_of_classes_are_answered_as_by_predict(tmp_path):
    torch.manual_seed(0)
    ensemble = committed(plures.OrthogonalDropout(Segmenter(), members=2, optimize_masks=False))
    ensemble.calibrate(images(8), torch.randint(0, 5, (8, 16, 16)))
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


@pytest.mark.parametrize("name", ["OrthogonalDropout", "DeepEnsemble", "BatchEnsemble", "Deterministic"])
def test_classes_of_tokens_are_answered_as_by_predict(name):
    torch.manual_seed(0)
    tagger = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))  # [batch, tokens, classes]
    ensemble = committed(getattr(plures, name)(tagger, loss=plures.CrossEntropy(class_axis=-1)))
    x = torch.randn(4, 7, 3)
    assert untraced(ensemble, x)["probabilities"].shape == (4, 5, 7)
    assert_same(untraced(ensemble, x), ensemble.predict(x))


def short_resnet():
    """A ResNet with both kinds of block that a ResNet18 has, and one of each: deep networks take long to export."""
    torch.manual_seed(0)
    return ResNet([1, 1], networks.CLASSES, 3, width=4, stem="cifar")


@pytest.mark.slow
def test_a_resnet_answers_as_predict(tmp_path):
    ensemble = trained(SPLIT, short_resnet)
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


@pytest.mark.slow
def test_a_member_of_a_transformers_vit_answers_as_predict_and_keeps_the_names_of_its_inputs(tmp_path):
    # One member of two: another would double the graph, and the other tests have several.
    ensemble = plures.OrthogonalDropout(networks.transformers_vit(), members=2, optimize_masks=False)
    stage = next(iter(ensemble.stages()))
    train(stage)
    stage.commit()
    plures.export(ensemble, tmp_path / "e.onnx", {"pixel_values": images(2)})
    assert_agrees(tmp_path / "e.onnx", ensemble, name="pixel_values")


class Rows(nn.Module):
    def forward(self, x):
        return x.reshape(len(x), -1)


def test_a_network_that_asks_for_the_length_of_its_batch(tmp_path):
    network = nn.Sequential(Rows(), nn.Linear(768, networks.CLASSES))
    ensemble = committed(plures.Deterministic(network, init="fresh"))
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_mc_dropout_is_refused(tmp_path):
    with pytest.raises(plures.PluresError, match="MCDropout draws random numbers to predict"):
        plures.export(plures.MCDropout(two_layers()), tmp_path / "e.onnx", images(2))


def test_a_partly_trained_ensemble_of_blocks_exports_what_is_trained(tmp_path):
    ensemble = plures.OrthogonalDropout(two_layers(), members=3, optimize_masks=False, granularity="block")
    next(iter(ensemble.stages())).commit()
    plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert_agrees(tmp_path / "e.onnx", ensemble)


def test_preprocessing_is_part_of_the_file(from_pixels):
    path, ensemble = from_pixels
    (outputs,) = run(path, [pixels(3)])
    expected = ensemble.predict(FromPixels()(pixels(3))).probabilities
    np.testing.assert_allclose(outputs["probabilities"], expected, atol=1e-5)


def test_a_program_for_torch_answers_as_predict(tmp_path):
    ensemble = trained(SPLIT, two_layers)
    plures.export(ensemble, tmp_path / "e.pt2", images(2), classes=["a", "b", "c", "d"])
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


def committed(ensemble):
    for _ in ensemble.stages():
        pass
    return ensemble


def test_a_split_ensemble_has_the_size_of_one_network(from_pixels):
    path, _ = from_pixels
    one = sum(parameter.nbytes for parameter in wide_and_tied().parameters())
    assert path.stat().st_size < 1.1 * one


def test_the_file_says_what_it_is_and_nothing_of_this_machine(from_pixels):
    import onnx

    path, _ = from_pixels
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    found = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert found["classes"] == list("abcd")
    assert found["preprocessing"] == {"mean": [0.5]}
    assert found["provenance"] == {"data": "birds"}
    assert found["plures"]["method"] == "OrthogonalDropout"
    assert found["plures"]["version"] == plures.__version__
    assert found["plures"]["calibration"] == "not calibrated"
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


# --- never wrong in silence


class Centred(nn.Module):
    """Samples of one batch influence each other."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_network_whose_samples_influence_each_other_answers_as_predict(ending, tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), Centred(), nn.Linear(8, networks.CLASSES))
    ensemble = committed(plures.OrthogonalDropout(network, members=2, optimize_masks=False))
    plures.export(ensemble, tmp_path / f"e.{ending}", images(2))
    if ending == "onnx":
        assert_agrees(tmp_path / "e.onnx", ensemble)
        return
    program = torch.export.load(tmp_path / "e.pt2").module()
    for batch in (1, 5):
        assert_same(program(images(batch)), ensemble.predict(images(batch)))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls % 2)


@pytest.mark.parametrize(("layer", "ending"), [(Noisy, "onnx"), (Counting, "pt2")])
def test_a_file_that_would_answer_otherwise_is_not_written(layer, ending, tmp_path):
    with pytest.raises(plures.PluresError, match=r"is not written: for \d samples its members differ") as caught:
        plures.export(one(layer()), tmp_path / f"e.{ending}", images(2))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_is_answered_as_by_predict_or_refused_in_one_sentence(dtype, tmp_path):
    ensemble = copy.deepcopy(trained(SPLIT, two_layers)).to(dtype)
    x = images(3).to(dtype)
    plures.export(ensemble, tmp_path / "e.pt2", x)
    outputs, expected = torch.export.load(tmp_path / "e.pt2").module()(x), ensemble.predict(x)
    for field in OUTPUTS:
        torch.testing.assert_close(outputs[field], getattr(expected, field), atol=1e-5, rtol=0)
    if dtype == torch.bfloat16:
        with pytest.raises(plures.PluresError, match=r"onnxruntime cannot run .* write a \.pt2 file"):
            plures.export(ensemble, tmp_path / "e.onnx", x)
        return
    plures.export(ensemble, tmp_path / "e.onnx", x)
    (outputs,) = run(tmp_path / "e.onnx", [x])
    np.testing.assert_allclose(outputs["probabilities"], expected.probabilities, atol=1e-2)


def test_the_calibration_of_other_members_is_refused(tmp_path):
    ensemble = plures.OrthogonalDropout(two_layers(), members=3, optimize_masks=False)
    next(iter(ensemble.stages())).commit()
    ensemble.calibrate(images(64), torch.arange(64) % networks.CLASSES)
    committed(ensemble)
    with pytest.raises(plures.PluresError, match="calibrated with 1 members and has 3 now"):
        plures.export(ensemble, tmp_path / "e.pt2", images(2))


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


def test_a_network_that_cannot_be_traced_is_told_by_its_line(tmp_path):
    with pytest.raises(
        plures.PluresError, match=r"test_export.py, line \d+, `return x if x.sum\(\) > 0 else -x`, cannot be"
    ) as caught:
        plures.export(one(Branches()), tmp_path / "e.onnx", images(2))
    assert "\n" not in str(caught.value)
    split = committed(plures.OrthogonalDropout(one(Branches()).network, members=2, optimize_masks=False))
    with pytest.raises(plures.PluresError, match=r"`return x if x.sum\(\) > 0 else -x`"):
        plures.export(split, tmp_path / "e.onnx", images(2))
    assert not list(tmp_path.iterdir())


def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    with pytest.raises(plures.PluresError, match=r"to ONNX: .*prims.bessel_j0.*; write a .pt2 file"):
        plures.export(one(Rare()), tmp_path / "e.onnx", images(2))
    assert plures.export(one(Rare()), tmp_path / "e.pt2", images(2)).is_file()


def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch):
    ensemble = trained(SPLIT, networks.mlp)
    for path, words in [("e.tflite", "neither in .onnx nor in .pt2"), ("none/e.onnx", "there is no folder")]:
        with pytest.raises(plures.PluresError, match=words):
            plures.export(ensemble, tmp_path / path, images(2))
    with pytest.raises(plures.PluresError, match="at least one sample"):
        plures.export(ensemble, tmp_path / "e.onnx", images(0))
    with pytest.raises(plures.PluresError, match="trained"):
        plures.export(plures.DeepEnsemble(networks.mlp()), tmp_path / "e.onnx", images(2))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(plures.PluresError, match=r"pip install 'plures\[export\]'"):
        plures.export(ensemble, tmp_path / "e.onnx", images(2))
    assert not list(tmp_path.iterdir())


# --- the command


def test_the_command_says_whether_the_file_is_calibrated(tmp_path, capsys):
    from plures.lab.cli.main import main
    from plures.lab.runs.open import open_run

    folder = shutil.copytree(Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout", tmp_path / "run")
    assert main(["export", str(folder), str(tmp_path / "digits.pt2")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["not calibrated"]
    ensemble = open_run(folder).ensemble.calibrate(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    plures.save(ensemble, folder / "ensemble.safetensors")
    assert main(["export", str(folder), str(tmp_path / "digits.pt2")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [ensemble.calibration.summary()]


def test_a_run_becomes_a_file_that_takes_pixels(tmp_path, capsys):
    import onnx

    from plures.lab.cli.main import main
    from plures.lab.runs.open import open_run

    folder = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"
    assert main(["export", str(folder), str(tmp_path / "digits.onnx")]) == 0
    assert f"{(tmp_path / 'digits.onnx').stat().st_size:,} bytes" in capsys.readouterr().out
    opened = open_run(folder)
    assert_agrees(
        tmp_path / "digits.onnx", opened.ensemble, lambda batch: pixels(batch, 8, 1), "inputs", opened.info.normalise
    )
    about = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "digits.onnx").metadata_props}
    assert about["classes"] == list(opened.info.classes)
    assert about["preprocessing"]["mean"] == list(opened.info.mean)
    assert about["provenance"]["fingerprint"] == opened.fingerprint
    # The application of the guide, which has neither plures nor torch.
    guide: dict[str, Any] = {}
    exec(re.search(r"```python\n(import json\nimport numpy, .*?)```", GUIDE.read_text(), re.DOTALL)[1], guide)
    for seed in range(5):
        image = torch.randint(0, 256, (1, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        Image.fromarray(image[0, :, :, 0].numpy()).save(tmp_path / "digit.png")
        label, confidence = guide["classify"](tmp_path / "digit.png", tmp_path / "digits.onnx")
        expected = opened.ensemble.predict(opened.info.normalise(image))
        assert label == opened.info.classes[int(expected.label)]
        assert confidence == pytest.approx(float(expected.confidence), abs=1e-4)
