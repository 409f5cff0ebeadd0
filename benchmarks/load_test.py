"""Load `plures serve` on the loopback: throughput against the engine alone, and many bad requests among good ones.

    make load-test
    python benchmarks/load_test.py --seconds 20 --clients 32 --bad 10000

An untrained ResNet18 of five members at 32 x 32 pixels answers, in a process of its own. Throughput is measured in turn
with `engine.predict` on the same pictures in batches, in that process, so that a busy machine slows both.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from served import bad_requests, form, png

PICTURES = 256
RATIO = 0.7  # of the engine's throughput that the server shall reach
GROWTH = 0.05  # of resident memory that bad requests may leave behind


def pictures() -> np.ndarray:
    """Draw the pictures that are asked for."""
    return np.random.default_rng(0).integers(0, 256, (PICTURES, 32, 32, 3), dtype=np.uint8)


def server(pipe: Connection, width: int) -> None:
    """Serve until told to stop; between loads, measure the engine alone."""
    import torch
    import uvicorn

    import plures
    from plures.lab.data import DataInfo
    from plures.lab.models import build
    from plures.lab.recipes import get_recipe
    from plures.lab.runs.open import Run
    from plures.lab.serving.app import make_app
    from plures.lab.serving.batching import Model
    from plures.lab.serving.requests import Limits

    torch.manual_seed(0)
    ensemble = plures.OrthogonalDropout(build("resnet18", 10, 3, width=width), members=5, optimize_masks=False)
    for _ in ensemble.stages():
        pass
    info = DataInfo("load", [str(n) for n in range(10)], 3, 32, 32, False, [0.5] * 3, [0.25] * 3)
    model = Model(Run(Path("load"), "orthogonal-dropout", get_recipe("cifar10"), info, "", ensemble))
    limits = Limits()
    inputs = info.normalise(torch.from_numpy(pictures()))
    uvicorn_server = uvicorn.Server(uvicorn.Config(make_app(model, limits), port=0, log_level="critical"))
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.05)
    votes = model.predictor.predict(inputs, batch_size=limits.batch).members.argmax(-1).T.tolist()
    pipe.send((uvicorn_server.servers[0].sockets[0].getsockname()[1], votes))
    while (seconds := pipe.recv()) is not None:
        done, started = 0, time.perf_counter()
        while time.perf_counter() < started + seconds:
            model.predictor.predict(inputs, batch_size=limits.batch)
            done += PICTURES
        pipe.send(done / (time.perf_counter() - started))
    uvicorn_server.should_exit = True
    thread.join()


class Client:
    """Send requests over one connection that stays open, as browsers and services do."""

    def __init__(self, port: int, encoded: list[bytes], votes: list[list[int]]) -> None:
        self.port = port
        self.encoded = encoded
        self.votes = votes
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.seconds: list[float] = []
        self.errors: list[str] = []

    def post(self, body: bytes, kind: str) -> tuple[int, Any]:
        """Send a request, and read the answer."""
        try:
            self.connection.request("POST", "/predict", body, {"Content-Type": kind})
            response = self.connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            self.connection.close()
            raise

    def good(self, number: int) -> None:
        """Ask for a picture, and compare the votes."""
        started = time.perf_counter()
        status, found = self.post(*form([("a.png", self.encoded[number])]))
        self.seconds.append(time.perf_counter() - started)
        if status != 200 or [int(vote) for vote in found["predictions"][0]["votes"]] != self.votes[number]:
            self.errors.append(f"picture {number}: {status} {found}")

    def bad(self, request: tuple[str, bytes, str, set[int]]) -> None:
        """Send what a stranger might."""
        name, body, kind, right = request
        status, found = self.post(body, kind)
        if status not in right or not found["detail"]:
            self.errors.append(f"{name}: {status} {found}")


def together(clients: list[Client], work: Any) -> float:
    """Let all clients work at the same time, and return how long it took."""
    for client in clients:
        client.connection.close()  # the server has let idle ones go
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def main() -> int:
    """Measure, print, and say by the exit code whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64, help="of the ResNet18")
    options = parser.parse_args()

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(theirs, options.width), daemon=True)
    process.start()
    port, votes = ours.recv()
    encoded = [png(pixels) for pixels in pictures()]
    clients = [Client(port, encoded, votes) for _ in range(options.clients)]

    def load(client: Client) -> None:
        until = time.perf_counter() + options.seconds
        while time.perf_counter() < until:
            client.good(random.randrange(PICTURES))

    ratios = []
    together(clients, load)  # warm up
    for client in clients:
        client.seconds.clear()
    for _ in range(options.rounds):
        before = sum(len(client.seconds) for client in clients)
        took = together(clients, load)
        served = (sum(len(client.seconds) for client in clients) - before) / took
        ours.send(options.seconds)
        alone = ours.recv()
        ratios.append(served / alone)
        print(f"served {served:.0f} pictures/s, engine alone {alone:.0f}: {served / alone:.2f}", flush=True)
    seconds = sorted(value for client in clients for value in client.seconds)
    p50, p99 = (seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    print(f"{len(seconds)} requests of {options.clients} clients: p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms")

    memory = psutil.Process(process.pid)
    strangers = bad_requests(encoded[0])
    each = options.bad // options.clients

    def mixed(client: Client) -> None:
        for number in range(each):
            client.bad(strangers[number % len(strangers)])
            if number % 10 == 0:
                client.good(random.randrange(PICTURES))

    each, whole = max(1, each // 5), each  # a fifth first: caches and pools fill
    together(clients, mixed)
    each, filled = whole, memory.memory_info().rss
    took = together(clients, mixed)
    growth = memory.memory_info().rss / filled - 1
    errors = [error for client in clients for error in client.errors]
    print(
        f"{each * options.clients} bad requests in {took:.0f} s; memory {filled / 2**20:.0f} MB, {100 * growth:+.1f} %"
    )
    print(f"errors: {len(errors)} {errors[:3]}")
    ours.send(None)
    process.join(60)
    met = statistics.median(ratios) >= RATIO and growth <= GROWTH and not errors and process.exitcode == 0
    print(f"ratio {statistics.median(ratios):.2f} (at least {RATIO}): {'met' if met else 'not met'}")
    return 0 if met else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    sys.exit(main())
