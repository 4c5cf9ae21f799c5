"""Connections: how many there may be, and how long one may take to ask. uvicorn has settings for neither."""

import asyncio
import contextlib
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
"""Beyond it, the connection that has waited longest without a request makes room for the new one."""

HEAD_S = 10.0
"""Seconds in which the head of a request must arrive, from the first byte or, on a new connection, from its beginning."""

KEEP_ALIVE_S = 60
"""Seconds that a connection is kept after an answer."""

SMALL_CHUNKS, CHUNK_BYTES = 1000, 64
"""Chunks that a body may have, however small, beside one for every so many bytes: each costs the event loop as much as 64 kB."""

DROP = "topd.drop"
"""Extension of an ASGI scope: closes the connection at once."""


class _Http(h11.Connection):
    """h11's, which also refuses bodies in very small chunks."""

    _spare = 0.0
    """Chunks that this body may still have."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._spare = SMALL_CHUNKS
        elif isinstance(event, h11.Data):
            self._spare += len(event.data) / CHUNK_BYTES - event.chunk_start
            if self._spare < 0:
                raise h11.RemoteProtocolError("the chunks are too small")
        return event


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, with these limits."""

    _head: asyncio.TimerHandle | None = None
    _since = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Http(h11.SERVER)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: no request is there, or its body has not arrived."""
        return self.is_idle or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, Connection) and one.waits]
            min(waiting, key=lambda one: one._since).drop()

    def data_received(self, data: bytes) -> None:
        if self.is_idle and self._head is None:
            self._wait_for_head()
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()

    def handle_events(self) -> None:
        super().handle_events()
        if not self.is_idle:  # the application has not begun with the request yet
            self.scope["extensions"] = {**self.scope.get("extensions", {}), DROP: {"call": self.drop}}

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Unlike uvicorn's, does not wait for what is left of an answer to be read."""
        self.drop()

    def send_400_response(self, msg: str) -> None:
        """Unlike uvicorn's, does not fail where an answer has begun, and lets none begin afterwards."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once, and count no longer. What the client has not read is thrown away, by the system too."""
        self.connections.discard(self)
        if self.cycle is not None:
            self.cycle.disconnected = True
        with contextlib.suppress(OSError):  # closed already
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _wait_for_head(self) -> None:
        self._since = self.loop.time()
        self._head = self.loop.call_later(HEAD_S, self.drop)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
