"""Load `plures serve` on the loopback: throughput against the engine alone, and many bad requests among good ones.

    make load-test
    python benchmarks/load_test.py --seconds 20 --clients 32 --bad 10000
    python benchmarks/load_test.py --soak 30 --width 16      half an hour of mixed requests, some per second

An untrained ResNet18 of five members at 32 x 32 pixels answers, in a process of its own. Throughput is measured in turn
with `engine.predict` on the same images in batches, in that process, so that a busy machine slows both.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from served import bad_requests, form, png

IMAGES = 256
RATIO = 0.7  # of the engine's throughput that the server shall reach
GROWTH = 0.05  # of resident memory that bad requests may leave behind, between the halves of the test
LOOKS = 10  # at the memory, half of them in each half


def images() -> np.ndarray:
    """Draw the images that are asked for."""
    return np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)


def server(pipe: Connection, width: int) -> None:
    """Serve until told to stop; between loads, measure the engine alone."""
    import torch

    import plures
    from plures.lab.data import DataInfo
    from plures.lab.models import build
    from plures.lab.recipes import get_recipe
    from plures.lab.runs.open import Run
    from plures.lab.serving import Limits
    from plures.lab.serving.app import server_for

    torch.manual_seed(0)
    ensemble = plures.OrthogonalDropout(build("resnet18", 10, 3, width=width), members=5, optimize_masks=False)
    for _ in ensemble.stages():
        pass
    info = DataInfo("load", [str(n) for n in range(10)], 3, 32, 32, False, [0.5] * 3, [0.25] * 3)
    run = Run(Path("load"), "orthogonal-dropout", get_recipe("cifar10"), info, "", ensemble)
    engine = ensemble.engine()
    limits = Limits()
    inputs = info.normalise(torch.from_numpy(images()))
    served = server_for(run, "127.0.0.1", 0, limits)
    thread = threading.Thread(target=served.run)
    thread.start()
    while not served.started:
        time.sleep(0.05)
    votes = engine.predict(inputs, batch_size=limits.batch).members.argmax(-1).T.tolist()
    pipe.send((served.servers[0].sockets[0].getsockname()[1], votes))
    used = 0.0
    while (asked := pipe.recv()) is not None:
        if asked == "begin":
            used = time.process_time()
        elif asked == "end":
            pipe.send(time.process_time() - used)
        else:
            pipe.send(alone(engine, inputs, limits.batch, asked))
    served.should_exit = True
    thread.join()


def alone(engine: Any, inputs: Any, batch: int, seconds: float) -> tuple[float, float]:
    """Measure the engine without a server: images per second, and processor time of a image."""
    done, started, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < started + seconds:
        engine.predict(inputs, batch_size=batch)
        done += IMAGES
    return done / (time.perf_counter() - started), (time.process_time() - used) / done


class Request(NamedTuple):
    """A request as it goes over the wire, and which answers are right; a good one has votes."""

    name: str
    sent: bytes
    right: set[int]
    votes: list[int] | None = None


def request(name: str, body: bytes, kind: str, right: set[int], votes: list[int] | None = None) -> Request:
    """Write a request once, so that sending it again costs the machine under test next to nothing."""
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return Request(name, head.encode() + body, right, votes)


class Client:
    """Send requests over one connection that stays open, as browsers and services do.

    It shares the processor with the server, so it does as little as it can: answers are read when all is over.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: socket.socket | None = None
        self.seconds: list[float] = []
        self.answers: list[tuple[Request, bytes]] = []

    def send(self, asked: Request) -> None:
        """Send a request, and keep the answer."""
        started = time.perf_counter()
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        try:
            self.connection.sendall(asked.sent)
            answer = self._answer(self.connection)
        except OSError as error:
            answer = str(error).encode()
            self.leave()
        self.answers.append((asked, answer))
        if asked.votes is not None:
            self.seconds.append(time.perf_counter() - started)

    def leave(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _answer(self, connection: socket.socket) -> bytes:
        answer = b""
        while True:
            head, found, body = answer.partition(b"\r\n\r\n")
            if found and len(body) >= int(re.search(rb"content-length: (\d+)", head)[1]):  # type: ignore[index]
                return answer
            part = connection.recv(1 << 16)
            if not part:
                raise ConnectionError(f"the server closed the connection after {answer!r}")
            answer += part


def mistakes(clients: list[Client]) -> list[str]:
    """Read all answers, and tell those that are wrong."""
    return [
        f"{asked.name}: {answer!r}" for client in clients for asked, answer in client.answers if wrong(asked, answer)
    ]


def wrong(asked: Request, answer: bytes) -> bool:
    """Return whether an answer has a wrong status, wrong votes, or no sentence."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 ") or int(head.split()[1]) not in asked.right:
        return True
    found = json.loads(body)
    if asked.votes is None:
        return not found["detail"]
    return [int(vote) for vote in found["predictions"][0]["votes"]] != asked.votes


def together(clients: list[Client], work: Callable[[Client], Any]) -> float:
    """Let all clients work at the same time, and return how long it took."""
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    for client in clients:
        client.leave()  # the server lets idle ones go
    return took


def measure(clients: list[Client], good: list[Request], seconds: float, rounds: int, pipe: Connection) -> list[float]:
    """Measure the server and the engine alone in turn, and return the ratios of their throughput."""

    def load(client: Client) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            client.send(random.choice(good))

    ratios = []
    together(clients, load)  # warm up
    for client in clients:
        client.seconds.clear()
    for _ in range(rounds):
        before, own = sum(len(client.seconds) for client in clients), time.process_time()
        pipe.send("begin")
        took = together(clients, load)
        count = sum(len(client.seconds) for client in clients) - before
        used = ask(pipe, "end")
        alone, alone_used = ask(pipe, seconds)
        ratios.append(count / took / alone)
        print(
            f"served {count / took:.0f} images/s, engine alone {alone:.0f}: {ratios[-1]:.2f}; processor time per "
            f"image: server {1000 * used / count:.2f} ms, clients {1000 * (time.process_time() - own) / count:.2f} "
            f"ms, engine alone {1000 * alone_used:.2f} ms",
            flush=True,
        )
    return ratios


def ask(pipe: Connection, question: Any) -> Any:
    """Ask the process of the server."""
    pipe.send(question)
    return pipe.recv()


def insult(clients: list[Client], good: list[Request], bad: int, process: psutil.Process) -> float:
    """Mix bad requests with good ones, and return how much memory they left behind."""
    strangers = [request(*one) for one in bad_requests(png(images()[0]))]
    each = -(-bad // len(clients))

    def mixed(count: int) -> float:
        def work(client: Client) -> None:
            for number in range(count):
                client.send(strangers[number % len(strangers)])
                if number % 10 == 0:
                    client.send(random.choice(good))

        return together(clients, work)

    def resident() -> int:
        """Look when the server has nothing in its hands but what it keeps: megabytes of bad requests are let go."""
        together(clients, lambda client: [client.send(one) for one in good[:4]])
        return process.memory_info().rss

    mixed(max(len(strangers), each // 5))  # a fifth first, with all kinds among them: caches and pools fill
    # Memory goes up and down by a batch's activations, so one look says little; what leaks raises every later look.
    took, looks = 0.0, []
    for part in range(LOOKS):
        took += mixed(each * (part + 1) // LOOKS - each * part // LOOKS)
        looks.append(resident())
    filled, later = statistics.median(looks[: LOOKS // 2]), statistics.median(looks[LOOKS // 2 :])
    growth = later / filled - 1
    count = each * len(clients)
    print(f"{count} bad requests in {took:.0f} s; memory {filled / 2**20:.0f} MB, {100 * growth:+.1f} %")
    return growth


def soak(port: int, good: list[Request], minutes: float, process: psutil.Process) -> bool:
    """Mix good, bad, slow and aborted requests and reloads of the pages for minutes; return whether nothing was lost.

    Some per second, so that it can run beside other work: what leaks is seen by its growth, not by its speed.
    """
    strangers = [request(*one) for one in bad_requests(png(images()[0]))]
    pages = [
        f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in ("/", "/health", "/metrics", "/openapi.json")
    ]
    random.seed(0)
    client = Client(port)
    sent = dict.fromkeys(("good", "bad", "slow", "aborted", "reload"), 0)
    rows: list[tuple[float, float, int]] = []
    errors: list[str] = []
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        ends = min(time.monotonic() + 60, until)
        while time.monotonic() < ends:
            kind = random.choices(list(sent), (10, 3, 1, 2, 2))[0]
            sent[kind] += 1
            if kind in ("good", "bad"):
                client.send(random.choice(good if kind == "good" else strangers))
            elif kind == "reload":
                client.send(Request("page", random.choice(pages), {200}))
            else:  # it hangs up in the middle; a slow one first lets a second pass between two halves
                asked = random.choice(good).sent
                with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
                    connection.sendall(asked[: len(asked) // 2])
                    if kind == "slow":
                        time.sleep(1)
                        connection.sendall(asked[len(asked) // 2 :])
                        connection.recv(1 << 16)
            time.sleep(0.05)
        errors += [f"{one.name}: {answer[:200]!r}" for one, answer in client.answers if failed(one, answer)]
        client.answers.clear()
        client.leave()
        time.sleep(2)  # until the server has closed what was hung up
        ordered = sorted(client.seconds)
        client.seconds.clear()
        p99 = ordered[int(len(ordered) * 0.99)] if ordered else 0.0
        rows.append((1000 * p99, process.memory_info().rss / 2**20, process.num_fds()))
        print(
            f"minute {len(rows)}: p99 {rows[-1][0]:.0f} ms, {rows[-1][1]:.0f} MB, {rows[-1][2]} descriptors", flush=True
        )
    early, later = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    halves = [[statistics.median(row[place] for row in half) for half in (early or rows, later)] for place in range(3)]
    print(f"{sum(sent.values())} requests: {sent}; errors: {len(errors)} {errors[:3]}")
    print(f"medians of both halves: p99 {halves[0]} ms, memory {halves[1]} MB, descriptors {halves[2]}")
    (_, memory, descriptors) = halves
    return not errors and memory[1] <= memory[0] * (1 + GROWTH) and descriptors[1] <= descriptors[0] + 1


def failed(asked: Request, answer: bytes) -> bool:
    """Return whether an answer is wrong; of a page, only the status counts."""
    return wrong(asked, answer) if asked.name != "page" else not answer.startswith(b"HTTP/1.1 200")


def main() -> int:
    """Measure, print, and say by the exit code whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64, help="of the ResNet18")
    parser.add_argument("--soak", type=float, help="only mixed requests, for so many minutes")
    options = parser.parse_args()

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(theirs, options.width), daemon=True)
    process.start()
    port, votes = ours.recv()
    forms = [form([("a.png", png(pixels))]) for pixels in images()]
    good = [request(f"image {n}", *form, {200}, votes[n]) for n, form in enumerate(forms)]
    if options.soak is not None:
        held = soak(port, good, options.soak, psutil.Process(process.pid))
        ours.send(None)
        process.join(60)
        return 0 if held and process.exitcode == 0 else 1
    clients = [Client(port) for _ in range(options.clients)]

    ratios = measure(clients, good, options.seconds, options.rounds, ours)
    seconds = sorted(value for client in clients for value in client.seconds)
    p50, p99 = (seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    print(f"{len(seconds)} requests of {options.clients} clients: p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms")
    growth = insult(clients, good, options.bad, psutil.Process(process.pid))
    errors = mistakes(clients)
    print(f"errors: {len(errors)} {errors[:3]}")
    ours.send(None)
    process.join(60)
    met = statistics.median(ratios) >= RATIO and growth <= GROWTH and not errors and process.exitcode == 0
    print(f"ratio {statistics.median(ratios):.2f} (at least {RATIO}): {'met' if met else 'not met'}")
    return 0 if met else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    sys.exit(main())
