"""What a server takes from strangers, and how it says no."""

from dataclasses import dataclass

from plures.checks import number, whole_number


@dataclass(frozen=True)
class Limits:
    """Bound what requests may cost: memory, time, and how many wait."""

    bytes: int = 16 * 2**20  # of a request; what is longer is answered with 413
    pixels: int = 40_000_000  # of a picture, before it is decoded: 413
    pictures: int = 64  # of a request: 413
    queue: int = 512  # pictures that wait for the network: 503 beyond
    batch: int = 64  # pictures in the network at once
    wait: float = 0.004  # seconds that the first picture of a batch waits for others
    read: float = 20.0  # seconds that a client may take to send its request: 408

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "pictures", "queue", "batch"):
            whole_number(name, getattr(self, name))
        number("wait", self.wait, "0 seconds or more", above=-1e-9)
        number("read", self.read, "a number of seconds above 0", above=0)


class Refused(Exception):  # noqa: N818 (it is an answer)
    """End a request with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
