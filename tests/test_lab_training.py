"""The engine's promises: nothing is lost, the same bits come out, bad input gets a sentence."""

import dataclasses
import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import weakref
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plures
from forked import start
from plures import PluresError
from plures.checkpoints import CHECKSUM, Position, pack, read
from plures.lab.data import Data, DataInfo, DataSplit
from plures.lab.recipes import Epochs, Recipe
from plures.lab.runs import config as config_module
from plures.lab.runs.folder import RunFolder
from plures.lab.training.fit import fit
from plures.lab.training.loop import resolve

CLASSES, SIZE = 3, 8
RECIPE = Recipe(
    members=2,
    epochs=Epochs(pretrain=2, prune=1, finetune=2, train=2),
    batch_size=16,
    learning_rate=0.05,
    nesterov=True,
    schedule="cosine",
    crop=1,
    flip=True,
)


def make_data(train=64, validation=20, seed=0):
    """Images whose class is the row that is bright."""
    info = DataInfo("stripes", [str(c) for c in range(CLASSES)], 3, SIZE, SIZE, False, [0.5] * 3, [0.25] * 3)
    random = np.random.default_rng(seed)

    def split(name, count):
        labels = random.integers(CLASSES, size=count)
        pixels = random.integers(0, 160, size=(count, SIZE, SIZE, 3), dtype=np.uint8)
        pixels[np.arange(count), 1 + 2 * labels] += 80
        return DataSplit(name, info, pixels, np.arange(count), labels)

    return Data(info, split("train", train), split("validation", validation), split("test", 300), f"stripes {seed}")


def make_network(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((4, 1)),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        )


def orthogonal(**options):
    return plures.OrthogonalDropout(make_network(), members=2, **options)


def train(run=None, ensemble=None, recipe=RECIPE, data=None, **options):
    """Call the engine as a new process would: with an ensemble that knows nothing."""
    return fit(ensemble or orthogonal(), data or make_data(), recipe, run, quiet=True, **options)


