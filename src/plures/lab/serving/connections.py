"""Connections of a server: those on which no request arrives are closed, so that they cannot use up all there are."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Patient(H11Protocol):
    """Wait a limited time for the head of a request; uvicorn itself waits for ever.

    uvicorn.Config(app, http=functools.partial(Patient, seconds=20.0))
    """

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = seconds
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait: a client may connect and say nothing."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait on while the head is not complete; its body is waited for where it is read."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._end is None:  # each byte does not begin the time anew
            self._end = self.loop.call_later(self.seconds, self._refuse)

    def _wait_no_more(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _refuse(self) -> None:
        body = json.dumps({"detail": f"no request arrived within {self.seconds:g} seconds"})
        head = ["HTTP/1.1 408 Request Timeout", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        self.transport.write("\r\n".join([*head, "Connection: close", "", body]).encode())
        self.transport.close()
