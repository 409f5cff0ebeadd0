"""The server answers as `plures predict`, refuses bad requests in one sentence, and goes on."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.serving.app import serve
from plures.lab.serving.batching import Batcher
from plures.lab.serving.counters import Histogram
from plures.lab.serving.memory import give_back, share_pools
from plures.lab.serving.requests import Limits, Refused
from served import bad_requests, form, png, post, post_json, request, serving

RUN = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"


def picture(seed):
    return png(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8))


@pytest.fixture(scope="module")
def port():
    with serving(RUN, Limits(bytes=2**20, read=600)) as port:
        yield port


# --- good requests


def test_answers_are_those_of_plures_predict(port, tmp_path, capsys):
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(picture(number))
    assert main(["predict", str(RUN), *map(str, files), "--json", "--abstain-below", "0.5"]) == 0
    expected = json.loads(capsys.readouterr().out)
    for send in (post, post_json):
        status, found = send(port, *map(picture, range(3)), abstain_below=0.5 if send is post_json else "0.5")
        assert status == 200
        assert found["failed"] == []
        for ours, theirs in zip(found["predictions"], expected["predictions"], strict=True):
            assert ours.keys() == theirs.keys()
            assert ours["label"] == theirs["label"]
            assert ours["votes"] == theirs["votes"]
            for name in ("confidence", "epistemic", "total"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


def test_it_does_not_know_below_the_confidence_asked_for(port):
    (certain,) = post(port, picture(0), abstain_below="0")[1]["predictions"]
    (unsure,) = post(port, picture(0), abstain_below="1")[1]["predictions"]
    assert certain["label"] is not None
    assert unsure["label"] is None
    assert unsure["confidence"] == pytest.approx(certain["confidence"])


def test_requests_at_the_same_time_share_batches_and_get_their_own_answers(port):
    pictures = [picture(seed) for seed in range(24)]
    alone = [post(port, one)[1]["predictions"][0] for one in pictures]
    with ThreadPoolExecutor(12) as clients:
        together = list(clients.map(lambda one: post(port, one)[1]["predictions"][0], pictures))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["votes"] == theirs["votes"]
        assert ours["confidence"] == pytest.approx(theirs["confidence"], abs=1e-5)


def test_health_metrics_and_the_pages(port):
    status, health = request(port, "GET", "/health")
    assert (status, health["status"], len(health["classes"])) == (200, "ok", 10)
    post(port, picture(0))
    _, text = request(port, "GET", "/metrics")
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+.\w]+', line), line
    assert int(re.search(r'plures_requests_total\{path="/predict",status="200"\} (\d+)', text)[1]) >= 1
    assert int(re.search(r"plures_predict_seconds_count (\d+)", text)[1]) >= 1
    for path in ("/", "/docs"):
        status, page = request(port, "GET", path)
        assert status == 200
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert "POST /predict" in page
    assert request(port, "GET", "/openapi.json")[1]["paths"].keys() == {"/predict", "/health", "/metrics"}


def test_a_histogram_counts_all_that_is_no_larger():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert histogram.lines("h") == [
        'h_bucket{le="1.0"} 2',
        'h_bucket{le="2.0"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 12.000000",
        "h_count 4",
    ]


# --- bad requests


@pytest.mark.parametrize(
    ("body", "kind", "right"), [pytest.param(*bad[1:], id=bad[0]) for bad in bad_requests(picture(0))]
)
def test_a_bad_request_gets_a_sentence_and_the_next_one_its_answer(port, body, kind, right):
    status, answer = request(port, "POST", "/predict", body, kind)
    assert status in right, answer
    assert answer["detail"].strip()
    assert "\n" not in answer["detail"]
    assert post(port, picture(0))[0] == 200


def test_good_requests_among_many_bad_ones_are_all_answered_rightly(port):
    bad = [one for one in bad_requests(picture(0)) if one[0] != "a thousand files"] * 8
    expected = [post(port, picture(seed))[1]["predictions"][0]["votes"] for seed in range(4)]

    def send(number):
        if number % 3:
            _, body, kind, right = bad[number % len(bad)]
            return request(port, "POST", "/predict", body, kind)[0] in right
        status, found = post(port, picture(number % 4))
        return status == 200 and found["predictions"][0]["votes"] == expected[number % 4]

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(send, range(180)))


def test_good_pictures_beside_a_bad_one_are_answered(port):
    status, found = post(port, picture(0), b"no picture", picture(1))
    assert status == 422
    assert [one["file"] for one in found["predictions"]] == ["0.png", "2.png"]
    assert [one["file"] for one in found["failed"]] == ["1.png"]


def test_a_long_request_is_refused_before_it_is_read(port):
    body, kind = form([("a.png", bytes(2**20 + 1))])
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode())  # and nothing of the body
        assert client.recv(12) == b"HTTP/1.1 413"
    with socket.create_connection(("127.0.0.1", port)) as client:  # without a length, in chunks
        client.sendall(
            f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        client.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 413"


def test_a_client_that_hangs_is_let_go_and_others_are_answered_meanwhile(port):
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head)
        assert post(port, picture(0))[0] == 200
    with serving(RUN, Limits(read=0.05)) as impatient:
        for sent in (head, head[:30], b""):  # no more than a part of the body, a part of the head, nothing
            with socket.create_connection(("127.0.0.1", impatient)) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda: client.recv(1000), b""))  # until the server closes
                assert answer.startswith(b"HTTP/1.1 408"), sent
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def test_too_many_waiting_pictures_are_refused_and_the_others_answered():
    release = threading.Event()

    def run(items):
        release.wait()
        return [2 * item for item in items]

    async def scenario():
        batcher = Batcher(run, Limits(queue=4, batch=2, wait=0))
        batcher.start()
        first = asyncio.create_task(batcher.ask([1]))
        await asyncio.sleep(0)  # it is put into the queue ...
        while batcher.waiting:  # ... and taken out by the batch that blocks
            await asyncio.sleep(0)
        later = [asyncio.create_task(batcher.ask([item])) for item in range(2, 6)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await batcher.ask([9])
        assert refused.value.status == 503
        release.set()
        assert await asyncio.gather(first, *later) == [[2], [4], [6], [8], [10]]
        await batcher.stop()

    asyncio.run(scenario())


def test_a_network_that_fails_once_answers_the_next_batch():
    def run(items):
        if -1 in items:
            raise RuntimeError("no")
        return items

    async def scenario():
        batcher = Batcher(run, Limits(wait=0))
        batcher.start()
        with pytest.raises(RuntimeError, match="no"):
            await batcher.ask([-1])
        assert await batcher.ask([1, 2]) == [1, 2]
        await batcher.stop()

    asyncio.run(scenario())


def test_limits_are_checked():
    for wrong in ({"bytes": 0}, {"queue": 1.5}, {"wait": -1}, {"read": 0}):
        with pytest.raises(PluresError, match=next(iter(wrong))):
            Limits(**wrong)


# --- the command


def test_the_command_serves_until_told_to_end():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "plures", "serve", str(RUN), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        assert f"http://127.0.0.1:{port}" in server.stderr.readline()
        while True:
            try:
                assert post(port, picture(0))[0] == 200
                break
            except ConnectionRefusedError:  # it listens in a moment
                assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        server.wait()
        assert server.returncode in (0, -signal.SIGTERM)


def test_a_port_that_is_taken_is_told(port, capsys):
    assert main(["serve", str(RUN), "--port", str(port)]) == 2
    assert "is the port in use?" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["x" * 300, "ü" * 100])
def test_a_host_that_cannot_be(host) -> None:
    with pytest.raises(PluresError, match="use the name or the address of this machine"):
        serve(None, host, 0, Limits())  # type: ignore[arg-type]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_that_is_free_goes_back_to_the_system() -> None:
    """Blocks of many sizes leave holes that glibc keeps: a server would grow with every kind of request."""
    process = psutil.Process()
    blocks = [bytearray(60_000) for _ in range(4000)]
    full = process.memory_info().rss
    del blocks[: len(blocks) - 1]  # the last one, at the end of the pool, keeps the rest from being returned

    async def given_back() -> int:
        task = asyncio.create_task(give_back(seconds=0))
        for _ in range(1000):  # turns of the loop: the work is done in a thread
            if full - process.memory_info().rss > 100_000_000:
                break
            await asyncio.sleep(0.001)
        task.cancel()
        return full - process.memory_info().rss

    share_pools()
    assert asyncio.run(given_back()) > 100_000_000