def accuracy(ensemble, data):
    images = data.info.normalise(torch.from_numpy(data.test.images))
    return (ensemble.predict(images).label.numpy() == data.test.labels).mean()


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Collecting the garbage of a stage takes longer than training it, where thousands of modules are looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def little_asking():
    """Asking git and the packages for their versions also takes longer than training a stage: once is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_module, "environment", cache(config_module.environment))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in another order have other bits; and threads are not forked."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(BaseException):
    """What stands for the end of a process."""


@pytest.fixture
def mortal(monkeypatch):
    """Let the process die at the n-th of the moments at which something has just changed, in memory or on the disk."""
    moments = {"left": None, "passed": 0}

    def after(owner, name):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            moments["passed"] += 1
            if moments["left"] is not None:
                moments["left"] -= 1
                if moments["left"] <= 0:
                    raise Killed
            return result

        monkeypatch.setattr(owner, name, wrapped)

    after(torch.optim.SGD, "step")
    after(plures.Stage, "commit")
    after(RunFolder, "append_record")
    for name in ("replace", "unlink", "mkdir", "chmod"):
        after(Path, name)
    for name in ("fsync", "truncate"):
        after(os, name)
    return moments


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(run)
    return run


@contextmanager
def dying_after(monkeypatch, epochs):
    """Let the process die when so many epochs are saved."""
    saved = []

    def write_and_die(folder, contents, write=RunFolder.write_state):
        write(folder, contents)
        saved.append(folder)
        if len(saved) == epochs:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "write_state", write_and_die)
        yield


def without_times(records):
    return [{key: r[key] for key in r if key not in ("seconds", "images_per_second", "cost")} for r in records]


def assert_same_run(first, second):
    first, second = RunFolder(first), RunFolder(second)
    assert first.ensemble.read_bytes() == second.ensemble.read_bytes()
    assert without_times(first.records()) == without_times(second.records())
    assert sorted(p.name for p in first.path.iterdir()) == sorted(p.name for p in second.path.iterdir())


# --- what a run leaves behind


def test_a_run_leaves_ensemble_config_and_log(uninterrupted):
    folder = RunFolder(uninterrupted)
    assert folder.finished
    assert not folder.partial.exists()
    assert not folder.state.exists()
    config = folder.config()
    assert config["method"] == "OrthogonalDropout"
    assert Recipe.from_json(config["recipe"]) == RECIPE
    assert config["data"]["fingerprint"] == "stripes 0"
    assert config["environment"]["torch"] == torch.__version__
    assert str(uninterrupted) not in json.dumps(config)
    records = folder.records()
    stages = ["member 0 pretrain", "member 0 prune", "member 0 finetune", "member 1 pretrain", "member 1 finetune"]
    assert list(dict.fromkeys(r["stage"] for r in records)) == stages
    assert [r["epoch"] for r in records if r["stage"] == stages[0]] == [1, 2]
    for record in records:
        assert record["loss"] > 0
        assert 0 <= record["validation_accuracy"] <= 1
        assert record["images_per_second"] > 0
    assert records[1]["learning_rate"] < records[0]["learning_rate"]


def test_the_stored_ensemble_is_the_trained_one(uninterrupted):
    stored = plures.load(RunFolder(uninterrupted).ensemble, make_network())
    ensemble = train()
    images = torch.randn(5, 3, SIZE, SIZE)
    assert torch.equal(stored(images), ensemble(images))


@pytest.mark.parametrize("method", ["Deterministic", "MCDropout", "MIMO", "BatchEnsemble", "Masksembles"])
def test_all_methods_train_and_learn(method):
    data = make_data(train=160)
    recipe = dataclasses.replace(RECIPE, epochs=Epochs(train=6))
    ensemble = train(ensemble=getattr(plures, method)(make_network()), recipe=recipe, data=data)
    assert accuracy(ensemble, data) > 0.6


def test_training_leaves_the_callers_random_numbers_alone():
    before = torch.get_rng_state()
    train()
    assert torch.equal(before, torch.get_rng_state())


def test_few_steps_are_told_once(caplog):
    recipe = dataclasses.replace(RECIPE, epochs=Epochs(train=2))
    train(ensemble=plures.DeepEnsemble(make_network(), members=2), recipe=recipe, data=make_data(train=30))
    told = [record.getMessage() for record in caplog.records if "has only" in record.getMessage()]
    assert told == [
        "stage 'member 0 train' has only 2 steps (epochs: 2, batches: 1): if it learns too little, use smaller "
        "batches, or 200 epochs"
    ]
    caplog.clear()
    enough = dataclasses.replace(recipe, least_steps=8)
    train(ensemble=plures.Deterministic(make_network()), recipe=enough, data=make_data(train=30))
    assert "has only" not in caplog.text


# --- resuming


def test_a_finished_run_returns_at_once_and_says_so(uninterrupted, capsys, monkeypatch):
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: pytest.fail("a finished run trains"))
    before = RunFolder(uninterrupted).ensemble.read_bytes()
    ensemble = orthogonal()
    fit(ensemble, make_data(), RECIPE, uninterrupted)
    assert "finished" in capsys.readouterr().err
    assert ensemble.trained == [0, 1]
    assert RunFolder(uninterrupted).ensemble.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_the_same_bytes_come_out(tmp_path, uninterrupted, mortal, seed):
    moments = random.Random(seed)
    kills = 0
    while True:
        mortal["left"] = moments.randint(1, 25)
        try:
            train(tmp_path / "run")
            break
        except Killed:
            kills += 1
    mortal["left"] = None
    assert kills >= 3
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_no_moment_is_a_bad_one_to_be_killed(tmp_path, mortal):
    recipe = dataclasses.replace(RECIPE, epochs=Epochs(train=1))

    def go(name):
        return train(tmp_path / name, plures.DeepEnsemble(make_network(), members=2), recipe, make_data(train=16))

    go("whole")
    for moment in range(1, mortal["passed"] + 1):
        mortal["left"] = moment
        with pytest.raises(Killed):
            go(str(moment))
        mortal["left"] = None
        go(str(moment))
        assert_same_run(tmp_path / str(moment), tmp_path / "whole")


@pytest.mark.parametrize("change", [
    {"optimizer": "adamw", "learning_rate": 0.01, "clip": 0.5},
    {"momentum": 0.0, "nesterov": False},
    {"precision": "bf16"},
])  # fmt: skip
def test_every_optimizer_goes_on_with_the_same_bits(tmp_path, monkeypatch, change):
    recipe = dataclasses.replace(RECIPE, epochs=Epochs(train=3), **change)

    def go(name):
        return train(tmp_path / name, plures.MCDropout(make_network()), recipe)

    go("whole")
    with dying_after(monkeypatch, epochs=2):
        go("cut")
    go("cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def train_and_tell(run, pipe):
    """Say after each epoch that it is saved, and wait for the end before the last one."""
    saved = []

    def write_and_tell(folder, contents, write=RunFolder.write_state):
        write(folder, contents)
        saved.append(folder)
        pipe.send("epoch")
        while len(saved) == 8:
            signal.pause()

    RunFolder.write_state = write_and_tell
    train(run)


def test_a_killed_process_is_continued_by_another(tmp_path, uninterrupted):
    run = tmp_path / "run"
    here, there = multiprocessing.Pipe(duplex=False)
    process = start(train_and_tell, run, there)
    there.close()  # so that the end of the process would be heard
    for _ in range(4):
        assert here.recv() == "epoch"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not RunFolder(run).finished
    train(run)
    assert_same_run(run, uninterrupted)


def test_a_network_that_is_drawn_anew_does_not_change_the_rest_of_a_run(tmp_path, uninterrupted, monkeypatch):
    with dying_after(monkeypatch, epochs=4):
        train(tmp_path / "run")
    other = plures.OrthogonalDropout(make_network(seed=1), members=2)
    fit(other, make_data(), RECIPE, tmp_path / "run", quiet=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_loss_of_ones_own_survives_a_resumed_run(tmp_path, monkeypatch):
    def loss(logits, targets):
        return 2 * F.cross_entropy(logits, targets)

    with dying_after(monkeypatch, epochs=2):
        train(tmp_path / "run", orthogonal(loss=loss))
    ensemble = train(tmp_path / "run", orthogonal(loss=loss))
    train(tmp_path / "whole", orthogonal(loss=loss))
    assert ensemble.loss is loss
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_damaged_state_is_refused_with_advice(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with dying_after(monkeypatch, epochs=1):
        train(run)
    state = RunFolder(run).state
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(PluresError, match="damaged.*delete it"):
        train(run)


def test_a_flipped_bit_of_the_state_is_never_taken_over():
    stage = orthogonal().open(orthogonal().plan()[0])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    stage(torch.randn(4, 3, SIZE, SIZE), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    position = Position(committed=0, epoch=1, loss_scale={})
    contents = pack(stage, optimizer, position)
    values = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    places = random.Random(0)
    header = CHECKSUM + 8 + int.from_bytes(contents[CHECKSUM:][:8], "little")
    for end in [*[header] * 150, *[len(contents)] * 50]:
        byte = places.randrange(end)
        damaged = bytearray(contents)
        damaged[byte] ^= 1 << places.randrange(8)
        try:
            found = read(bytes(damaged))
            found.restore(stage, optimizer)
        except PluresError:
            continue
        assert found.position == position
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, values[name]), f"byte {byte}"


@pytest.mark.parametrize("change", [{"epoch": 10**9}, {"epoch": "1"}, {"committed": -1}, {"loss_scale": 3}])
def test_a_position_that_cannot_be_is_refused(tmp_path, monkeypatch, change):
    with dying_after(monkeypatch, epochs=1):
        train(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    stage = orthogonal().open(orthogonal().plan()[0])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    position = read(folder.state.read_bytes()).position._replace(**change)
    folder.state.write_bytes(pack(stage, optimizer, position))
    with pytest.raises(PluresError, match=r"damaged.*delete it"):
        train(tmp_path / "run")


def test_without_its_state_a_stage_starts_again_and_the_log_of_the_others_stays(tmp_path, uninterrupted, monkeypatch):
    with dying_after(monkeypatch, epochs=4):
        train(tmp_path / "run")
    RunFolder(tmp_path / "run").state.unlink()
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_goes_on_with_the_threads_that_it_was_begun_with(tmp_path, monkeypatch, caplog):
    seen = []

    def loss(logits, targets):
        seen.append(torch.get_num_threads())
        return F.cross_entropy(logits, targets)

    def go():  # a short run: two threads on two busy cores spend their time waiting for each other
        few = dataclasses.replace(RECIPE, epochs=Epochs(train=2))
        train(tmp_path / "run", plures.Deterministic(make_network(), loss=loss), few, make_data(train=16))

    try:
        torch.set_num_threads(2)
        with dying_after(monkeypatch, epochs=1):
            go()
        torch.set_num_threads(1)
        with caplog.at_level(logging.WARNING, "plures"):
            go()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    assert len(seen) >= 2
    assert set(seen) == {2}
    assert "started with 2 threads" in caplog.text
    assert RunFolder(tmp_path / "run").config()["environment"]["threads"] == 2


# --- bad input


def test_a_second_process_is_refused(tmp_path):
    with RunFolder(tmp_path / "run").locked(), pytest.raises(PluresError, match="another process"):
        train(tmp_path / "run")


def test_another_configuration_is_refused_and_says_what_differs(uninterrupted):
    with pytest.raises(PluresError, match=r"recipe\.learning_rate was 0\.05 and is 0\.2"):
        train(uninterrupted, recipe=dataclasses.replace(RECIPE, learning_rate=0.2))
    with pytest.raises(PluresError, match=r"data\.fingerprint was stripes 0 and is stripes 1"):
        train(uninterrupted, data=make_data(seed=1))
    with pytest.raises(PluresError, match="method was OrthogonalDropout and is DeepEnsemble"):
        train(uninterrupted, plures.DeepEnsemble(make_network(), members=2))
    with pytest.raises(PluresError, match=r"options\.granularity was kernel and is weight"):
        train(uninterrupted, orthogonal(granularity="weight"))


def test_a_run_without_a_finished_epoch_gives_way(tmp_path, uninterrupted):
    with pytest.raises(PluresError, match="became NaN or infinite"):
        train(tmp_path / "run", recipe=dataclasses.replace(RECIPE, learning_rate=1e30))
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted)


def test_another_version_is_told_not_refused(tmp_path, monkeypatch, caplog):
    with dying_after(monkeypatch, epochs=2):
        train(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "plures"):
        train(tmp_path / "run")
    assert "torch was 1.0" in caplog.text


def test_a_folder_with_an_ensemble_of_unknown_origin_is_left_alone(tmp_path):
    plures.save(orthogonal(), tmp_path / "ensemble.safetensors")
    with pytest.raises(PluresError, match=r"no config\.json"):
        train(tmp_path)


def test_a_run_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PluresError, match="cannot write in the run folder"):
        train(tmp_path / "file" / "run")


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch:
        calls = []

        def full(descriptor, fsync=os.fsync):
            calls.append(descriptor)
            if len(calls) > 5:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        patch.setattr(os, "fsync", full)
        with pytest.raises(PluresError, match="No space left on device"):
            train(tmp_path / "run")
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_loss_that_is_no_number_stops_with_stage_epoch_and_rate(tmp_path):
    steps = []

    def loss(logits, targets):
        steps.append(1)
        return F.cross_entropy(logits, targets) * (torch.nan if len(steps) == 6 else 1.0)

    with pytest.raises(PluresError, match=r"'member 0 pretrain', epoch 2, at the learning rate 0\.00\d+"):
        train(tmp_path / "run", orthogonal(loss=loss))
    # Four steps an epoch: the first epoch is kept, and the second is trained again from there.
    assert [record["epoch"] for record in RunFolder(tmp_path / "run").records()] == [1]
    train(tmp_path / "run", orthogonal(loss=loss))
    assert RunFolder(tmp_path / "run").finished


def test_weights_that_are_no_number_are_never_saved(tmp_path):
    steps = []

    class Explosion(torch.autograd.Function):
        """Finite forward, infinite backward, at the last step of the epoch."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            steps.append(1)
            return gradient * (torch.inf if len(steps) == 4 else 1.0)

    def loss(logits, targets):
        return F.cross_entropy(Explosion.apply(logits), targets)

    with pytest.raises(PluresError, match="epoch 1"):
        train(tmp_path / "run", orthogonal(loss=loss))
    assert not RunFolder(tmp_path / "run").state.exists()


