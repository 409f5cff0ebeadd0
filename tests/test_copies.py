"""Ensembles that are cast, moved, copied, pickled or filled from a state dict: right, or refused in one sentence."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import plures
from test_contract import METHODS, build, identify

every_method = pytest.mark.parametrize("method", METHODS, ids=identify)
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CASTS = [(torch.float64, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)]


class Mixed(nn.Module):
    """A network whose head has another precision than its body, and whose first layer runs twice."""

    def __init__(self, head: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4, dtype=head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.body(x)).relu())
        return self.head(x.mean((2, 3)).to(self.head.weight.dtype))


TRAINED: dict[str, plures.Ensemble] = {}


def trained(method, head: torch.dtype = torch.float32) -> plures.Ensemble:
    key = f"{identify(method)} {head}"
    if key not in TRAINED:
        ensemble = build(method, Mixed(head))
        for stage in ensemble.stages():
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
            for _ in range(2):
                optimizer.zero_grad()
                stage(IMAGES, torch.arange(6) % 4).backward()
                optimizer.step()
        TRAINED[key] = ensemble
    return copy.deepcopy(TRAINED[key])


@every_method
@pytest.mark.parametrize(("dtype", "tolerance"), CASTS, ids=str)
def test_a_cast_ensemble_predicts_nearly_the_same(method, dtype: torch.dtype, tolerance: float) -> None:
    ensemble = trained(method)
    expected = ensemble.predict(IMAGES).members
    ensemble.to(dtype)
    assert {one.dtype for one in ensemble.parameters()} == {dtype}
    found = ensemble.predict(IMAGES.to(dtype)).members
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
    with pytest.raises(plures.PluresError, match=f"the inputs are torch.float32, but the ensemble is {dtype}"):
        ensemble.predict(IMAGES)


@every_method
def test_a_cast_ensemble_is_saved_as_what_it_is(method, tmp_path) -> None:
    ensemble = trained(method).half()
    plures.save(ensemble, tmp_path / "half.safetensors")
    loaded = plures.load(tmp_path / "half.safetensors", Mixed().half())
    assert torch.equal(loaded.predict(IMAGES.half()).members, ensemble.predict(IMAGES.half()).members)


@every_method
def test_precisions_may_be_mixed(method, tmp_path) -> None:
    ensemble = trained(method, torch.float64)
    assert ensemble(IMAGES).dtype == torch.float64
    plures.save(ensemble, tmp_path / "mixed.safetensors")
    loaded = plures.load(tmp_path / "mixed.safetensors", Mixed(torch.float64))
    assert torch.equal(loaded(IMAGES), ensemble(IMAGES))
    assert {one.dtype for one in loaded.parameters()} == {torch.float32, torch.float64}


@every_method
def test_copies_predict_the_same_and_stand_alone(method) -> None:
    ensemble = trained(method)
    expected = ensemble.predict(IMAGES).members
    for copied in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert torch.equal(copied.predict(IMAGES).members, expected)
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter.add_(1)
        assert torch.equal(copied.predict(IMAGES).members, expected), "a copy has tensors of its own"
        ensemble = trained(method)


@every_method
def test_a_state_dict_carries_weights_and_progress(method, caplog: pytest.LogCaptureFixture) -> None:
    ensemble, other = trained(method), build(method, Mixed())
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other.predict(IMAGES).members, ensemble.predict(IMAGES).members)
    assert other.trained == ensemble.trained
    ensemble.calibrate(IMAGES, torch.arange(6) % 4)
    caplog.clear()
    ensemble.load_state_dict(other.state_dict())
    assert ensemble.calibration is None, "it was of other weights"
    assert "call calibrate again" in caplog.text


@every_method
def test_inference_mode_leaves_nothing_behind(method) -> None:
    ensemble = trained(method)
    with torch.inference_mode():
        inside = ensemble.predict(IMAGES).members
    images = IMAGES.clone().requires_grad_()
    ensemble(images).square().sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
    assert torch.equal(ensemble.predict(images).members, inside)
    assert not ensemble.predict(images).probabilities.requires_grad
