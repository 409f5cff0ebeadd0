"""A finished run behind HTTP. Here are the limits of requests, which need no server to be read."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from plures.lab.fields import check_fields

AtLeastOne = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Limits:
    """Limit the memory, the time and the number of waiting images that requests may cost."""

    max_bytes: AtLeastOne = 16 * 2**20  # Refuse longer requests (413).
    max_images: AtLeastOne = 64  # Refuse requests with more images (413).
    queue: AtLeastOne = 512  # Refuse requests while this many images are waiting (503).
    batch: AtLeastOne = 64  # Predict at most this many images at once.
    wait: Annotated[float, Meta(ge=0, le=1e9)] = 0.004  # Seconds that an image waits for others to fill its batch.
    read: Annotated[float, Meta(gt=0, le=1e9)] = 20.0  # Seconds that a client may take to send its request (408).

    def __post_init__(self) -> None:
        check_fields(self, Limits)
