"""Threads that predict with batches of several sizes while another one saves and checks out."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import torch

import plures
from attack.subjects import ALL_STAGES, SUBJECTS, Subject
from plures.methods.orthogonal_dropout.method import Kind

THREADS = 8


def attack_with_threads(predictions: int, folder: Path) -> list[tuple[str, float, list[str]]]:
    """Give for every method and engine its name, the seconds that it took, and what went wrong."""
    results = []
    for name, ensemble, predictor in _predictors():
        started = time.monotonic()
        wrong = hammer(ensemble, predictor, predictions, folder / "threads.safetensors")
        results.append((name, time.monotonic() - started, wrong))
    return results


def hammer(ensemble: plures.Ensemble, predictor: Any, predictions: int, path: Path) -> list[str]:
    """Predict in eight threads while a ninth reads; say where an answer or a file is not that of a single thread."""
    batches = [torch.randn(1 + size, 1, 4, 4, generator=torch.Generator().manual_seed(size)) for size in range(THREADS)]
    expected = [predictor.predict(batch).members for batch in batches]
    plures.save(ensemble, path)
    file = path.read_bytes()
    members = _members(ensemble)
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            try:
                plures.save(ensemble, path)
                if path.read_bytes() != file:
                    wrong.append("a file has other bytes")
                if _members(ensemble) != members:
                    wrong.append("a member was checked out with other weights")
            except Exception as error:
                wrong.append(f"reading: {type(error).__name__}: {error}")

    def predict(thread: int) -> None:
        for turn in range(predictions):
            chosen = (thread + turn) % THREADS
            try:
                if not predictor.predict(batches[chosen]).members.equal(expected[chosen]):
                    wrong.append(f"an answer for a batch of {chosen + 1} has other bits")
            except Exception as error:
                wrong.append(f"predicting: {type(error).__name__}: {error}")

    ninth = threading.Thread(target=read)
    ninth.start()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(predict, range(THREADS)))
    finally:
        done.set()
        ninth.join()
    return wrong


def _predictors() -> list[tuple[str, plures.Ensemble, Any]]:
    """List every trained method, and every engine of orthogonal dropout."""
    found: list[tuple[str, plures.Ensemble, Any]] = []
    for subject in SUBJECTS:
        if subject.stages == ALL_STAGES:
            ensemble = subject.make()
            found.append((subject.method, ensemble, ensemble))
    split = Subject("OrthogonalDropout", {"members": 3}).make()
    for kind in get_args(Kind):
        try:
            found.append((f"{kind} engine", split, split.engine(kind)))
        except plures.PluresError:  # the owned one needs a compiler
            continue
    return found


def _members(ensemble: Any) -> list[bytes]:
    """Check out the members, where a method has any to check out."""
    if not hasattr(ensemble, "checkout"):
        return []
    networks = [ensemble.checkout(member) for member in range(getattr(ensemble, "members", 1))]
    return [tensor.numpy().tobytes() for network in networks for tensor in network.state_dict().values()]
