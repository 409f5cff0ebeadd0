"""Every method trains and predicts without reading a number: on torch's meta device, and with fake tensors.

Such tensors have shapes and no numbers. Whatever reads a number raises there (`.item()`, `if tensor:`, a copy to the
host). On a GPU it would make the host wait in every step.
"""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plures
from networks import CLASSES, images, labels, mlp, resnet
from plures.methods.orthogonal_dropout.training_engine import TrainingEngine
from test_contract import build, count, every_method, identify, train_all

META = torch.device("meta")
READING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim", "_unique2"}


class NothingIsRead(TorchDispatchMode):
    """Refuse operations after which the host waits for a device: those that need a number, and copies from and to it.

    As on a GPU, a number of the host may go along.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        name = operator._schema.name.partition("::")[2]
        used = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
        assert name not in READING, f"{name} reads a number"
        assert len({one.device for one in used if one.dim() or "copy" in name}) < 2, f"{name} copies between devices"
        if name.startswith("index"):  # a mask as an index has as many results as it is true, which the host must know
            assert not any(one.dtype in (torch.bool, torch.uint8) for one in tree_leaves(args[1:]) if one is not None)
        return result


def on_meta(tensors):
    return all(tensor.device == META for tensor in tensors)


def moved(module):
    return copy.deepcopy(module).to(META)


def take_steps(stage):
    optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=1e-4), lr=0.1, momentum=0.9)
    inputs, targets = images(6).to(META), labels(6).to(META)
    with NothingIsRead():
        for _ in range(2):
            optimizer.zero_grad()
            loss = stage(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
            optimizer.step()
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    assert gradients
    assert on_meta([loss, *gradients])


def test_what_reads_a_number_raises():
    with pytest.raises(RuntimeError):
        torch.zeros((), device=META).item()
    with pytest.raises(NotImplementedError):
        torch.zeros((), device=META).cpu()
    given = torch.ones(3)
    for read in (torch.Tensor.item, torch.Tensor.nonzero, lambda x: x[x > 0], lambda x: x.to(META), bool):
        with pytest.raises(AssertionError), NothingIsRead():
            read(given[0] if read in (torch.Tensor.item, bool) else given)


@pytest.mark.parametrize("make_network", [mlp, resnet], ids=identify)
@every_method
def test_a_step_of_any_stage_reads_no_number(method, make_network):
    for original in build(method, make_network()).stages():
        stage = moved(original)  # the original is committed as it is, so that the next stage opens
        assert on_meta([*stage.parameters(), *stage.buffers()])
        take_steps(stage)


@pytest.mark.parametrize("make_network", [mlp, resnet], ids=identify)
def test_members_side_by_side_on_a_gpu_read_no_number(make_network):
    ensemble = plures.OrthogonalDropout(make_network(), 3, schedule="together")
    stage = moved(next(iter(ensemble.stages())))
    engine = TrainingEngine()
    assert engine.takes(stage.network, 6)
    assert engine._prepared.plan.split, "its layers run as one product"
    engine._prepared.compared = True  # the comparison with torch reads numbers, once in a stage
    inputs = images(6).to(META)
    with NothingIsRead():
        for _ in range(2):
            assert engine.takes(stage.network, 6)
            assert engine._prepared.is_up_to_date()
            logits = engine._prepared.run(inputs)
            logits.sum().backward()
    assert logits.shape == (3, 6, CLASSES)
    assert on_meta([logits, *(parameter.grad for parameter in stage.parameters() if parameter.requires_grad)])


@every_method
def test_an_ensemble_moves_and_predicts_without_reading_a_number(method):
    ensemble = moved(train_all(build(method, mlp())))
    inputs = images(5).to(META)
    with torch.no_grad(), NothingIsRead():
        logits = ensemble(inputs)
    assert on_meta([logits, *ensemble.parameters(), *ensemble.buffers()])
    assert logits.shape == (count(method), 5, CLASSES)


# --- fake tensors: they know the device, and autocast treats them as the real ones


def faked(module, mode):
    with FakeCopyMode(mode):
        return copy.deepcopy(module)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Choose what is chosen on a GPU and in compiled code, though the fake tensors say that they are on the CPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def test_fake_tensors_raise_if_read():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(()).item()


@pytest.mark.usefixtures("as_on_a_gpu")
@every_method
def test_mixed_precision_reads_no_number(method):
    for original in build(method, resnet()).stages():
        mode = FakeTensorMode()
        stage = faked(original, mode)
        with mode:
            optimizer = torch.optim.SGD(stage.parameter_groups(weight_decay=1e-4), lr=0.1, momentum=0.9)
            inputs, targets = torch.empty(6, 3, 16, 16), torch.zeros(6, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16):
                loss = stage(inputs, targets)
                assert stage.logits(inputs).dtype == torch.bfloat16
            loss.backward()
            optimizer.step()
        assert loss.dtype == torch.float32
        assert {one.grad.dtype for one in stage.parameters() if one.grad is not None} == {torch.float32}


@every_method
def test_fake_tensors_tell_the_shape_of_a_prediction(method):
    ensemble = train_all(build(method, mlp()))
    mode = FakeTensorMode()
    fake = faked(ensemble, mode)
    with mode, torch.no_grad():
        logits = fake(torch.empty(5, 3, 16, 16))
    assert logits.shape == (count(method), 5, CLASSES)


def numbers_read(batches):
    """Count the numbers that `fit` reads in one epoch."""
    read = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator._schema.name.partition("::")[2] in READING:
                read.append(operator)
            return operator(*args, **kwargs or {})

    loader = [(images(6, seed=number), labels(6, seed=number)) for number in range(batches)]
    with Counting():
        # Adam counts its steps on the host, and reads them from there.
        plures.DeepEnsemble(mlp(), 1).fit(
            loader, epochs=1, optimizer=lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1), progress=False
        )
    return len(read)


def test_fit_reads_as_many_numbers_in_a_long_epoch_as_in_a_short_one():
    assert numbers_read(40) == numbers_read(20) > 0  # with fewer steps, the stage warns and does not look at its loss
