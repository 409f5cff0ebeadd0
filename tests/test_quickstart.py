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
from short import launcher_here

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=450, random_state=0, stratify=labels)
    train_pixels, test_pixels = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_pixels, train_labels), test_pixels, test_labels


def loader(data: TensorDataset, epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = DataLoader(data, batch_size=128, shuffle=True)
    return [batch for _ in range(epochs) for batch in batches]


def split_nll(digits, epochs: int) -> float:
    """Run the code of the README on real data, `epochs` times."""
    train, pixels, labels = digits
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    code, replaced = re.subn(r"^loader = .*\n", "", code, flags=re.MULTILINE)
    assert replaced == 1
    torch.manual_seed(0)
    names = {"loader": loader(train, epochs)}
    exec(compile(code, "README", "exec"), names)
    return plures.metrics.nll(names["ensemble"].predict(pixels).probabilities, labels)


def plain_nll(digits, epochs: int) -> float:
    train, pixels, labels = digits
    torch.manual_seed(0)
    batches = loader(train, epochs)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    ensemble = plures.Deterministic(network)
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        for images, answers in batches:
            optimizer.zero_grad()
            stage(images, answers).backward()
            optimizer.step()
    return plures.metrics.nll(ensemble.predict(pixels).probabilities, labels)


@pytest.mark.parametrize(("epochs", "bar"), [(5, 1.3), (20, 1.0)])
def test_the_quickstart_is_no_worse_than_the_plain_network_soon_and_better_later(
    digits, epochs: int, bar: float, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_nll(digits, epochs) < bar * plain_nll(digits, epochs)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    save_file(network.state_dict(), "plain.safetensors")
    said = re.search(r"plures\.save\(.*# ([\d.]+) x this small network", README.read_text())
    assert said
    growth = Path("digits.safetensors").stat().st_size / Path("plain.safetensors").stat().st_size
    assert growth == pytest.approx(float(said[1]), abs=0.05)


@pytest.mark.slow
def test_the_demonstration_is_better_than_the_single_network(tmp_path, monkeypatch) -> None:
    """Train as `make demo` does, with its seed; docs/results.md has three."""
    monkeypatch.setattr("plures.lab.compare.compare.launcher_for", launcher_here)
    words = ["compare", "digits", "--methods", "deterministic", "orthogonal-dropout", "--runs", str(tmp_path)]
    assert main([*words, "--out", str(tmp_path / "table")]) == 0
    (table,) = (tmp_path / "table").glob("*.json")
    rows = {row["name"]: row["metrics"] for row in json.loads(table.read_text())["rows"]}
    for metric in ("nll", "ece"):
        assert rows["orthogonal-dropout"][metric]["mean"] < rows["deterministic"][metric]["mean"], metric
