"""Run the server: what `plures serve` does."""

import sys

import uvicorn

from plures.errors import PluresError
from plures.lab.runs.open import Run
from plures.lab.serving.app import make_app
from plures.lab.serving.limits import Limits
from plures.lab.serving.model import Model

MOST_CONNECTIONS = 128
SECONDS_TO_END = 30  # that requests have to end when the server is stopped


def server_for(run: Run, host: str, port: int, limits: Limits) -> uvicorn.Server:
    """Make the server of a run, not started yet."""
    config = uvicorn.Config(
        make_app(Model(run), limits),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    return uvicorn.Server(config)


def serve(run: Run, host: str, port: int, limits: Limits) -> None:
    """Serve a run until SIGINT or SIGTERM; requests that are under way are answered first."""
    server = server_for(run, host, port, limits)
    print(f"http://{host}:{port} answers for {run.path}; Ctrl-C ends it", file=sys.stderr, flush=True)
    try:
        server.run()
    except SystemExit as ended:  # uvicorn's way to say that the port is taken
        if ended.code:
            raise PluresError(f"cannot listen on {host}:{port}: is the port taken? name another with --port") from None
