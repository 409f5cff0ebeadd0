"""The HTTP server of a finished run: its paths, its metrics, and what `plures serve` starts."""

import asyncio
import html
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import prometheus_client as prometheus
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plures.errors import PluresError, visible
from plures.lab.data.images import TooLarge
from plures.lab.evaluation.predict import check_calibrated
from plures.lab.runs.open import Run
from plures.lab.serving.batching import Batcher, Model
from plures.lab.serving.requests import DESCRIPTION, Limits, Refused, Upload, prepare, read_request
from plures.version import __version__

DECODERS = 2  # images decoded at once: each may need hundreds of megabytes for a moment
MOST_CONNECTIONS = 128
SECONDS_TO_END = 30  # for running requests when the server is stopped
# The page contains everything it needs; nothing else may be loaded, whatever a file name or class name contains.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src blob: data:"
)
PATHS = {"/", "/predict", "/health", "/metrics", "/openapi.json"}


class Metrics:
    """The metrics of a server, for Prometheus.

    metrics = Metrics()
    metrics.seconds.observe(0.012)
    prometheus_client.generate_latest(metrics.registry)
    """

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        # Names, help texts and labels are what a dashboard reads.
        self.requests = prometheus.Counter(
            "plures_requests", "Requests answered.", ["path", "status"], registry=registry
        )
        self.seconds = prometheus.Histogram("plures_predict_seconds", "Seconds per prediction.", registry=registry)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = prometheus.Histogram(
            "plures_batch_images", "Images per batch.", buckets=sizes, registry=registry
        )
        self.abstained = prometheus.Counter("plures_abstained", "Images without a label.", registry=registry)
        self.queue = prometheus.Gauge("plures_queue_images", "Images that wait for a batch.", registry=registry)


class Counted:
    """Count the requests of an application; a plain ASGI middleware, which adds no task per request.

    app.add_middleware(Counted, metrics=Metrics())
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and record its path, status and time."""
        started, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.metrics.requests.labels(path, status).inc()
                if path == "/predict":
                    self.metrics.seconds.observe(time.perf_counter() - started)


def make_app(model: Model, limits: Limits) -> FastAPI:
    """Return the application that answers for a model.

    app = make_app(Model(open_run("runs/birds")), Limits())
    """
    metrics = Metrics()
    batcher: Batcher[Any, torch.Tensor] = Batcher(model.probabilities, limits, metrics.batches.observe)
    metrics.queue.set_function(lambda: batcher.waiting)
    decoders = ThreadPoolExecutor(DECODERS, "plures-decoder")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()
        decoders.shutdown()

    app = FastAPI(title="plures", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Counted, metrics=metrics)

    @app.exception_handler(PluresError)
    async def refuse(_request: Request, error: PluresError) -> JSONResponse:
        status = error.status if isinstance(error, Refused) else 422  # a guarantee that the run cannot give
        headers = {408: {"Connection": "close"}, 503: {"Retry-After": "1"}}.get(status, {})
        return JSONResponse({"detail": str(error)}, status, headers)

    @app.exception_handler(ClientDisconnect)
    async def leave(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.post("/predict", openapi_extra=DESCRIPTION)
    async def predict(request: Request) -> Response:
        """Predict images: label, confidence, class probabilities, uncertainty in nats, and each member's vote."""
        uploads, wanted = await read_request(request, limits)
        check_calibrated(model.run, wanted)
        found, failed, status = await _decode(uploads, model, limits, decoders)
        rows = await batcher.ask([pixels for _, pixels in found])
        answers = model.answers([name for name, _ in found], rows, wanted)
        metrics.abstained.inc(sum(answer["label"] is None for answer in answers))
        body: dict[str, Any] = {"predictions": answers, "failed": failed}
        if failed:
            body["detail"] = failed[0]["error"]
        return JSONResponse(body, status)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Return the state of the server and what it serves."""
        classes = list(model.info.classes)
        return {"status": "ok", "method": model.run.method, "data": model.info.name, "classes": classes}

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Return metrics for Prometheus."""
        text = prometheus.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        title = html.escape(f"{model.info.name}: {model.run.method}")
        return files("plures.lab.serving").joinpath("page.html").read_text("utf-8").replace("{{title}}", title)

    return app


async def _decode(
    uploads: list[Upload], model: Model, limits: Limits, decoders: ThreadPoolExecutor
) -> tuple[list[tuple[str, Any]], list[dict[str, str]], int]:
    """Decode the images of a request; return names with pixels, failures with their reason, and the status."""
    loop = asyncio.get_running_loop()
    jobs = [loop.run_in_executor(decoders, prepare, upload, model.info, limits) for upload in uploads]
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    found: list[tuple[str, Any]] = []
    failed: list[dict[str, str]] = []
    status = 200
    for upload, outcome in zip(uploads, outcomes, strict=True):
        if isinstance(outcome, PluresError):
            if not failed:  # the status is that of the failure in `detail`
                status = 413 if isinstance(outcome, TooLarge) else 422
            failed.append({"file": upload.name, "error": str(outcome)})
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            found.append((upload.name, outcome))
    return found, failed, status


def server_for(model: Model, host: str, port: int, limits: Limits) -> uvicorn.Server:
    """Return the server of a model, not started yet."""
    config = uvicorn.Config(
        make_app(model, limits),
        host=host,
        port=port,
        http="h11",
        log_level="warning",
        access_log=False,
        server_header=False,
        headers=[("Content-Security-Policy", POLICY), ("X-Content-Type-Options", "nosniff")],
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    return uvicorn.Server(config)


def serve(run: Run, host: str, port: int, limits: Limits) -> None:
    """Serve a run until SIGINT or SIGTERM; running requests are answered first."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise PluresError(f"host={host!r}; use the name or the address of this machine, such as 127.0.0.1") from error
    server = server_for(Model(run), host, port, limits)
    print(visible(f"http://{host}:{port} serves {run.path}; press Ctrl-C to stop"), file=sys.stderr, flush=True)
    try:
        server.run()
    except SystemExit as ended:  # uvicorn exits if the port is in use
        if ended.code:
            raise PluresError(
                f"cannot listen on {host}:{port}: is the port in use? choose another with --port"
            ) from None
