"""The server: its paths, and what `plures serve` runs."""

import asyncio
import html
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

from plures.errors import PluresError, visible
from plures.lab.data.pictures import TooLarge
from plures.lab.runs.open import Run
from plures.lab.serving.batching import Batcher, Model, Row
from plures.lab.serving.connections import Patient
from plures.lab.serving.counters import Counters, Watched
from plures.lab.serving.memory import give_back, share_pools
from plures.lab.serving.requests import Asked, Limits, Refused, prepare, read_request
from plures.version import __version__

DECODERS = 2  # pictures decoded at once: each may take hundreds of megabytes for a moment
# The page is whole in itself; nothing else may be loaded, whatever a file name or class name says.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src blob: data:"
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "abstain_below": {"type": "number", "minimum": 0, "maximum": 1},
                    },
                }
            },
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "byte"}},
                        "abstain_below": {"type": "number", "minimum": 0, "maximum": 1},
                    },
                }
            },
        },
    },
    "responses": {
        str(status): {"description": text}
        for status, text in {
            408: "the request took too long to arrive",
            413: "too many bytes, pixels or images",
            415: "neither a form nor JSON",
            422: "an image, the form or the JSON cannot be read; readable images are still predicted",
            503: "too many images are waiting",
        }.items()
    },
}


def make_app(model: Model, limits: Limits) -> FastAPI:
    """Make the application that answers for a model."""
    counters = Counters()
    batcher: Batcher[Any, Row] = Batcher(model.answer_many, limits, counters.batches.add)
    decoders = ThreadPoolExecutor(DECODERS, "plures-decoder")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        memory = asyncio.create_task(give_back())
        yield
        memory.cancel()
        await batcher.stop()
        decoders.shutdown()

    app = FastAPI(title="plures", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)

    app.add_middleware(Watched, counters=counters, headers=HEADERS)

    @app.exception_handler(Refused)
    async def refuse(_request: Request, refused: Refused) -> JSONResponse:
        more = {408: {"Connection": "close"}, 503: {"Retry-After": "1"}}.get(refused.status, {})
        return JSONResponse({"detail": refused.sentence}, refused.status, more)

    @app.exception_handler(ClientDisconnect)
    async def leave(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.post("/predict", openapi_extra=BODY)
    async def predict(request: Request) -> Response:
        """Predict one or many pictures: label, confidence, uncertainty in nats, and each member's vote."""
        asked = await read_request(request, limits)
        found, failed, status = await _pictures(asked, model, limits, decoders)
        rows = await batcher.ask([pixels for _, pixels in found])
        answers = [model.as_json(name, row, asked.abstain_below) for (name, _), row in zip(found, rows, strict=True)]
        counters.abstained += sum(answer["label"] is None for answer in answers)
        body: dict[str, Any] = {"predictions": answers, "failed": failed}
        if failed:
            body["detail"] = failed[0]["error"]
        return JSONResponse(body, status)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Tell that the server answers, and what it serves."""
        classes = list(model.info.classes)
        return {"status": "ok", "method": model.run.method, "data": model.info.name, "classes": classes}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Give counters for Prometheus."""
        text = counters.text({"plures_queue_pictures": batcher.waiting})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return _file("page.html").replace("{{title}}", html.escape(f"{model.info.name}: {model.run.method}"))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return reference(app.openapi())

    return app


async def _pictures(
    asked: Asked, model: Model, limits: Limits, decoders: ThreadPoolExecutor
) -> tuple[list[tuple[str, Any]], list[dict[str, str]], int]:
    """Decode all pictures of a request; those that cannot be are told with the reason."""
    loop = asyncio.get_running_loop()
    jobs = [loop.run_in_executor(decoders, prepare, picture, model.info, limits) for picture in asked.pictures]
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    found: list[tuple[str, Any]] = []
    failed: list[dict[str, str]] = []
    status = 200
    for picture, outcome in zip(asked.pictures, outcomes, strict=True):
        if isinstance(outcome, PluresError):
            if not failed:  # the status is of the one that `detail` tells of
                status = 413 if isinstance(outcome, TooLarge) else 422
            failed.append({"file": picture.name, "error": str(outcome)})
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            found.append((picture.name, outcome))
    return found, failed, status


def reference(schema: dict[str, Any]) -> str:
    """Show an OpenAPI description as one page that loads nothing."""
    parts = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            bodies = about.get("requestBody", {}).get("content", {})
            fields = [
                f"<li><code>{html.escape(kind)}</code>: {html.escape(', '.join(body['schema']['properties']))}</li>"
                for kind, body in bodies.items()
            ]
            answers = [
                f"<li><code>{status}</code> {html.escape(answer['description'])}</li>"
                for status, answer in about["responses"].items()
            ]
            title = f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
            text = f"<p>{html.escape(about.get('description', ''))}</p>"
            parts.append(f"{title}{text}<ul>{''.join(fields)}</ul><h3>Answers</h3><ul>{''.join(answers)}</ul>")
    return _file("docs.html").replace("{{paths}}", "\n".join(parts))


def _file(name: str) -> str:
    return files("plures.lab.serving").joinpath(name).read_text(encoding="utf-8")


MOST_CONNECTIONS = 128
SECONDS_TO_END = 30  # that requests have to end when the server is stopped


def server_for(model: Model, host: str, port: int, limits: Limits) -> uvicorn.Server:
    """Make the server of a model, not started yet."""
    share_pools()
    config = uvicorn.Config(
        make_app(model, limits),
        host=host,
        port=port,
        http=partial(Patient, seconds=limits.read),  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    return uvicorn.Server(config)


def serve(run: Run, host: str, port: int, limits: Limits) -> None:
    """Serve a run until SIGINT or SIGTERM; requests that are under way are answered first."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise PluresError(f"host={host!r}; use the name or the address of this machine, such as 127.0.0.1") from error
    server = server_for(Model(run), host, port, limits)
    print(visible(f"http://{host}:{port} answers for {run.path}; Ctrl-C ends it"), file=sys.stderr, flush=True)
    try:
        server.run()
    except SystemExit as ended:  # uvicorn's way to say that the port is taken
        if ended.code:
            raise PluresError(
                f"cannot listen on {host}:{port}: is the port in use? choose another with --port"
            ) from None
