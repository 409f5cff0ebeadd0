"""Three lines from a network to a calibrated prediction, for every method: `ensemble.fit` trains all stages."""

import copy
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plures
from plures.methods import METHODS

README = Path(__file__).parent.parent / "README.md"


def digits(rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels[rows] / 16, dtype=torch.float32), torch.tensor(labels[rows])


def loader(rows: slice, batch: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*digits(rows)), batch, shuffle=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


OPTIONS: dict[str, dict[str, Any]] = {"MCDropout": {"passes": 3}, "Deterministic": {}}
KINDS = [*((name, OPTIONS.get(name, {"members": 2})) for name in METHODS)]
KINDS += [("OrthogonalDropout", {"members": 2, "schedule": "together"}), ("split", {}), ("adapt", {})]


# What a newcomer writes around the three lines of the README.
BEFORE = """
import plures, torch
from sklearn.datasets import load_digits

pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
loader = torch.utils.data.DataLoader(list(zip(pixels[:1000], labels[:1000])), 64, shuffle=True)
held_out = [(pixels[1000:1300], labels[1000:1300])]
"""


def three_lines(method: str, options: dict[str, Any]) -> str:
    """Return the README's three lines for another method, fewer epochs and the digits that are not trained on."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    (lines,) = re.findall(r"^ensemble = .*\nensemble\.fit.*\nprediction = .*\n", code, re.MULTILINE)
    words = ", ".join(["network", *(f"{name}={value!r}" for name, value in options.items())])
    changes = {
        "split(network, members=5)": f"{method}({words})",
        "epochs=60)": "epochs=13, validation=held_out, progress=False)",
        "loader[0][0]": "pixels[1300:]",
    }
    for given, wanted in changes.items():
        assert given in lines
        lines = lines.replace(given, wanted)
    return lines


@pytest.mark.parametrize(("method", "options"), KINDS)
def test_three_lines_for_every_method(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    given = network()
    if method == "adapt":
        given = plures.Deterministic(given).fit(loader(slice(1000)), epochs=13, progress=False).checkout(0)
    assert "not trained: call fit, or loop over stages()" in repr(getattr(plures, method)(given, **options))
    file = tmp_path / "three_lines.py"
    file.write_text(BEFORE + three_lines(method, options))
    names = runpy.run_path(str(file), {"network": given})
    ensemble, prediction = names["ensemble"], names["prediction"]
    inputs, labels = digits(slice(1300, None))
    assert (prediction.label == labels).float().mean() > 0.7
    assert prediction.sets(coverage=0.9).shape == (len(inputs), 10)
    assert prediction.confidence.shape == prediction.epistemic.shape == labels.shape
    ensemble.save(tmp_path / "digits.safetensors")
    again = plures.load(tmp_path / "digits.safetensors", given)
    assert again.predict(inputs).members.equal(prediction.members)


def made(seed: int = 0) -> plures.Ensemble:
    torch.manual_seed(seed)
    return plures.OrthogonalDropout(network(), 2)


class Stopped(Exception):  # noqa: N818 - not an error
    """The process ends."""


@pytest.mark.parametrize("after", [1, 4, 10])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, after: int) -> None:
    epochs = {"pretrain": 3, "prune": 2, "finetune": 3}
    whole = made().fit(loader(slice(256)), epochs, progress=False)
    file, seen = tmp_path / "training.safetensors", []

    def stop(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == after:
            raise Stopped

    with pytest.raises(Stopped):
        made().fit(loader(slice(256)), epochs, checkpoint=file, callbacks=[stop], progress=False)
    again = made(seed=7)  # another process has drawn another network since, and other numbers
    resumed = again.fit(loader(slice(256)), epochs, checkpoint=file, progress=False)
    for name, tensor in whole.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name
    calls: list[Any] = []
    resumed.fit(loader(slice(256)), epochs, checkpoint=file, callbacks=[calls.append], progress=False)
    assert not calls


def test_batches_may_be_dicts_with_labels() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, pixels: Tensor, scale: Tensor) -> Tensor:
            logits: Tensor = self.inner(pixels * scale[:, None])
            return logits

    inputs, labels = digits(slice(256))
    batches = [
        {"pixels": x, "scale": torch.ones(len(x)), "labels": y}
        for x, y in zip(inputs.split(32), labels.split(32), strict=True)
    ]
    records: list[dict[str, Any]] = []
    plures.DeepEnsemble(Named(), 2).fit(batches, 30, callbacks=[records.append], progress=False)
    assert records[29]["loss"] < records[0]["loss"] / 2
    assert [record["stage"] for record in records[::30]] == ["member 0 train", "member 1 train"]


def test_the_optimizer_the_rate_and_the_progress_are_the_users_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    rates: list[float] = []

    def optimizer(stage: plures.Stage) -> torch.optim.Optimizer:
        return torch.optim.SGD(stage.parameters(), lr=0.5)

    plures.Deterministic(network()).fit(
        loader(slice(256)),
        4,
        optimizer=optimizer,
        schedule="constant",
        callbacks=[lambda r: rates.append(r["learning_rate"])],
    )
    assert rates == [0.5] * 4
    shown = capsys.readouterr().err
    assert "epoch 4/4" in shown
    assert "only 16 steps" in shown
    plures.Deterministic(network()).fit(loader(slice(256)), 4, progress=False)
    assert capsys.readouterr().err == ""


def generated() -> Iterator[tuple[Tensor, Tensor]]:
    yield digits(slice(32))


def mislabelled(label: int) -> tuple[Tensor, Tensor]:
    images, labels = digits(slice(32))
    return images, torch.cat([labels[:-1], torch.tensor([label])])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loader": []}, "gave no batch in epoch 1: it is empty"),
        ({"loader": generated()}, "gave no batch in epoch 2: it is empty, drops its only batch, or is a generator"),
        ({"loader": [digits(slice(32))[0]]}, "expected pairs of inputs and targets"),
        ({"loader": [{"pixels": digits(slice(32))[0]}]}, "none of labels"),
        ({"epochs": 0}, "epochs=0; use a whole number"),
        ({"epochs": {"prune": 1}}, "nothing for the phase 'train'"),
        ({"schedule": "cosin"}, "schedule='cosin'; use one of cosine, constant"),
        ({"optimizer": lambda stage: torch.optim.SGD(stage.parameters(), lr=1e30)}, "became NaN or infinite"),
        (
            {"loader": [(digits(slice(32))[0] * float("nan"), digits(slice(32))[1])]},
            "became NaN or infinite .* because inputs or targets have NaN or infinity: clean the data",
        ),
        ({"optimizer": lambda stage: None}, "optimizer= returned NoneType: return an optimizer"),
        ({"validation": [(digits(slice(32))[0], None)]}, "the targets are not numbers"),
        (
            {"validation": [digits(slice(32)), mislabelled(10)]},
            "validation has the target 10: the network has 10 classes, from 0",
        ),
        ({"validation": [(digits(slice(32))[0], digits(slice(32))[1][:, None])]}, "give one class for each place"),
        ({"validation": [mislabelled(-1)], "patience": 1}, "validation has the target -1: the network has 10"),
    ],
)
def test_bad_input_gets_one_sentence(given: dict[str, Any], words: str) -> None:
    arguments = {"loader": [digits(slice(32))], "epochs": 3, "progress": False} | given
    with pytest.raises(plures.PluresError, match=words):
        plures.Deterministic(network()).fit(**arguments)


def test_held_out_labels_are_checked_before_the_first_epoch() -> None:
    records: list[dict[str, Any]] = []
    given: dict[str, Any] = {"progress": False, "callbacks": [records.append]}
    with pytest.raises(plures.PluresError, match="-100 is no label"):
        plures.split(network(), 2).fit(loader(slice(64)), 1, validation=[mislabelled(10)], **given)
    assert not records
    dense = nn.Conv2d(1, 3, 3, padding=1)
    places = torch.randint(3, (8, 4, 4))
    data = DataLoader(TensorDataset(torch.rand(8, 1, 4, 4), places), 4)
    unlabelled = [(torch.rand(2, 1, 4, 4), torch.tensor([0, 1, 2, -100]).expand(2, 4, 4))]
    plures.DeepEnsemble(dense, 2).fit(data, 1, validation=unlabelled, **given)
    assert len(records) == 2
    with pytest.raises(plures.PluresError, match="validation has the target 3: the network has 3"):
        plures.DeepEnsemble(dense, 2).fit(data, 1, validation=[(torch.rand(2, 1, 4, 4), places[:2] + 1)], **given)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "training.safetensors"
    plures.Deterministic(network()).fit(loader(slice(64)), 1, checkpoint=file, progress=False)
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    ensemble = plures.Deterministic(network())
    before = copy.deepcopy(ensemble.state_dict())
    with pytest.raises(plures.PluresError, match="damaged"):
        ensemble.fit(loader(slice(64)), 1, checkpoint=file, progress=False)
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items())


def test_a_checkpoint_is_taken_by_the_ensemble_that_wrote_it_alone(tmp_path: Path) -> None:
    file, data = tmp_path / "training.safetensors", loader(slice(128))
    plures.DeepEnsemble(network(), 2).fit(data, 1, checkpoint=file, progress=False)
    for other, epochs in ((plures.DeepEnsemble(network(), 2, seed=1), 1), (plures.DeepEnsemble(network(), 2), 2)):
        with pytest.raises(plures.PluresError, match="other options or epochs"):
            other.fit(data, epochs, checkpoint=file, progress=False)
    wide = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with pytest.raises(plures.PluresError, match="another network or method"):
        plures.DeepEnsemble(wide, 2).fit(data, 1, checkpoint=file, progress=False)
    half = plures.DeepEnsemble(network(), 2)
    half.open(half.plan()[0]).commit()
    with pytest.raises(plures.PluresError, match="would replace what the ensemble has learned"):
        half.fit(data, 1, checkpoint=file, progress=False)


def test_fit_checks_what_a_stage_checks() -> None:
    single = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
    for ensemble in (plures.DeepEnsemble(single, 2), plures.split(single, 2)):
        with pytest.raises(plures.PluresError, match="one number per sample"):
            ensemble.fit(loader(slice(64)), 1, progress=False)
    with pytest.raises(plures.PluresError, match="not a generator"):
        plures.Deterministic(network()).fit(loader(slice(64)), 1, validation=generated(), progress=False)


def test_videos_and_numbers_train_as_well() -> None:
    video = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    data = TensorDataset(torch.rand(16, 1, 4, 4, 4), torch.arange(16) % 3)
    plures.DeepEnsemble(video, 2).fit(DataLoader(data, 8), 1, progress=False)
    records: list[dict[str, Any]] = []
    numbers = DataLoader(TensorDataset(torch.rand(16, 3), torch.rand(16)), 8)
    forecaster = plures.DeepEnsemble(nn.Linear(3, 2), 2, loss=plures.GaussianNLL())
    forecaster.fit(numbers, 1, progress=False, callbacks=[records.append])
    assert records[0]["validation_accuracy"] is None


OPTIMIZERS = ("SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "Rprop", "RMSprop", "ASGD", "Adafactor")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}.get(name, {})

    def optimizer(stage: plures.Stage) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, name)
        made: torch.optim.Optimizer = kind(stage.parameters(), lr=0.01, **options)
        return made

    def trained(file: Path | None = None, after: int = 4) -> plures.Ensemble:
        def stop(record: dict[str, Any]) -> None:
            if record["epoch"] == after:
                raise Stopped

        torch.manual_seed(0)
        split = plures.split(network(), 2)
        return split.fit(loader(slice(128)), 3, optimizer=optimizer, checkpoint=file, callbacks=[stop], progress=False)

    with pytest.raises(Stopped):
        trained(tmp_path / "training.safetensors", after=1)
    resumed = trained(tmp_path / "training.safetensors").state_dict()
    for key, tensor in trained().state_dict().items():
        assert tensor.equal(resumed[key]), key


def noisy(rows: slice) -> DataLoader[tuple[Tensor, ...]]:
    inputs, labels = digits(rows)
    return DataLoader(TensorDataset(inputs, torch.where(torch.arange(len(labels)) % 3 == 0, 1, labels)), 16)


@pytest.mark.parametrize("after", [None, 2, 5])
def test_patience_keeps_the_best_epoch_also_when_it_goes_on(tmp_path: Path, after: int | None) -> None:
    file, held_out = tmp_path / "training.safetensors", loader(slice(200, 300))
    losses: list[float] = []
    ensemble = made = plures.split(network(), 2)

    def watch(record: dict[str, Any]) -> None:
        losses.append(record["validation_loss"])
        if len(losses) == after:
            raise Stopped

    options = {"validation": held_out, "patience": 3, "checkpoint": file, "callbacks": [watch], "progress": False}
    options["optimizer"] = lambda stage: torch.optim.Adam(stage.parameters(), lr=0.02)
    if after is not None:
        with pytest.raises(Stopped):
            copy.deepcopy(ensemble).fit(noisy(slice(96)), 60, **options)
    made.fit(noisy(slice(96)), 60, **options)
    assert len(losses) < 60
    assert losses.index(min(losses)) == len(losses) - 4
    inputs, labels = next(iter(DataLoader(TensorDataset(*digits(slice(200, 300))), 100)))
    prediction = made.predict(inputs, calibrated=False)
    assert plures.metrics.nll(prediction.probabilities, labels) == pytest.approx(min(losses), rel=1e-4)


def test_patience_wants_held_out_batches() -> None:
    with pytest.raises(plures.PluresError, match="patience=3 needs held-out batches: give validation="):
        plures.split(network(), 2).fit(loader(slice(64)), 1, patience=3, progress=False)


def test_held_out_batches_of_one_class_do_not_spoil_the_end_of_a_training(caplog: pytest.LogCaptureFixture) -> None:
    inputs, labels = digits(slice(64))
    ensemble = plures.split(network(), 2)
    ensemble.fit(loader(slice(64)), 1, validation=[(inputs[labels == 3], labels[labels == 3])], progress=False)
    assert ensemble.calibration is None
    assert "trained and not calibrated: all 8 held-out targets are class 3" in caplog.text


def test_a_second_fit_says_that_it_trains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ensemble = made().fit(loader(slice(64)), epochs=1, progress=False)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    caplog.clear()
    ensemble.fit(loader(slice(64)), epochs=1, progress=False)
    assert "fit trains nothing" in caplog.text
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items())
