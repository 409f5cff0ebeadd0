"""What a server has done, in the text format of Prometheus."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PICTURES = (1, 2, 4, 8, 16, 32, 64, 128)
PATHS = {"/", "/predict", "/health", "/metrics", "/docs", "/openapi.json"}


class Histogram:
    """Count values by size.

    seconds = Histogram((0.1, 1.0))
    seconds.add(0.3)
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        """Give the histogram as Prometheus reads it: counts of all that are no larger than each bound."""
        below, lines = 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {below}"]


class Counters:
    """Count requests, pictures and batches of a server.

    counters.answered("/predict", 200, seconds=0.012)
    counters.text({"plures_queue_pictures": 3})
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds = Histogram(SECONDS)
        self.batches = Histogram(PICTURES)
        self.abstained = 0

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request; the time of predictions alone is kept."""
        self.requests[path, status] += 1
        if path == "/predict":
            self.seconds.add(seconds)

    def text(self, gauges: Mapping[str, float]) -> str:
        """Give everything as Prometheus reads it."""
        lines = ["# HELP plures_requests_total Requests answered.", "# TYPE plures_requests_total counter"]
        lines += [
            f'plures_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        lines += ["# HELP plures_predict_seconds Time of a prediction.", "# TYPE plures_predict_seconds histogram"]
        lines += self.seconds.lines("plures_predict_seconds")
        lines += ["# HELP plures_batch_pictures Pictures in a batch.", "# TYPE plures_batch_pictures histogram"]
        lines += self.batches.lines("plures_batch_pictures")
        lines += ["# HELP plures_abstained_total Pictures not decided.", "# TYPE plures_abstained_total counter"]
        lines.append(f"plures_abstained_total {self.abstained}")
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return "\n".join(lines) + "\n"


class Watched:
    """Count every request of an application, and give every answer some headers.

        app.add_middleware(Watched, counters=Counters(), headers={"X-Content-Type-Options": "nosniff"})

    It speaks ASGI itself: starlette's own way to write this starts three tasks for each request.
    """

    def __init__(self, app: ASGIApp, counters: Counters, headers: Mapping[str, str]) -> None:
        self.app = app
        self.counters = counters
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.counters.answered(path, status, time.perf_counter() - started)
