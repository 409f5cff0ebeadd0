"""plures serve: an HTTP server for a finished run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from plures.checks import whole_number
from plures.errors import PluresError
from plures.lab.cli.shared import Switch


@dataclass(frozen=True)
class Serve:
    """Serve a run over HTTP, with a page for trying it.

    Examples:
      plures serve runs/birds
      plures serve runs/birds --host 0.0.0.0 --port 8080 --queue 1000
      curl -F files=@wren.jpg http://127.0.0.1:8000/predict

    Requests and responses:
      POST /predict takes images (a form with files, or JSON with base64) and
      the options abstain_below, coverage and risk. It responds in the format
      of `plures predict --json`. GET / is the page, /openapi.json describes
      the API, /health and /metrics (Prometheus) are for monitoring. Images
      of simultaneous requests are predicted together. Ctrl-C or SIGTERM stops
      the server after running requests have finished.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 opens it to the network."""
    port: Annotated[int, arg(metavar="N")] = 8000
    """The port to listen on."""
    max_bytes: Annotated[int, arg(metavar="N")] = 16 * 2**20
    """Refuse longer requests (413)."""
    max_pixels: Annotated[int, arg(metavar="N")] = 40_000_000
    """Refuse images with more pixels (413)."""
    max_images: Annotated[int, arg(metavar="N")] = 64
    """Refuse requests with more images (413)."""
    queue: Annotated[int, arg(metavar="N")] = 512
    """Refuse requests while this many images are waiting (503)."""
    batch: Annotated[int, arg(metavar="N")] = 64
    """Predict at most this many images at once."""
    wait: Annotated[float, arg(metavar="SECONDS")] = 0.004
    """How long an image waits for others to fill its batch."""
    trust_code: Switch = False
    """Import the code from outside plures that the run names as its network or method."""

    after_interrupt: ClassVar[str] = "the server has stopped"

    def __call__(self) -> int:
        """Serve until interrupted."""
        whole_number("port", self.port, least=0, most=65535)
        try:
            from plures.lab.serving.app import serve
            from plures.lab.serving.requests import Limits
        except ModuleNotFoundError as error:
            raise PluresError(f"plures serve needs {error.name}: pip install 'plures[serve]'") from error
        limits = Limits(self.max_bytes, self.max_pixels, self.max_images, self.queue, self.batch, self.wait)
        from plures.lab.runs.open import open_run

        run = open_run(self.run, trust_code=self.trust_code)
        serve(run, self.host, self.port, limits)
        return 0
