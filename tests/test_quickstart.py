"""The README's quickstart on real digits keeps the promise: what a newcomer copies is better than the plain network."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

import plures
from plures.lab.cli.main import main
from short import start_in_this_process

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=450, random_state=0, stratify=labels)
    train_pixels, test_pixels = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_pixels, train_labels), test_pixels, test_labels


class Batches(list):
    """All batches, in another order in every epoch; some can be looked at."""

    def __iter__(self):
        return iter([self[place] for place in torch.randperm(len(self)).tolist()])


def loader(data: TensorDataset) -> Batches:
    return Batches(DataLoader(data, batch_size=32, shuffle=True))


def split_nll(digits) -> float:
    """Run the code of the README on real data."""
    train, pixels, labels = digits
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    code, replaced = re.subn(r"^loader = .*\n", "", code, flags=re.MULTILINE)
    assert replaced == 1
    torch.manual_seed(0)
    names = {"loader": loader(train)}
    exec(compile(code, "README", "exec"), names)
    return plures.metrics.nll(names["ensemble"].predict(pixels).probabilities, labels)


def plain_nll(digits) -> float:
    train, pixels, labels = digits
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    ensemble = plures.Deterministic(network).fit(loader(train), epochs=60, progress=False)
    return plures.metrics.nll(ensemble.predict(pixels).probabilities, labels)


def test_the_quickstart_is_as_good_as_the_plain_network(digits, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_nll(digits) < 1.05 * plain_nll(digits)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    save_file(network.state_dict(), "plain.safetensors")
    said = re.search(r"ensemble\.save\(.*# ([\d.]+) x this small network", README.read_text())
    assert said
    growth = Path("digits.safetensors").stat().st_size / Path("plain.safetensors").stat().st_size
    assert growth == pytest.approx(float(said[1]), abs=0.05)


@pytest.mark.slow
def test_the_demonstration_is_better_than_the_single_network(tmp_path, monkeypatch) -> None:
    """Train as `make demo` does, with its seed."""
    monkeypatch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
    words = ["compare", "digits-resnet", "--together", "True", "--methods", "deterministic", "orthogonal-dropout"]
    assert main([*words, "--runs", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "digits-resnet/results.json").read_text())
    rows = {row["name"]: row for row in table["rows"]}
    for metric in ("nll", "ece"):
        split, single = (rows[name]["metrics"][metric]["mean"] for name in ("orthogonal-dropout", "deterministic"))
        assert split < single, metric
    assert rows["orthogonal-dropout"]["costs"]["size"] < 1.3
