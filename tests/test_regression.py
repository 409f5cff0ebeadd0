"""Numbers: the split of variance, the loss, intervals, and what the members gain."""

import copy
import math
from pathlib import Path

import pytest
import torch
from crepes import ConformalRegressor
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from plures import PluresError
from plures.answers import Regression


def network(outputs: int = 2, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs))


def waves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A wave whose noise grows to the right."""
    random = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, generator=random) - 2
    noise = (0.05 + 0.1 * (x + 2)) * torch.randn(count, 1, generator=random)
    return x, torch.sin(2 * x) + noise


def train(ensemble: plures.Ensemble, data: tuple[Tensor, Tensor], steps: int = 100) -> plures.Ensemble:
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            stage(*data).backward()
            optimizer.step()
    return ensemble


MADE: dict[int, plures.Ensemble] = {}


def made(seed: int = 0) -> plures.Ensemble:
    if seed not in MADE:
        split = plures.OrthogonalDropout(
            network(seed=seed), members=3, optimize_masks=False, loss=plures.GaussianNLL(), seed=seed
        )
        MADE[seed] = train(split, waves(150, seed=10 + seed))
    return copy.deepcopy(MADE[seed])


def test_variance_splits_as_the_law_of_total_variance_says() -> None:
    # Three members: means 1, 2, 6 and variances 1, 2, 3, so 3 + 14 / 3 in all, whatever the order.
    means, variances = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 2.0, 3.0])
    outputs = torch.stack([means, variances.log()], dim=1)[:, None, :]
    answer = Regression.from_outputs(outputs, variance=True)
    assert answer.mean.item() == pytest.approx(3)
    assert answer.aleatoric.item() == pytest.approx(2)
    assert answer.epistemic.item() == pytest.approx(14 / 3)
    assert answer.std.item() == pytest.approx(math.sqrt(2 + 14 / 3))
    # The same by sampling the mixture.
    random = torch.Generator().manual_seed(0)
    which = torch.randint(0, 3, (200_000,), generator=random)
    draws = means[which] + variances[which].sqrt() * torch.randn(200_000, generator=random)
    assert float(draws.var()) == pytest.approx(2 + 14 / 3, rel=0.02)


def test_without_variances_all_is_epistemic() -> None:
    answer = Regression.from_outputs(torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]]))
    assert answer.mean.tolist() == [[2.0, 5.0]]
    assert answer.aleatoric.tolist() == [[0.0, 0.0]]
    assert answer.epistemic.tolist() == [[1.0, 0.0]]


def test_the_loss_is_that_of_torch() -> None:
    outputs, targets = torch.randn(8, 6), torch.randn(8, 3)
    expected = nn.GaussianNLLLoss()(outputs[:, :3], targets, outputs[:, 3:].exp())
    assert torch.equal(plures.GaussianNLL()(outputs, targets), expected)
    one = torch.randn(8, 2)
    assert torch.equal(plures.GaussianNLL()(one, targets[:, 0]), plures.GaussianNLL()(one, targets[:, :1]))


def gaussian_nll(mean: torch.Tensor, std: torch.Tensor, targets: torch.Tensor) -> float:
    return -float(torch.distributions.Normal(mean, std).log_prob(targets).mean())


def test_nothing_is_frozen_and_the_last_layer_is_private() -> None:
    ensemble = plures.OrthogonalDropout(network(), members=3, loss=plures.GaussianNLL())
    assert plures.Role.SHARED not in ensemble.roles.values()
    assert ensemble.roles["4.weight"] is plures.Role.PRIVATE


def test_the_ensemble_is_likelier_than_its_average_member_over_five_seeds() -> None:
    for seed in range(5):
        x, targets = waves(400, seed=100 + seed)
        answer = made(seed).regress(x)
        stds = answer.variances.sqrt()
        each = [gaussian_nll(mean, std, targets) for mean, std in zip(answer.members, stds, strict=True)]
        ensemble = gaussian_nll(answer.mean, answer.std, targets)
        assert ensemble < sum(each) / len(each)


def test_members_disagree_away_from_the_data() -> None:
    answer = made().regress(torch.tensor([[0.0], [6.0]]))
    assert float(answer.epistemic[1]) > 5 * float(answer.epistemic[0])


@pytest.mark.parametrize("normalised", [False, True])
def test_intervals_cover_as_often_as_asked(normalised: bool) -> None:
    ensemble, (x, targets) = made(), waves(1500, seed=7)
    found = []
    for split in range(20):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(split))
        held_out, new = order[:500], order[500:]
        ensemble.calibrate(x[held_out], targets[held_out])
        lower, upper = ensemble.regress(x[new]).interval(0.9, normalised=normalised)
        found.append(float(((lower <= targets[new]) & (targets[new] <= upper)).double().mean()))
    assert abs(sum(found) / 20 - 0.9) < 0.0165
    assert all(abs(one - 0.9) < 4 * 0.0165 for one in found)


@pytest.mark.parametrize("normalised", [False, True])
def test_intervals_are_those_of_crepes(normalised: bool) -> None:
    ensemble, (x, targets), (new, _) = made(), waves(200, seed=12), waves(50, seed=13)
    plain, asked = ensemble.regress(x), ensemble.regress(new)
    judge = ConformalRegressor()
    residuals = (targets - plain.mean)[:, 0].double().numpy()
    judge.fit(residuals, sigmas=plain.std[:, 0].double().numpy() if normalised else None)
    sigmas = asked.std[:, 0].double().numpy() if normalised else None
    expected = judge.predict_int(asked.mean[:, 0].double().numpy(), sigmas=sigmas, confidence=0.9)
    found = torch.cat(ensemble.calibrate(x, targets).regress(new).interval(0.9, normalised=normalised), dim=1)
    assert found.double().numpy() == pytest.approx(expected, abs=1e-5)


def test_an_empty_batch_has_an_empty_answer() -> None:
    answer = made().regress(torch.zeros(0, 1))
    assert len(answer) == 0
    assert answer.std.shape == (0, 1)


def test_normalised_intervals_follow_the_noise_and_plain_ones_are_even() -> None:
    x, targets = waves(500, seed=8)
    answer = made().calibrate(x, targets).regress(torch.tensor([[-1.8], [1.8]]))
    lower, upper = answer.interval(0.9)
    quiet, loud = (upper - lower)[:, 0].tolist()
    assert loud > 2 * quiet
    lower, upper = answer.interval(0.9, normalised=False)
    first, second = (upper - lower)[:, 0].tolist()
    assert first == pytest.approx(second, rel=1e-4)


def test_without_held_out_data_an_interval_is_that_of_the_normal_distribution() -> None:
    answer = Regression.from_outputs(torch.zeros(1, 1, 2), variance=True)
    assert answer.interval(0.95)[1].item() == pytest.approx(1.959964, rel=1e-4)


def test_calibration_scales_deviations_and_makes_held_out_targets_likelier() -> None:
    x, targets = waves(500, seed=9)
    ensemble = made()
    plain = ensemble.regress(x)
    scaled = ensemble.calibrate(x, targets).regress(x)
    before = gaussian_nll(plain.mean, plain.std, targets)
    assert gaussian_nll(scaled.mean, scaled.std, targets) <= before
    torch.testing.assert_close(scaled.std.square(), scaled.aleatoric + scaled.epistemic)
    assert torch.equal(ensemble.regress(x, calibrated=False).std, plain.std)
    assert "calibrated on 500 held-out samples: standard deviations x" in repr(ensemble)
    assert "calibrated" in repr(scaled)


def test_a_file_keeps_loss_and_calibration(tmp_path: Path) -> None:
    x, targets = waves(200, seed=11)
    ensemble = made().calibrate(x, targets)
    plures.save(ensemble, tmp_path / "waves.safetensors")
    loaded = plures.load(tmp_path / "waves.safetensors", network())
    assert loaded.loss == plures.GaussianNLL()
    for ours, theirs in zip(ensemble.regress(x).interval(0.9), loaded.regress(x).interval(0.9), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "name", ["DeepEnsemble", "MCDropout", "BatchEnsemble", "MIMO", "Masksembles", "PackedEnsemble"]
)
@pytest.mark.parametrize("loss", [plures.GaussianNLL(), F.mse_loss, nn.MSELoss()], ids=["gaussian", "mse", "MSELoss"])
def test_every_method_regresses(name: str, loss, tmp_path: Path) -> None:
    variance = isinstance(loss, plures.GaussianNLL)
    plain = network(4 if variance else 2)
    ensemble = getattr(plures, name)(plain, loss=loss)
    x = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
    train(ensemble, (x, torch.cat([x, -x], 1)), steps=2)
    answer = ensemble.regress(x, batch_size=3)
    assert answer.mean.shape == answer.std.shape == (8, 2)
    assert (answer.variances is not None) == variance
    assert bool((answer.std > 0).all())
    plures.save(ensemble, tmp_path / "it.safetensors")
    again = plures.load(tmp_path / "it.safetensors", plain).regress(x, batch_size=3)
    torch.testing.assert_close(again.mean, answer.mean)
    assert (again.variances is not None) == variance


def test_the_wrong_verb_gets_one_sentence() -> None:
    x, targets = waves(20, seed=0)
    with pytest.raises(PluresError, match="trained with GaussianNLL and returns numbers: call regress"):
        made().predict(x)
    classifier = train(plures.Deterministic(network(3)), (x, torch.zeros(20, dtype=torch.long)), steps=1)
    with pytest.raises(PluresError, match="trained with cross_entropy and returns logits of classes: call predict"):
        classifier.regress(x)
    with pytest.raises(PluresError, match=r"targets of shape \[20, 3\] do not fit predictions of shape \[20, 1\]"):
        made().calibrate(x, targets.expand(-1, 3))
    with pytest.raises(PluresError, match="an even number"):
        plures.GaussianNLL()(torch.randn(4, 3), torch.randn(4, 1))
    with pytest.raises(PluresError, match="give targets of the means' shape"):
        plures.GaussianNLL()(torch.randn(4, 4), torch.randn(4))
    with pytest.raises(PluresError, match="needs at least 99 held-out samples, but there are 20"):
        made().calibrate(x, targets).regress(x).interval(0.99)
