"""The server answers as `plures predict`, refuses bad requests in one sentence, and goes on."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from plures.errors import PluresError
from plures.lab.cli.main import main
from plures.lab.runs.open import open_run
from plures.lab.serving import Limits
from plures.lab.serving.app import Batcher, serve
from plures.lab.serving.requests import Refused
from plures.storage import save
from served import bad_requests, form, png, post, request, serving

RUN = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"


def pixels(seed):
    return np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)


def image(seed):
    return png(pixels(seed))


@pytest.fixture(scope="module")
def port():
    with serving(RUN, Limits(max_bytes=2**20, read=600)) as port:
        yield port


# --- good requests


def test_answers_are_those_of_plures_predict(port, tmp_path, capsys):
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(image(number))
    assert main(["predict", str(RUN), *map(str, files), "--json", "--abstain-below", "0.5"]) == 0
    expected = json.loads(capsys.readouterr().out)
    status, found = post(port, *map(image, range(3)), abstain_below="0.5")
    assert status == 200
    assert found["failed"] == []
    for ours, theirs in zip(found["predictions"], expected["predictions"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["label"] == theirs["label"]
        assert ours["votes"] == theirs["votes"]
        assert ours["probabilities"] == pytest.approx(theirs["probabilities"], abs=1e-5)
        assert max(ours["probabilities"].values()) == pytest.approx(ours["confidence"])
        for name in ("confidence", "epistemic", "total"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A copy of the run that is calibrated, on images of which it labels the more confident half correctly."""
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(RUN, folder)
    run = open_run(folder)
    inputs = run.info.normalise(torch.from_numpy(np.stack([pixels(seed) for seed in range(400)])[..., None]))
    prediction = run.ensemble.predict(inputs)
    labels = prediction.label + (prediction.confidence < prediction.confidence.median()).long()
    save(run.ensemble.calibrate(inputs, labels % 10), folder / "ensemble.safetensors")
    with serving(folder, Limits()) as port:
        yield folder, port


@pytest.mark.parametrize("options", [{"coverage": 0.7}, {"coverage": 0.95}, {"risk": 0.25}])
def test_sets_of_classes_and_bounded_risk_are_those_of_plures_predict(calibrated, options, tmp_path, capsys):
    run, port = calibrated
    files = [tmp_path / f"{number}.png" for number in range(12)]
    for number, file in enumerate(files):
        file.write_bytes(image(number))
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["predict", str(run), *map(str, files), "--json", *words]) == 0
    expected = json.loads(capsys.readouterr().out)["predictions"]
    sent = {name: str(value) for name, value in options.items()}
    status, found = post(port, *map(image, range(12)), **sent)
    assert status == 200
    for ours, theirs in zip(found["predictions"], expected, strict=True):
        assert ours["classes"] == theirs["classes"]
        assert ours["label"] == theirs["label"]
    if "coverage" in options:
        assert any(one["classes"] for one in expected)
    else:
        assert any(one["label"] is None for one in expected)


def test_a_guarantee_that_cannot_be_given_is_refused_in_one_sentence(port, calibrated):
    status, answer = post(port, image(0), coverage="0.9")
    assert (status, "is not calibrated" in answer["detail"]) == (422, True)
    status, answer = post(calibrated[1], image(0), risk="0.001")
    assert (status, "held-out samples" in answer["detail"]) == (422, True)


def test_it_does_not_know_below_the_confidence_asked_for(port):
    (certain,) = post(port, image(0), abstain_below="0")[1]["predictions"]
    (unsure,) = post(port, image(0), abstain_below="1")[1]["predictions"]
    assert certain["label"] is not None
    assert unsure["label"] is None
    assert unsure["confidence"] == pytest.approx(certain["confidence"])


