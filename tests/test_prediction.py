"""What an ensemble says of a batch."""

import pytest
import torch
from torch import nn

import plures
from plures import PluresError, Prediction
from plures.calling import chunks


def trained(network: nn.Module, members: int = 3) -> plures.OrthogonalDropout:
    ensemble = plures.OrthogonalDropout(network, members=members, optimize_masks=False)
    for _ in ensemble.stages():
        pass
    return ensemble


@pytest.fixture
def ensemble() -> plures.OrthogonalDropout:
    torch.manual_seed(0)
    layers = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)
    return trained(nn.Sequential(*layers))


def test_the_mean_of_probabilities_not_of_logits() -> None:
    logits = torch.tensor([[[4.0, 0.0]], [[0.0, 1.0]]])
    prediction = Prediction.from_logits(logits)
    expected = (logits[0].softmax(-1) + logits[1].softmax(-1)) / 2
    torch.testing.assert_close(prediction.probabilities, expected)
    assert not torch.allclose(prediction.probabilities, logits.mean(0).softmax(-1))


def test_uncertainty_splits_into_two_parts(ensemble) -> None:
    prediction = ensemble.predict(torch.randn(50, 6))
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, atol=1e-6, rtol=0)
    assert (prediction.epistemic >= 0).all()
    assert prediction.members.shape == (3, 50, 4)
    torch.testing.assert_close(prediction.members.sum(-1), torch.ones(3, 50))
    assert prediction.label.equal(prediction.probabilities.argmax(-1))
    assert prediction.confidence.equal(prediction.probabilities.amax(-1))
    assert len(prediction) == 50


def test_members_that_agree_leave_nothing_epistemic() -> None:
    logits = torch.randn(1, 20, 5).expand(4, 20, 5)
    assert Prediction.from_logits(logits).epistemic.max() < 1e-6


def test_extreme_logits_stay_finite() -> None:
    prediction = Prediction.from_logits(torch.tensor([[[1e4, -1e4, 0.0]], [[-1e4, 1e4, 0.0]]]))
    assert prediction.total.isfinite().all()
    torch.testing.assert_close(prediction.epistemic, torch.tensor([2.0]).log())


def test_a_caller_may_ask_it_to_abstain(ensemble) -> None:
    inputs = torch.randn(50, 6)
    plain = ensemble.predict(inputs)
    limit = float(plain.confidence.median())
    asked = ensemble.predict(inputs, abstain_below=limit)
    assert asked.abstained.equal(plain.confidence < limit)
    assert 0 < int(asked.abstained.sum()) < 50
    assert (asked.label[asked.abstained] == -1).all()
    assert asked.label[~asked.abstained].equal(plain.label[~asked.abstained])
    assert not plain.abstained.any()
    with pytest.raises(PluresError, match="abstain_below=7"):
        ensemble.predict(inputs, abstain_below=7)


def test_any_batch_size_gives_the_same_answer(ensemble) -> None:
    inputs = torch.randn(13, 6)
    whole = ensemble.predict(inputs)
    for size in (1, 4, 13, 100):
        parts = ensemble.predict(inputs, batch_size=size)
        torch.testing.assert_close(parts.probabilities, whole.probabilities)
    assert len(ensemble.predict(inputs[:1])) == 1
    with pytest.raises(PluresError, match="batch_size=0"):
        ensemble.predict(inputs, batch_size=0)


def test_a_batch_of_nothing_has_no_answers(ensemble) -> None:
    prediction = ensemble.predict(torch.randn(0, 6))
    assert prediction.probabilities.shape == (0, 4)
    assert len(prediction) == len(prediction.epistemic) == 0


def test_tuples_and_dicts_are_cut_alike() -> None:
    a, b = torch.arange(5), torch.arange(10).reshape(5, 2)
    assert [len(part.args[1]) for part in chunks((a, b), 2)] == [2, 2, 1]
    assert [part.kwargs["b"].tolist() for part in chunks({"a": a, "b": b, "flag": True}, 4)][1] == [[8, 9]]


@pytest.mark.parametrize("mode", [True, False])
def test_predict_runs_in_eval_without_gradient_and_restores_the_mode(ensemble, mode: bool) -> None:
    ensemble.train(mode)
    inputs = torch.randn(8, 6)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    first, second = ensemble.predict(inputs), ensemble.predict(inputs)
    assert first.probabilities.equal(second.probabilities), "dropout must be off"
    assert not first.probabilities.requires_grad
    assert ensemble.training is mode
    assert all(tensor.equal(before[name]) for name, tensor in ensemble.state_dict().items()), "statistics must not move"


def test_calling_in_train_mode_changes_no_member(ensemble) -> None:
    inputs = torch.randn(8, 6)
    ensemble.train()
    logits = ensemble(inputs)
    ensemble.eval()
    assert logits.equal(ensemble(inputs))


def test_nan_is_refused_with_its_place(ensemble) -> None:
    inputs = torch.randn(4, 6)
    inputs[2, 5] = torch.nan
    with pytest.raises(PluresError, match=r"NaN, first at \[2, 5\]"):
        ensemble.predict(inputs)
    inputs[2, 5] = torch.inf
    with pytest.raises(PluresError, match="member 0 returned NaN for sample 2"):
        ensemble.predict(inputs)


def test_a_network_that_returns_no_logits_is_refused() -> None:
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    network = nn.Sequential(nn.Linear(4, 9), Pair(9, 3))
    with pytest.raises(PluresError, match="the network returned tuple"):
        trained(network, 2).predict(torch.randn(2, 4))


def test_networks_that_return_an_object_with_logits_and_take_named_inputs() -> None:
    class Output:
        def __init__(self, logits) -> None:
            self.logits = logits

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, values):
            return Output(self.head(self.hidden(values).relu()))

    ensemble = trained(Named(), 2)
    values = torch.randn(5, 4)
    assert ensemble.predict({"values": values}).probabilities.equal(ensemble.predict(values).probabilities)
    assert ensemble.predict((values,)).probabilities.equal(ensemble.predict(values).probabilities)


def test_logits_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(PluresError, match=r"expected \[members, batch, classes\]"):
        Prediction.from_logits(torch.zeros(3, 4))


def test_batch_size_divides_every_tensor_that_is_as_long_as_the_first() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.seen: list[list[int]] = []

        def forward(self, x: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            self.seen.append([len(x), len(scale), len(table)])
            result: torch.Tensor = self.layer(x) * scale[:, None] + table
            return result

    ensemble = plures.Deterministic(Scaled())
    given = {"x": torch.randn(7, 6), "scale": torch.rand(7), "table": torch.randn(3)}
    whole = ensemble.predict(given).probabilities
    torch.testing.assert_close(ensemble.predict(given, batch_size=4).probabilities, whole)
    assert ensemble.network.seen == [[7, 7, 3], [4, 4, 3], [3, 3, 3]]
