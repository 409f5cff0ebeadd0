"""What the last version wrote is read by this one: files of every method, and run folders."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import plures

WRITTEN = Path(__file__).parent / "data" / "v0.1"
EXPECTED = json.loads((WRITTEN / "files" / "expected.json").read_text())


def network() -> nn.Module:
    """The network that the files were made from; its weights do not matter."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_the_last_version_predicts_as_it_did(name: str) -> None:
    ensemble = plures.load(WRITTEN / "files" / f"{name}.safetensors", network())
    inputs = torch.linspace(-1, 1, 3 * 16).reshape(3, 1, 4, 4)
    torch.testing.assert_close(ensemble.predict(inputs).members, torch.tensor(EXPECTED[name]))


def test_a_half_trained_file_of_the_last_version_goes_on() -> None:
    ensemble = plures.load(WRITTEN / "files" / "OrthogonalDropout-partial.safetensors", network())
    names = [stage.name for stage in ensemble.stages()]
    assert names == ["member 1 prune", "member 1 finetune", "member 2 pretrain", "member 2 finetune"]
