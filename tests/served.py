"""A server on the loopback, and a client that may misbehave."""

import http.client
import io
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from plures.lab.runs.open import open_run
from plures.lab.serving import Limits
from plures.lab.serving.app import server_for

Answer = tuple[int, Any]


@contextmanager
def serving(folder: Path, limits: Limits) -> Iterator[int]:
    """Serve a run in a thread, and yield the port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = server_for(open_run(folder), "127.0.0.1", 0, limits)
        started = threading.Event()
        startup = server.startup

        async def told(*args: Any, **kwargs: Any) -> None:
            await startup(*args, **kwargs)
            started.set()

        server.startup = told  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        started.wait()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def request(port: int, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Answer:
    """Send one request; JSON comes back as values, other answers as text."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
        response = connection.getresponse()
        text = response.read().decode()
        json_sent = response.headers.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if json_sent else text
    finally:
        connection.close()


def form(files: list[tuple[str, bytes]], **fields: str) -> tuple[bytes, str]:
    """Write a multipart form, and its content type."""
    parts = [
        f'--line\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    for name, contents in files:
        head = f'--line\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        parts.append(head.encode() + contents + b"\r\n")
    return b"".join(parts) + b"--line--\r\n", "multipart/form-data; boundary=line"


def post(port: int, *files: bytes, **fields: str) -> Answer:
    """Send images as a form."""
    body, kind = form([(f"{number}.png", contents) for number, contents in enumerate(files)], **fields)
    return request(port, "POST", "/predict", body, kind)


def png(pixels: np.ndarray) -> bytes:
    """Encode a image."""
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def huge_png(side: int = 20_000) -> bytes:
    """Write a small file of a image that has hundreds of millions of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side + 1) * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bad_requests(good: bytes) -> list[tuple[str, bytes, str, set[int]]]:
    """List what strangers send: a name, body, content type, and the answers that are right."""
    multipart = "multipart/form-data; boundary=line"
    return [
        ("a truncated image", *form([("a.png", good[:40])]), {422}),
        ("a truncated one that is called too large", *form([("too large.png", good[:40])]), {422}),
        ("a text file", *form([("a.txt", b"not a image")]), {422}),
        ("an empty file", *form([("a.png", b"")]), {422}),
        ("a huge image", *form([("a.png", huge_png())]), {413}),
        ("a thousand files", *form([("a.png", good)] * 1000), {413}),
        ("no file", *form([]), {422}),
        ("a form cut short", form([("a.png", good)])[0][:-30], multipart, {422}),
        ("a form without boundary", b"x", "multipart/form-data", {422}),
        ("a confidence of 7", *form([("a.png", good)], abstain_below="7"), {422}),
        ("a coverage of 1", *form([("a.png", good)], coverage="1"), {422}),
        ("a risk that is no number", *form([("a.png", good)], risk="low"), {422}),
        ("an option with a typing error", *form([("a.png", good)], coverge="0.9"), {422}),
        ("another content type", b"x", "text/plain", {415}),
        ("JSON", b'{"images": ["aGk="]}', "application/json", {415}),
        ("nothing", b"", multipart, {422}),
    ]
