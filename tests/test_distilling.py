"""Finetuning that also learns from the members before: the loss is what it says, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plures
from plures import OrthogonalDropout, PluresError

INPUTS = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def train(stage: plures.Stage, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        stage(INPUTS, TARGETS).backward()
        optimizer.step()


def opened(ensemble: OrthogonalDropout, name: str) -> plures.Stage:
    """Train up to a stage."""
    for stage in ensemble.stages():
        if stage.name == name:
            return stage
        train(stage)
    raise AssertionError(f"there is no stage {name}")


def test_the_loss_is_shared_between_the_targets_and_the_members_before() -> None:
    ensemble = OrthogonalDropout(network(), members=3, distill=0.3)
    stage = opened(ensemble, "member 2 finetune")
    said = ensemble.predict(INPUTS).probabilities
    logits = stage.logits(INPUTS)
    expected = 0.7 * F.cross_entropy(logits, TARGETS) + 0.3 * F.cross_entropy(logits, said)
    assert stage(INPUTS, TARGETS).allclose(expected)


@pytest.mark.parametrize("name", ["member 0 finetune", "member 1 pretrain", "member 1 prune"])
def test_without_members_before_and_before_finetuning_the_targets_are_all(name: str) -> None:
    stage = opened(OrthogonalDropout(network(), members=3, distill=0.3), name)
    assert stage(INPUTS, TARGETS).equal(F.cross_entropy(stage.logits(INPUTS), TARGETS))


def test_the_members_before_keep_every_bit_and_are_no_part_of_the_stage() -> None:
    ensemble = OrthogonalDropout(network(), members=2, distill=0.5)
    stage = opened(ensemble, "member 1 finetune")
    before = ensemble(INPUTS)[0]
    assert not {id(one) for one in ensemble.parameters()} & {id(one) for one in stage.parameters()}
    plain = opened(OrthogonalDropout(network(), members=2), "member 1 finetune")
    assert stage.state_dict().keys() == plain.state_dict().keys()
    averaged = copy.deepcopy(stage)
    assert averaged(INPUTS, TARGETS).equal(stage(INPUTS, TARGETS))
    train(stage)
    stage.commit()
    assert ensemble(INPUTS)[0].equal(before)


def test_a_file_keeps_the_share_and_goes_on_with_it(tmp_path) -> None:
    ensemble = OrthogonalDropout(network(), members=2, distill=0.5)
    stage = opened(ensemble, "member 1 finetune")
    plures.save(ensemble, tmp_path / "half.safetensors")
    again = next(plures.load(tmp_path / "half.safetensors", network()).stages())
    assert again.name == stage.name
    assert again(INPUTS, TARGETS).equal(stage(INPUTS, TARGETS))


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan"), "half", True])
def test_what_is_no_share_is_refused(share: object) -> None:
    with pytest.raises(PluresError, match="distill=.*between 0 and 1"):
        OrthogonalDropout(network(), distill=share)  # type: ignore[arg-type]


def test_numbers_cannot_be_distilled() -> None:
    with pytest.raises(PluresError, match="distill=0.5 needs the probabilities of classes.*mse_loss"):
        OrthogonalDropout(network(), distill=0.5, loss=F.mse_loss)
