"""The method at work on real images: the handwritten digits of scikit-learn."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.utils import parametrize

import plures
from plures import metrics
from plures.methods.orthogonal_dropout.masks import unmasked

EPOCHS = {"pretrain": 12, "prune": 4, "finetune": 12}


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16
    parts = train_test_split(inputs, torch.tensor(labels), train_size=500, stratify=labels, random_state=0)
    return tuple(parts)


def fit(stage: plures.Stage, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for _ in range(EPOCHS[stage.phase]):
        for batch in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            stage(inputs[batch], targets[batch]).backward()
            optimizer.step()


def accuracy(network: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.no_grad():
        return metrics.accuracy(network.eval()(inputs).softmax(-1), targets)


def with_random_masks(pretrained: nn.Module, pruned: plures.Stage) -> nn.Module:
    """Keep as many of the pre-trained weights as the pruned stage does, at random among those it could choose from."""
    network = copy.deepcopy(pretrained)
    for ours, theirs in zip(network, pruned.network, strict=True):
        if parametrize.is_parametrized(theirs):
            free = theirs.parametrizations.weight[0].free.flatten().nonzero().flatten()
            kept = free[torch.randperm(len(free))[: theirs.parametrizations.weight[0].count]]
            mask = torch.zeros(ours.weight.numel()).scatter(0, kept, 1.0).reshape(ours.weight.shape)
            ours.weight.data.mul_(mask)
    return network


def test_five_members_beat_their_average_and_learned_masks_beat_random_ones(digits) -> None:
    train_inputs, test_inputs, train_targets, test_targets = digits
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    network = nn.Sequential(*layers)
    ensemble = plures.OrthogonalDropout(network, members=5)
    pretrained = copy.deepcopy(network)
    pruned, random = [], []
    for stage in ensemble.stages():
        fit(stage, train_inputs, train_targets)
        if stage.phase == "pretrain":
            pretrained.load_state_dict(unmasked(stage.network))
        if stage.phase == "prune":
            pruned.append(accuracy(stage.network, test_inputs, test_targets))
            random.append(accuracy(with_random_masks(pretrained, stage), test_inputs, test_targets))
    assert all(learned > chance for learned, chance in zip(pruned, random, strict=True)), (pruned, random)

    prediction = ensemble.predict(test_inputs)
    average = sum(metrics.nll(member, test_targets) for member in prediction.members) / 5
    assert metrics.nll(prediction.probabilities, test_targets) < average
    assert metrics.accuracy(prediction.probabilities, test_targets) > 0.9
    wrong = prediction.label != test_targets
    assert prediction.epistemic[wrong].mean() > prediction.epistemic[~wrong].mean()
