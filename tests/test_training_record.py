"""A stage knows whether it was trained: it says so when it is committed, in any loop."""

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plures

INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long() + 2 * (INPUTS[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))


def train(stage: plures.Stage, steps: int, rate: float = 0.01, model: nn.Module | None = None) -> None:
    optimizer = torch.optim.Adam(stage.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        (stage if model is None else model)(INPUTS, LABELS).backward()
        optimizer.step()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "plures")
    return caplog


METHODS = ["OrthogonalDropout", "DeepEnsemble", "MCDropout", "BatchEnsemble", "MIMO", "Masksembles", "PackedEnsemble"]
every_method = pytest.mark.parametrize("method", [*METHODS, "Deterministic"])


@every_method
def test_a_stage_without_a_step_says_so(method: str, said: pytest.LogCaptureFixture) -> None:
    names = [stage.name for stage in getattr(plures, method)(network()).stages()]
    for name in names:
        assert f"stage '{name}' is committed without a training step" in said.text


@every_method
def test_a_trained_stage_says_nothing(method: str, said: pytest.LogCaptureFixture) -> None:
    for stage in getattr(plures, method)(network()).stages():
        train(stage, 60)
    assert not said.messages


@every_method
def test_a_member_at_chance_says_so(method: str, said: pytest.LogCaptureFixture) -> None:
    stage = next(getattr(plures, method)(network()).stages())
    train(stage, 20, rate=1e-9)
    heads = stage.record.chance.item() / math.log(4)
    assert heads == pytest.approx(round(heads), abs=1e-3)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    train(stage, 40, rate=1e-9)
    stage.commit()
    assert "no better than chance" in said.text
    assert "(1.39 for 4 classes)" in said.text  # of one member, also if the loss is the sum of several


def test_few_steps_are_counted(said: pytest.LogCaptureFixture) -> None:
    stage = next(plures.DeepEnsemble(network()).stages())
    train(stage, 3)
    stage.commit()
    assert said.messages == ["stage 'member 0 train' is committed after only 3 training steps"]


def test_steps_that_change_nothing_are_told(said: pytest.LogCaptureFixture) -> None:
    stage = next(plures.DeepEnsemble(network()).stages())
    for _ in range(20):
        stage(INPUTS, LABELS).backward()  # and no optimizer
    stage.commit()
    assert "its parameters did not change in 20 steps: call optimizer.step()" in said.text


def test_an_exhausted_generator_leaves_the_later_stages_untrained(said: pytest.LogCaptureFixture) -> None:
    loader = ((INPUTS, LABELS) for _ in range(200))
    for stage in plures.DeepEnsemble(network(), members=2).stages():
        optimizer = torch.optim.Adam(stage.parameters())
        for inputs, targets in loader:
            optimizer.zero_grad()
            stage(inputs, targets).backward()
            optimizer.step()
    assert said.messages == ["stage 'member 1 train' is committed without a training step"]


def test_a_stage_that_was_trained_elsewhere_counts_as_trained(said: pytest.LogCaptureFixture) -> None:
    ensemble, other = (plures.DeepEnsemble(network(), members=1) for _ in range(2))
    stage, theirs = next(ensemble.stages()), next(other.stages())
    train(theirs, 200)
    stage.load_state_dict(theirs.state_dict())
    train(stage, 2)
    stage.commit()
    average = copy.deepcopy(theirs)
    average.commit()
    assert not said.messages


def test_validation_is_not_a_step(said: pytest.LogCaptureFixture) -> None:
    stage = next(plures.DeepEnsemble(network()).stages())
    stage.eval()
    stage(INPUTS, LABELS)
    stage.train()
    with torch.no_grad():
        stage(INPUTS, LABELS)
    stage.commit()
    assert "without a training step" in said.text


def test_wrappers_and_compilers_count_as_well(said: pytest.LogCaptureFixture) -> None:
    ensemble = plures.DeepEnsemble(network(), members=1)
    stage = next(ensemble.stages())
    train(stage, 5, model=torch.compile(stage, backend="aot_eager", fullgraph=True))
    stage.commit()
    assert said.messages == ["stage 'member 0 train' is committed after only 5 training steps"]


@pytest.mark.parametrize("target", [False, True])
def test_bad_data_are_blamed_and_not_the_learning_rate(target: bool) -> None:
    stage = next(plures.DeepEnsemble(nn.Linear(6, 1), loss=F.mse_loss).stages())
    inputs, targets = INPUTS.clone(), INPUTS[:, :1].clone()
    (targets if target else inputs)[3, 0] = math.nan
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    stage(inputs, targets).backward()
    optimizer.step()
    with pytest.raises(plures.PluresError, match="inputs or targets with NaN or infinity: clean the data"):
        stage.commit()


def test_a_rate_that_is_too_high_is_blamed_for_nan() -> None:
    stage = next(plures.DeepEnsemble(nn.Linear(6, 1), loss=F.mse_loss).stages())
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e30)
    for _ in range(5):
        optimizer.zero_grad()
        stage(INPUTS, INPUTS[:, :1]).backward()
        optimizer.step()
    with pytest.raises(plures.PluresError, match="lower learning rate"):
        stage.commit()


def test_saving_beside_a_trained_stage_names_commit(tmp_path, said: pytest.LogCaptureFixture) -> None:
    ensemble = plures.DeepEnsemble(network(), members=2)
    stage = next(ensemble.stages())
    plures.save(ensemble, tmp_path / "untouched.safetensors")
    assert not said.messages
    train(stage, 20)
    plures.save(ensemble, tmp_path / "open.safetensors")
    assert "stage 'member 0 train' is not committed" in said.text
    assert "call stage.commit() first" in said.text
    said.clear()
    stage.commit()
    plures.save(ensemble, tmp_path / "committed.safetensors")
    assert not said.messages
    assert copy.deepcopy(ensemble).trained == [0]


class Normed(nn.Module):
    """Batch norm whose running statistics move slowly, as in EfficientNet."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.mark.parametrize("momentum", [0.01, 0.1, None])
def test_statistics_from_before_a_stage_are_forgotten(momentum: float | None) -> None:
    torch.manual_seed(0)
    ensemble = plures.OrthogonalDropout(Normed(momentum), members=2)
    shifted = 3 * INPUTS + 2  # far from the statistics that a norm layer starts with
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
        for _ in range(30):
            optimizer.zero_grad()
            stage(shifted, LABELS).backward()
            optimizer.step()
    for member in range(2):
        layers = ensemble.checkout(member).layers
        seen = layers[0](shifted)
        torch.testing.assert_close(layers[1].running_mean, seen.mean(0), rtol=0.05, atol=0.05)
        torch.testing.assert_close(layers[1].running_var, seen.var(0), rtol=0.1, atol=0.05)
