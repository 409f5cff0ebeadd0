"""Every method trains and predicts on torch's meta device, which has shapes and no numbers.

Whatever reads a number there raises (`.item()`, `if tensor:`, a copy to the host). On a GPU it would make the host
wait in every step.
"""

import copy

import pytest
import torch

from networks import CLASSES, images, labels, mlp, resnet
from test_contract import build, count, every_method, identify, train_all

META = torch.device("meta")


def on_meta(tensors):
    return all(tensor.device == META for tensor in tensors)


def test_reading_a_number_raises():
    with pytest.raises(RuntimeError):
        torch.zeros((), device=META).item()
    with pytest.raises(NotImplementedError):
        torch.zeros((), device=META).cpu()


@pytest.mark.parametrize("make_network", [mlp, resnet], ids=identify)
@every_method
def test_a_step_of_any_stage_reads_no_number(method, make_network):
    for original in build(method, make_network()).stages():
        stage = copy.deepcopy(original).to(META)  # the original is committed as it is, so that the next stage opens
        assert on_meta([*stage.parameters(), *stage.buffers()])
        optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=1e-4), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = stage(images(6).to(META), labels(6).to(META))
            loss.backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
        assert gradients
        assert on_meta([loss, *gradients])


@every_method
def test_an_ensemble_moves_and_predicts_without_reading_a_number(method):
    ensemble = train_all(build(method, mlp())).to(META)
    with torch.no_grad():
        logits = ensemble(images(5).to(META))
    assert on_meta([logits, *ensemble.parameters(), *ensemble.buffers()])
    assert logits.shape == (count(method), 5, CLASSES)