def test_half_precision_of_the_other_kind_needs_a_gpu():
    with pytest.raises(PluresError, match="fp16"):
        resolve("fp16", torch.device("cpu"))


# --- what the recipe says is done


def train_one_step(monkeypatch, recipe, ensemble=None):
    """Train for one step and return the groups of the optimizer that did it, and the gradients."""
    seen = {}

    def step(optimizer, closure=None, original=torch.optim.SGD.step):
        seen.setdefault("groups", [dict(group) for group in optimizer.param_groups])
        seen.setdefault("gradients", [p.grad.norm() for g in optimizer.param_groups for p in g["params"]])
        return original(optimizer, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    recipe = dataclasses.replace(recipe, epochs=Epochs(train=1), batch_size=64)
    train(ensemble=ensemble or plures.Deterministic(make_network()), recipe=recipe)
    return seen


def test_weight_decay_goes_where_the_method_wants_it(monkeypatch):
    seen = train_one_step(
        monkeypatch, dataclasses.replace(RECIPE, weight_decay=0.03), plures.BatchEnsemble(make_network())
    )
    assert [group["weight_decay"] for group in seen["groups"]] == [0.03, 0.0]
    assert all(group["nesterov"] and group["lr"] == RECIPE.learning_rate for group in seen["groups"])


def test_gradients_are_clipped(monkeypatch):
    seen = train_one_step(monkeypatch, dataclasses.replace(RECIPE, clip=1e-3))
    assert torch.stack(seen["gradients"]).norm() == pytest.approx(1e-3, rel=1e-2)


def test_a_loss_that_is_a_module_is_given_back():
    loss = nn.CrossEntropyLoss()
    assert train(ensemble=orthogonal(loss=loss)).loss is loss


def test_data_without_validation_images_are_trained_on(tmp_path):
    train(tmp_path / "run", data=make_data(validation=0))
    assert {record["validation_accuracy"] for record in RunFolder(tmp_path / "run").records()} == {None}


# --- what a person sees


def test_plain_lines_tell_stages_and_the_skipped_prune(capsys):
    fit(orthogonal(), make_data(), RECIPE)
    err = capsys.readouterr().err
    assert "[1/5] member 0 pretrain  epoch 2/2  loss" in err
    assert "[5/5] member 1 finetune  epoch 2/2" in err
    assert "member 1 takes all remaining weights: its prune stage is skipped" in err


def test_quiet_means_quiet(capsys):
    train()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_shows_a_table_of_members_and_phases(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    fit(orthogonal(), make_data(), RECIPE)
    err = capsys.readouterr().err
    for word in ("pretrain", "prune", "finetune", "member 0", "member 1", "images/s", "left"):
        assert word in err


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_stage_that_was_trained_is_not_kept(monkeypatch, precision):
    kept = []

    def commit(stage, original=plures.Stage.commit):
        original(stage)
        assert sum(one() is not None for one in kept) <= 1, "the one before may wait for the garbage collector"
        kept.append(weakref.ref(stage))

    monkeypatch.setattr(plures.Stage, "commit", commit)
    train(recipe=dataclasses.replace(RECIPE, precision=precision))
    gc.collect()
    assert [one() for one in kept] == [None] * 5


@pytest.mark.parametrize(("tiles", "chosen"), [(True, "bf16"), (False, "no")])
def test_auto_takes_bf16_on_processors_with_tiles_only(monkeypatch, tiles, chosen):
    """With the bf16 instructions of AVX-512 alone, training was slower than in float32."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert resolve("auto", torch.device("cpu")) == chosen
    assert resolve("bf16", torch.device("cpu")) == "bf16", "as asked for"
