"""Threads that predict with batches of several sizes while another one saves and checks out."""

import logging
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

import plures
from attack.driver import Verdict
from attack.subjects import ALL_STAGES, SUBJECTS, Subject, outputs
from plures.methods.orthogonal_dropout.method import Kind

THREADS = 8
TRAINED = [subject for subject in SUBJECTS if subject.stages == ALL_STAGES]
SPLIT = [subject for subject in TRAINED if subject.method == "OrthogonalDropout"]
# Every trained subject, and every engine of those that are split.
ASKED: list[tuple[Subject, Kind | None]] = [
    *((subject, None) for subject in TRAINED),
    *((subject, kind) for subject in SPLIT for kind in get_args(Kind)),
]


@dataclass
class Threads:
    """Eight threads that predict, for every method and engine; a ninth saves and checks out meanwhile."""

    predictions: int = 500  # of each thread
    name: str = "threads"
    items: int = len(ASKED)
    batch: int = 1
    memory: int = 1 << 36  # nine threads have arenas of their own
    seconds: int = 3600

    def prepare(self) -> None:
        """Compute as one thread does: sums in another order have other bits."""
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)

    def judge(self, index: int) -> list[Verdict]:
        """Attack one method or engine."""
        subject, kind = ASKED[index]
        ensemble = subject.make()
        assert isinstance(ensemble, plures.OrthogonalDropout) or kind is None
        try:
            predictor = ensemble if kind is None else ensemble.engine(kind)  # type: ignore[attr-defined]
        except plures.PluresError as error:  # the owned engine needs a compiler
            return [Verdict("refused", str(error))]
        with tempfile.TemporaryDirectory() as folder:
            wrong = hammer(ensemble, predictor, self.predictions, Path(folder) / "threads.safetensors")
        right = THREADS * self.predictions - sum(wrong.values())
        return [
            Verdict("same", "", max(0, right)),
            *(Verdict(word, f"{what} ({subject}, engine {kind})", times) for (word, what), times in wrong.items()),
        ]


def hammer(ensemble: plures.Ensemble, predictor: Any, predictions: int, path: Path) -> Counter[tuple[str, str]]:
    """Predict in eight threads while a ninth reads; count where an answer or a file is not that of a single thread."""
    batches = [torch.randn(1 + size, 1, 4, 4, generator=torch.Generator().manual_seed(size)) for size in range(THREADS)]
    expected = [outputs(predictor, batch) for batch in batches]
    plures.save(ensemble, path)
    file = path.read_bytes()
    members = _members(ensemble)
    done = threading.Event()
    wrong: Counter[tuple[str, str]] = Counter()

    def read() -> None:
        while not done.is_set():
            try:
                plures.save(ensemble, path)
                if path.read_bytes() != file:
                    wrong["silent", "a file has other bytes"] += 1
                if _members(ensemble) != members:
                    wrong["silent", "a member was checked out with other weights"] += 1
            except Exception as error:
                wrong["raw", f"reading: {type(error).__name__}: {error}"] += 1

    def predict(thread: int) -> None:
        for turn in range(predictions):
            chosen = (thread + turn) % THREADS
            try:
                if not outputs(predictor, batches[chosen]).equal(expected[chosen]):
                    wrong["silent", f"an answer for a batch of {chosen + 1} has other bits"] += 1
            except Exception as error:
                wrong["raw", f"predicting: {type(error).__name__}: {error}"] += 1

    ninth = threading.Thread(target=read)
    ninth.start()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(predict, range(THREADS)))
    finally:
        done.set()
        ninth.join()
    return wrong


def _members(ensemble: Any) -> list[bytes]:
    """Check out the members, if a method has any to check out."""
    try:
        networks = [ensemble.checkout(member) for member in range(getattr(ensemble, "members", 1))]
    except plures.PluresError:  # members that live in one network
        return []
    return [tensor.numpy().tobytes() for network in networks for tensor in network.state_dict().values()]