def test_requests_at_the_same_time_share_batches_and_get_their_own_answers(port):
    images = [image(seed) for seed in range(24)]
    alone = [post(port, one)[1]["predictions"][0] for one in images]
    with ThreadPoolExecutor(12) as clients:
        together = list(clients.map(lambda one: post(port, one)[1]["predictions"][0], images))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["votes"] == theirs["votes"]
        assert ours["confidence"] == pytest.approx(theirs["confidence"], abs=1e-5)


def test_health_metrics_and_the_pages(port):
    status, health = request(port, "GET", "/health")
    assert (status, health["status"], len(health["classes"])) == (200, "ok", 10)
    post(port, image(0))
    _, text = request(port, "GET", "/metrics")
    found = {
        (sample.name, sample.labels.get("path"), sample.labels.get("status")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["plures_requests_total", "/predict", "200"] >= 1
    assert found["plures_predict_seconds_count", None, None] >= 1
    assert found["plures_batch_images_count", None, None] >= 1
    assert found["plures_queue_images", None, None] == 0
    status, page = request(port, "GET", "/")
    assert status == 200
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    paths = request(port, "GET", "/openapi.json")[1]["paths"]
    assert paths.keys() == {"/predict", "/health", "/metrics"}
    body = paths["/predict"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert body["properties"].keys() == {"files", "abstain_below", "coverage", "risk"}


# --- bad requests


@pytest.mark.parametrize(
    ("body", "kind", "right"), [pytest.param(*bad[1:], id=bad[0]) for bad in bad_requests(image(0))]
)
def test_a_bad_request_gets_a_sentence_and_the_next_one_its_answer(port, body, kind, right):
    status, answer = request(port, "POST", "/predict", body, kind)
    assert status in right, answer
    assert answer["detail"].strip()
    assert "\n" not in answer["detail"]
    assert post(port, image(0))[0] == 200


def test_good_requests_among_many_bad_ones_are_all_answered_rightly(port):
    bad = [one for one in bad_requests(image(0)) if one[0] != "a thousand files"] * 8
    expected = [post(port, image(seed))[1]["predictions"][0]["votes"] for seed in range(4)]

    def send(number):
        if number % 3:
            _, body, kind, right = bad[number % len(bad)]
            return request(port, "POST", "/predict", body, kind)[0] in right
        status, found = post(port, image(number % 4))
        return status == 200 and found["predictions"][0]["votes"] == expected[number % 4]

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(send, range(180)))


def test_good_images_beside_a_bad_one_are_answered(port):
    status, found = post(port, image(0), b"no image", image(1))
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
        assert post(port, image(0))[0] == 200
    with serving(RUN, Limits(read=0.05)) as impatient, socket.create_connection(("127.0.0.1", impatient)) as client:
        client.sendall(head)
        answer = b"".join(iter(lambda: client.recv(1000), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def test_too_many_waiting_images_are_refused_and_the_others_answered():
    release = threading.Event()

    def run(items):
        release.wait()
        return [2 * item for item in items]

    async def scenario():
        batcher = Batcher(run, Limits(queue=4, batch=2, wait=0))
        batcher.start()
        first = asyncio.create_task(batcher.ask([1]))
        await asyncio.sleep(0)  # it is put into the queue ...
        while batcher.queue.qsize():  # ... and taken out by the batch that blocks
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
    for wrong in ({"max_bytes": 0}, {"queue": 1.5}, {"wait": -1}, {"read": 0}):
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
                assert post(port, image(0))[0] == 200
                break
            except ConnectionRefusedError:  # it listens in a moment
                assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        server.wait()
        assert server.returncode in (0, -signal.SIGTERM)


def test_a_port_that_is_taken_is_told(port, capsys):
    assert main(["serve", str(RUN), "--port", str(port)]) == 2
    assert "is it in use?" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["x" * 300, "ü" * 100])
def test_a_host_that_cannot_be(host) -> None:
    with pytest.raises(PluresError, match="use the name or the address of this machine"):
        serve(None, host, 0, Limits())  # type: ignore[arg-type]
