"""Damaged and malicious files, judged by a worker process that is ended when it hangs or takes too much memory."""

import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Literal

import torch

import plures
from attack.damage import damaged
from attack.forgery import forged
from attack.subjects import SUBJECTS, check_sentence, network, same, save_all, use
from plures.storage import refill

Kind = Literal["damaged", "malicious"]
ADDRESS_SPACE = 4 << 30
SECONDS = 20
GOOD = ("refused", "equal", "loaded")


@dataclass
class Tally:
    """What became of the files."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)  # what is wrong, and with which file
    seconds: float = 0.0
    slowest: float = 0.0

    def __str__(self) -> str:
        counts = {name: self.counts[name] for name in (*GOOD, "raw", "silent", "hang", "died")}
        words = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"{self.counts.total()} files: {words}; {self.seconds:.0f} s, the slowest took {self.slowest:.2f} s"


def attack_with_files(kind: Kind, count: int, seed: int = 0, first: int = 0) -> Tally:
    """Let a worker load `count` files; start it anew when it hangs or dies."""
    tally = Tally()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_all(Path(folder))
        index = first
        while index < first + count:
            index = _until_trouble(kind, seed, range(index, first + count), Path(folder), tally)
    tally.seconds = time.monotonic() - started
    return tally


def _until_trouble(kind: Kind, seed: int, indices: range, folder: Path, tally: Tally) -> int:
    """Have files judged by one worker for as long as it lives; return the index of the next file."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_work, args=(there, kind, seed, indices, folder), daemon=True)
    worker.start()
    there.close()
    index = indices.start
    here.recv()  # its imports take a while, and are not part of the attack
    try:
        for index in indices:
            verdict = here.recv() if here.poll(SECONDS) else ("hang", f"no answer within {SECONDS} s", SECONDS)
            _count(tally, kind, seed, index, *verdict)
            if verdict[0] == "hang":
                break
    except EOFError:
        worker.join()
        _count(tally, kind, seed, index, "died", f"the worker ended with {worker.exitcode}", 0.0)
    finally:
        worker.kill()
        worker.join()
        here.close()
    return index + 1


def _count(tally: Tally, kind: Kind, seed: int, index: int, verdict: str, note: str, seconds: float) -> None:
    tally.counts[verdict] += 1
    tally.slowest = max(tally.slowest, seconds)
    if verdict not in GOOD:
        tally.bad.append(f"{verdict}: {kind} file {index} of seed {seed}, {SUBJECTS[index % len(SUBJECTS)]}: {note}")


def _work(connection: Connection, kind: Kind, seed: int, indices: range, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for subject in range(len(SUBJECTS)):  # what is imported and compiled on first use is no part of the attack
        use(plures.load(folder / f"{subject}.safetensors", network()), folder / "again.safetensors")
    connection.send("ready")
    for index in indices:
        started = time.monotonic()
        verdict, note = judge(kind, seed, index, folder)
        connection.send((verdict, note, time.monotonic() - started))


def judge(kind: Kind, seed: int, index: int, folder: Path) -> tuple[str, str]:
    """Make one file, load it, and say what became of it."""
    chance = Random(f"{seed}/{kind}/{index}")
    good = folder / f"{index % len(SUBJECTS)}.safetensors"
    path = folder / "attack.safetensors"
    if kind == "damaged":
        path.write_bytes(damaged(good.read_bytes(), chance))
    else:
        path.write_bytes(forged(good, [folder / f"{other}.safetensors" for other in range(len(SUBJECTS))], chance))
    try:
        return _loaded(kind, path, good, chance)
    except plures.PluresError as error:
        try:
            check_sentence(error)
        except AssertionError as fault:
            return "silent", str(fault)
        return "refused", str(error)
    except AssertionError as fault:
        return "silent", str(fault)
    except Exception:
        return "raw", traceback.format_exc(limit=-4)


def _loaded(kind: Kind, path: Path, good: Path, chance: Random) -> tuple[str, str]:
    if kind == "damaged":
        ensemble = plures.load(path, network())
        return ("equal", "") if same(ensemble, _original(good)) else ("silent", "it loads to other numbers")
    way = chance.random()
    if way < 0.1:
        ensemble = plures.load(good, network())
        refill(ensemble, path)
    elif way < 0.2:
        ensemble = plures.load(path, network(), members=[chance.choice([0, 1, 7])])
        ensemble(torch.zeros(2, 1, 4, 4))
        return "loaded", ""
    else:
        ensemble = plures.load(path, network())
    _check_options(ensemble, _original(good))
    use(ensemble, path.with_name("again.safetensors"))
    return "loaded", ""


def _check_options(ensemble: plures.Ensemble, original: plures.Ensemble) -> None:
    """Demand that options of the wrong type are refused, not kept."""
    if type(ensemble) is type(original):
        for name, value in original.options().items():
            kept = ensemble.options()[name]
            kinds = {type(kept), type(value)}
            alike = len(kinds) == 1 or None in (kept, value) or kinds == {int, float}
            assert alike, f"the option {name}={kept!r} was taken, where {value!r} was"


@cache
def _original(path: Path) -> plures.Ensemble:
    return plures.load(path, network())
