"""The HTTP server of a finished run: its paths, its batches and metrics, and what `plures serve` starts."""

import asyncio
import html
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import numpy as np
import prometheus_client as prometheus
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import ClientDisconnect

from plures.answers import Prediction
from plures.calibration import ClassCalibration, NumberCalibration
from plures.errors import PluresError, visible
from plures.lab.data.images import TooLarge
from plures.lab.evaluation.evaluate import device_of
from plures.lab.evaluation.predict import check_calibrated, image_predictions
from plures.lab.runs.open import Run
from plures.lab.serving import Limits
from plures.lab.serving.requests import DESCRIPTION, Refused, prepare, read_request
from plures.version import __version__

DECODERS = 2  # images decoded at once: each may need hundreds of megabytes for a moment
MOST_CONNECTIONS = 128
SHOWN = 20  # names of classes on the page
SECONDS_TO_END = 30  # for running requests when the server is stopped
# The page contains everything it needs; nothing else may be loaded, whatever a file name or class name contains.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src blob: data:"
)
PATHS = {"/", "/predict", "/health", "/metrics", "/openapi.json"}


class Batcher:
    """Answer single items by a function of many; one batch runs at a time, in a thread of its own.

    A batch starts when it is full, or `wait` seconds after its first item. Items of requests that were cancelled are
    left out.
    """

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], limits: Limits) -> None:
        self.run = run
        self.limits = limits
        self.queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "plures-network")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to collect batches; call it in the event loop that asks."""
        self._task = asyncio.create_task(self._collect())

    async def stop(self) -> None:
        """Answer what is waiting, then stop."""
        await self.queue.join()
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown()

    async def ask(self, items: Sequence[Any]) -> list[Any]:
        """Return the answers; raise `Refused` at once if too many items are waiting."""
        waiting = self.queue.qsize()
        if waiting + len(items) > self.limits.queue:
            raise Refused(503, f"{waiting} images are already waiting: try again in a moment")
        answers = [asyncio.get_running_loop().create_future() for _ in items]
        for pair in zip(items, answers, strict=True):
            self.queue.put_nowait(pair)
        try:
            return list(await asyncio.gather(*answers))
        finally:
            for answer in answers:
                answer.cancel()  # the client has left: leave it out of the next batch

    async def _collect(self) -> None:
        while True:
            batch = [await self.queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.wait):
                    while len(batch) < self.limits.batch:
                        batch.append(await self.queue.get())
            if asked := [(item, answer) for item, answer in batch if not answer.done()]:
                await self._answer(asked)
            for _ in batch:
                self.queue.task_done()

    async def _answer(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, self.run, [item for item, _ in batch])
        except Exception as error:  # of the network: these requests fail, the next batch is answered
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), one in zip(batch, found, strict=True):
            if not answer.done():
                answer.set_result(one)


def make_app(run: Run, limits: Limits) -> FastAPI:
    """Return the application that answers for a run."""
    predictor, device = run.ensemble.engine(), device_of(run.ensemble)
    calibration = predictor.calibration
    assert not isinstance(calibration, NumberCalibration)  # networks for images classify
    decoders = ThreadPoolExecutor(DECODERS, "plures-decoder")
    # A dashboard reads these names, help texts and labels.
    registry = prometheus.CollectorRegistry()
    requests = prometheus.Counter("plures_requests", "Requests answered.", ["path", "status"], registry=registry)
    seconds = prometheus.Histogram("plures_predict_seconds", "Seconds per prediction.", registry=registry)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    batches = prometheus.Histogram("plures_batch_images", "Images per batch.", buckets=sizes, registry=registry)
    abstained = prometheus.Counter("plures_abstained", "Images without a label.", registry=registry)
    queue = prometheus.Gauge("plures_queue_images", "Images that wait for a batch.", registry=registry)

    def members(images: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the members' probabilities, [members, classes], for each image, uint8 [size, size, channels]."""
        batches.observe(len(images))
        inputs = run.info.normalise(torch.from_numpy(np.stack(images))).to(device)
        return predictor.predict(inputs).members.cpu().unbind(1)

    batcher = Batcher(members, limits)
    queue.set_function(batcher.queue.qsize)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()
        decoders.shutdown()

    app = FastAPI(title="plures", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.middleware("http")
    async def count(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        started, status = time.perf_counter(), 500
        path = request.url.path if request.url.path in PATHS else "other"
        try:
            response = await answer(request)
            status = response.status_code
            return response
        finally:
            requests.labels(path, status).inc()
            if path == "/predict":
                seconds.observe(time.perf_counter() - started)

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
        check_calibrated(run, wanted)
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(decoders, prepare, *upload, run.info) for upload in uploads]
        outcomes = [(name, one) for (name, _), one in zip(uploads, await asyncio.gather(*jobs), strict=True)]
        errors = [(name, one) for name, one in outcomes if isinstance(one, PluresError)]
        good = [(name, one) for name, one in outcomes if not isinstance(one, PluresError)]
        answers: list[dict[str, Any]] = []
        if rows := await batcher.ask([pixels for _, pixels in good]):
            prediction = Prediction.computed(torch.stack(rows, dim=1), calibration, wanted.abstain_below)
            names = [name for name, _ in good]
            # asdict copies every value, which takes as long as all the rest
            answers = [vars(one) for one in image_predictions(prediction, names, run.info.classes, wanted)]
        abstained.inc(sum(answer["label"] is None for answer in answers))
        body: dict[str, Any] = {"predictions": answers}
        body["failed"] = [{"file": name, "error": str(error)} for name, error in errors]
        if not errors:
            return JSONResponse(body)
        _, first = errors[0]
        return JSONResponse(body | {"detail": str(first)}, 413 if isinstance(first, TooLarge) else 422)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Return the state of the server and what it serves."""
        return {"status": "ok", "method": run.method, "data": run.info.name, "classes": list(run.info.classes)}

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(prometheus.generate_latest(registry), media_type=prometheus.CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        made = files("plures.lab.serving").joinpath("page.html").read_text("utf-8")
        words = {"title": f"{run.info.name}: {run.method}", "knows": knows(run), "size": str(run.info.size)}
        return re.sub(r"{{(\w+)}}", lambda found: html.escape(visible(words[found[1]])), made)

    return app


def knows(run: Run) -> str:
    """Describe what the model of a run can tell: its classes, who votes, and what its confidence is worth."""
    classes, members, calibration = run.info.classes, run.ensemble.members, run.ensemble.calibration
    named = ", ".join(classes[:SHOWN]) + (f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else "")
    voters = f"{members} members vote, and their mean is the answer. " if members > 1 else ""
    samples = len(calibration.probability) if isinstance(calibration, ClassCalibration) else 0
    worth = (
        f"Its confidence was calibrated on {samples} held-out images" if samples else "Its confidence is not calibrated"
    )
    return f"It tells {len(classes)} classes apart: {named}. {voters}{worth}."


def server_for(run: Run, host: str, port: int, limits: Limits) -> uvicorn.Server:
    """Return the server of a run, not started yet."""
    config = uvicorn.Config(
        make_app(run, limits),
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
    server = server_for(run, host, port, limits)
    print(visible(f"http://{host}:{port} serves {run.path}; press Ctrl-C to stop"), file=sys.stderr, flush=True)
    try:
        server.run()
    except SystemExit as ended:  # uvicorn exits if the port is in use
        if ended.code:
            raise PluresError(f"cannot listen on {host}:{port}: is it in use? choose another with --port") from None
