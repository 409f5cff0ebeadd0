"""Who does what, and what came of it: items are judged in child processes, and their verdicts kept in a file.

A part of the attack is so many items, each known by its number. A child process judges a batch of them, one after
another, within limits of memory and time; where it dies or hangs, that is the verdict of the item, and another child
goes on with the next. Children are forked from a server that has imported everything once.
"""

import json
import math
import multiprocessing
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from plures import files

GOOD = ("refused", "same", "finite", "harmless")
WRONG = ("raw", "silent", "wordy", "hang", "died")
PATIENCE = 600  # seconds on the clock at least: what waits for nothing is a hang, what waits for a busy machine is not
# What takes long to import, and is no part of the attack.
PRELOADED = ["attack.files", "attack.networks", "attack.threads", "attack.commands", "attack.folders", "attack.heavy"]


class Verdict(NamedTuple):
    """What became of one item: a word of GOOD or WRONG, and what went wrong."""

    word: str
    note: str = ""
    times: int = 1


class Part(Protocol):
    """One part of the attack; it is sent to the child as it is."""

    name: str
    items: int
    batch: int  # how many are judged by one child
    memory: int  # bytes of addresses that the child may have
    seconds: int  # of the processor that one item may take

    def prepare(self) -> None:
        """Make ready in the child: what is built and compiled on first use is no part of the attack."""

    def judge(self, index: int) -> list[Verdict]:
        """Try one item."""


@dataclass
class Tally:
    """What became of the items of a part."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)  # what is wrong, and with which item
    cpu: float = 0.0  # seconds of the processor
    slowest: float = 0.0  # seconds on the clock

    def count(self, name: str, index: int, verdicts: Iterable[Verdict]) -> None:
        """Add what became of one item."""
        for verdict in verdicts:
            self.counts[verdict.word] += verdict.times
            if verdict.word not in GOOD:
                self.bad.append(f"{verdict.word}: {name} {index}: {verdict.note}")

    def add(self, other: "Tally") -> None:
        """Add what became of other items."""
        self.counts += other.counts
        self.bad += other.bad
        self.cpu += other.cpu
        self.slowest = max(self.slowest, other.slowest)

    def __str__(self) -> str:
        words = ", ".join(f"{self.counts[word]} {word}" for word in (*GOOD, *WRONG))
        return f"{self.counts.total()}: {words}; {self.cpu:.0f} s of one core, the slowest {self.slowest:.1f} s"


class Results:
    """Verdicts by part and batch, in a file: an attack that was stopped goes on where it was."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.batches: dict[str, dict[str, Tally]] = {}
        if path is not None and path.is_file():
            found = json.loads(path.read_text())
            if found["settings"] != self.settings:
                sys.exit(f"attack: {path} has the results of another attack, {found['settings']}: name another file")
            for part, batches in found["batches"].items():
                self.batches[part] = {
                    name: Tally(**(one | {"counts": Counter(one["counts"])})) for name, one in batches.items()
                }

    def done(self, part: Part, indices: range) -> bool:
        """Whether a batch was judged before."""
        return str(indices) in self.batches.get(part.name, {})

    def keep(self, part: Part, indices: range, tally: Tally) -> None:
        """Add a batch, and write all of them."""
        self.batches.setdefault(part.name, {})[str(indices)] = tally
        if self.path is not None:
            names = list(self.batches)
            document = {
                "settings": self.settings,
                "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
                "summary": {name: str(self.of(name)) for name in names},
                "wrong": sum(len(self.of(name).bad) for name in names),
                "batches": {
                    name: {batch: vars(tally) for batch, tally in batches.items()}
                    for name, batches in self.batches.items()
                },
            }
            files.write(self.path, json.dumps(document, indent=1).encode())

    def of(self, name: str) -> Tally:
        """Give what is known of a part so far."""
        total = Tally()
        for tally in self.batches.get(name, {}).values():
            total.add(tally)
        return total


def run(
    parts: Sequence[Part], results: Results, jobs: int = 1, first: int = 0, preloaded: Sequence[str] = PRELOADED
) -> int:
    """Judge all items of the parts that have no verdict yet; return how many are wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    lock = threading.Lock()

    def attack(part: Part, indices: range) -> None:
        tally = _batch(part, indices, context)
        with lock:
            results.keep(part, indices, tally)
            print(f"{part.name} {indices.start}-{indices.stop - 1} of {part.items}: {tally}", flush=True)
            print(*tally.bad, sep="\n", end="\n" if tally.bad else "", file=sys.stderr, flush=True)

    waiting = [
        (part, indices)
        for part in parts
        for start in range(first, first + part.items, part.batch)
        for indices in [range(start, min(start + part.batch, first + part.items))]
        if not results.done(part, indices)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(attack, *one) for one in waiting]
        try:
            for each in as_completed(pending):
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for part in parts:
        print(f"all of {part.name}: {results.of(part.name)}", flush=True)
    return sum(len(results.of(part.name).bad) for part in parts)


def _batch(part: Part, indices: range, context: Any) -> Tally:
    tally = Tally()
    start = indices.start
    while start < indices.stop:
        start = _until_trouble(part, range(start, indices.stop), context, tally)
    return tally


def _until_trouble(part: Part, indices: range, context: Any, tally: Tally) -> int:
    """Have items judged by one child for as long as it lives; return the index of the next item."""
    here, there = context.Pipe()
    child = context.Process(target=_work, args=(there, part, indices), daemon=True)
    child.start()
    there.close()
    index = indices.start
    try:
        here.recv()  # it is ready
        for index in indices:
            if not here.poll(max(part.seconds, PATIENCE)):
                tally.count(part.name, index, [Verdict("hang", f"no answer within {max(part.seconds, PATIENCE)} s")])
                break
            verdicts, cpu, wall = here.recv()
            tally.count(part.name, index, verdicts)
            tally.cpu += cpu
            tally.slowest = max(tally.slowest, wall)
    except EOFError:
        child.join()
        ended = f"the process ended with {child.exitcode}"
        tally.count(part.name, index, [Verdict("hang" if child.exitcode == -signal.SIGXCPU else "died", ended)])
    finally:
        child.kill()
        child.join()
        here.close()
    return index + 1


def _work(connection: Connection, part: Part, indices: range) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (part.memory, part.memory))
    spent = time.process_time()
    part.prepare()
    connection.send("ready")
    for index in indices:
        started = time.monotonic()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(spent) + part.seconds, resource.RLIM_INFINITY))
        verdicts = part.judge(index)
        before, spent = spent, time.process_time()
        connection.send((verdicts, spent - before, time.monotonic() - started))
