"""Any number of threads predict at the same time, and read the ensemble meanwhile: every answer keeps its bits."""

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import plures
from plures.methods.orthogonal_dropout.method import Kind

METHODS = {
    "OrthogonalDropout": {"members": 3},
    "MCDropout": {"passes": 3},
    "DeepEnsemble": {"members": 3},
    "BatchEnsemble": {"members": 3},
    "MIMO": {"members": 2},
    "Masksembles": {"members": 3},
    "PackedEnsemble": {"members": 2},
}
THREADS = 8
ROUNDS = 12


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.ReLU(),
        nn.Linear(32, 3),
    )


def trained(method: str) -> plures.Ensemble:
    ensemble = getattr(plures, method)(network(), **METHODS[method])
    for stage in ensemble.stages():
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.add_(0.01)
    return ensemble


def batches() -> list[torch.Tensor]:
    """One batch for each thread, each of another size."""
    return [torch.randn(2 + index, 1, 6, 6, generator=torch.Generator().manual_seed(index)) for index in range(THREADS)]


def hammer(predictor, read) -> None:
    """Predict in eight threads while a ninth reads, and compare with what one thread alone gets."""
    expected = [predictor.predict(batch).members for batch in batches()]
    before = read()
    done = threading.Event()
    seen = []

    def reader() -> None:
        while not done.is_set():
            seen.append(read())

    def predict(index: int) -> list[float]:
        batch = batches()[index]
        return [float((predictor.predict(batch).members - expected[index]).abs().max()) for _ in range(ROUNDS)]

    ninth = threading.Thread(target=reader)
    ninth.start()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(predict, range(THREADS)))
    finally:
        done.set()
        ninth.join()
    wrong = {(index, turn): by for index, each in enumerate(answers) for turn, by in enumerate(each) if by != 0}
    assert not wrong, f"{torch.get_num_threads()} threads of torch; by (batch, turn): {wrong}"
    assert seen
    assert all(one.keys() == before.keys() and all(one[name].equal(before[name]) for name in one) for one in seen)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_the_same_in_eight_threads_while_a_ninth_reads(method) -> None:
    ensemble = trained(method)
    hammer(ensemble, lambda: {name: tensor.clone() for name, tensor in ensemble.tensors().items()})


def saved(ensemble: plures.Ensemble, path: Path) -> dict[str, torch.Tensor]:
    plures.save(ensemble, path)
    return load_file(path)


@pytest.mark.parametrize("way", ["save", "state_dict", "deepcopy", "engine"])
def test_an_ensemble_is_read_in_any_way_while_others_predict(way, tmp_path) -> None:
    ensemble = trained("OrthogonalDropout")
    ways = {
        "save": lambda: saved(ensemble, tmp_path / "it.safetensors"),
        "state_dict": lambda: copy.deepcopy(ensemble.state_dict()),
        "deepcopy": lambda: copy.deepcopy(ensemble).state_dict(),
        "engine": lambda: {"members": ensemble.engine("unfolded").predict(batches()[0]).members},
    }
    hammer(ensemble, ways[way])


def engine(ensemble: plures.OrthogonalDropout, kind: Kind) -> Any:
    """Make an engine; the owned one needs a compiler, or a wheel."""
    try:
        return ensemble.engine(kind)
    except plures.PluresError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_engine_answers_the_same_in_eight_threads(kind) -> None:
    ensemble = trained("OrthogonalDropout")
    hammer(engine(ensemble, kind), lambda: ensemble.checkout(1).state_dict())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_engine_that_was_found_wrong_in_another_thread_meanwhile_answers_as_the_members_do(
    kind, monkeypatch
) -> None:
    ensemble = trained("OrthogonalDropout")
    made, batch = engine(ensemble, kind), batches()[0]
    assert made._comparison is not None
    split = made._comparison.split
    for few in batches()[:2]:
        made.predict(few)
    place, name = (made._lender, "lend") if kind == "unfolded" else (made, "of_members")
    usual, turns = getattr(place, name), []

    def late(*given):  # another thread is faster
        if not turns:
            turns.append(made._run_members_apart(split))
        return usual(*given)

    monkeypatch.setattr(place, name, late)
    made._lender.clear()
    first = made.predict(batch).members
    members = torch.stack([ensemble.checkout(one)(batch) for one in ensemble.trained]).detach().softmax(-1)
    torch.testing.assert_close(first, members, rtol=1e-4, atol=1e-5)
    assert made.predict(batch).members.equal(members)
    assert turns


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_new_thread_computes_with_the_threads_of_torch_that_were_set(kind) -> None:
    """By itself, torch computes the first matrix product of a new thread with as many as OMP_NUM_THREADS says."""
    ensemble = trained("OrthogonalDropout")
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    hammer(engine(ensemble, kind), lambda: ensemble.checkout(1).state_dict())


def test_predicting_leaves_the_modules_of_an_ensemble_alone() -> None:
    ensemble = trained("OrthogonalDropout")
    before = [(type(tensor), id(tensor)) for tensor in (*ensemble.parameters(), *ensemble.buffers())]
    ensemble.predict(batches()[0])
    assert [(type(tensor), id(tensor)) for tensor in (*ensemble.parameters(), *ensemble.buffers())] == before


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_engine_can_be_copied_and_sent_to_another_process(kind) -> None:
    made = engine(trained("OrthogonalDropout"), kind)
    expected = made.predict(batches()[0]).members
    assert copy.deepcopy(made).predict(batches()[0]).members.equal(expected)
    assert pickle.loads(pickle.dumps(made)).predict(batches()[0]).members.equal(expected)


def test_mc_dropout_leaves_the_generator_of_torch_alone() -> None:
    ensemble = trained("MCDropout")
    torch.manual_seed(7)
    ensemble.predict(batches()[0])
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert drawn.equal(torch.rand(3))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_process_forked_while_another_thread_predicts_predicts_too() -> None:
    ensemble = trained("OrthogonalDropout")
    batch = batches()[0]
    expected = ensemble.predict(batch).members
    inside, go_on = threading.Event(), threading.Event()

    def pause(module, inputs) -> None:
        inside.set()
        go_on.wait()

    handle = ensemble.network[0].register_forward_pre_hook(pause)
    thread = threading.Thread(target=ensemble.predict, args=(torch.zeros_like(batch),))
    ensemble._lender.clear()  # so that the structure of the thread has the hook
    thread.start()
    inside.wait()
    handle.remove()
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:  # the child has this thread alone: whatever the other one held is held for ever
        os._exit(0 if ensemble.predict(batch).members.equal(expected) else 1)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
