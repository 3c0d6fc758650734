"""The answer to one request as its client sees it: head, framing, body, and an honest end.

Rebuilds the head (hop-by-hop fields gone, ours added), frames the body for the client's version of
HTTP and knows whether a break would show by itself. Decides nothing: `exchange` says what to send
and when the answer is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zenlaunch.proxy.chunks import LAST_CHUNK, chunk
from zenlaunch.proxy.http1 import RequestHead, ResponseHead, field
from zenlaunch.proxy.sse import error_event

if TYPE_CHECKING:
    from zenlaunch.proxy.downstream import ClientConnection

# Long enough to get through the buffers of intermediaries that hold small pieces back.
_COMMENT = b": keep-alive" + b" " * 1024 + b"\n\n"


class Reply:
    """What has been sent of one answer.

    `begun`: a byte of the engine's body has gone out. `early`: the head went out before the engine
    sent one. `keep`: the connection goes on afterwards.
    """

    __slots__ = (
        "_chunked",
        "_client",
        "_has_length",
        "_request",
        "_request_id",
        "_write",
        "begun",
        "bytes_out",
        "early",
        "keep",
    )

    def __init__(self, client: ClientConnection, request: RequestHead, request_id: str) -> None:
        self._client = client
        self._write = client.wire.write
        self._request = request
        self._request_id = request_id.encode()
        self._chunked = False
        self._has_length = False
        self.begun = False
        self.early = False
        self.keep = request.keep_alive
        self.bytes_out = 0

    @property
    def head_sent(self) -> bool:
        """Whether the client has a head already, so that no other status can be told."""
        return self.begun or self.early

    @property
    def takes_chunks(self) -> bool:
        """Whether whole chunks may go out as they are."""
        return self.begun and self._chunked

    @property
    def shows_a_break(self) -> bool:
        """Whether closing the connection now cannot be taken for the end.

        Chunks without the last and a body shorter than its length show a break by themselves. Where
        the end of the connection is the end of the body, only a reset does.
        """
        return self._chunked or self._has_length

    def begin(
        self,
        response: ResponseHead,
        payload: bytes,
        *,
        upstream: str,
        length_bytes: int | None,
        events: bool,
    ) -> None:
        """Send the head, held until now, with the first bytes of the body in one write."""
        self.begun = True
        self.bytes_out += len(payload)
        if self.early:
            self._write(chunk(payload) if self._chunked else payload)
            return
        fields = response.down
        if self._request.method == "HEAD" or response.status in (204, 304):
            if response.length_bytes is not None and response.status != 204:
                fields += b"content-length: %d\r\n" % response.length_bytes
        elif length_bytes is not None:
            fields += b"content-length: %d\r\n" % length_bytes
            self._has_length = True
        else:
            fields += self._open_end()
            if self._chunked:
                payload = chunk(payload)
        if events:
            if field(response.fields, b"x-accel-buffering") is None:
                fields += b"x-accel-buffering: no\r\n"
            if field(response.fields, b"cache-control") is None:
                fields += b"cache-control: no-cache\r\n"
        self._write_head(fields, upstream, payload)

    def comment(self, *, upstream: str) -> None:
        """Send an event-stream comment; the first one gives up the holding of the head."""
        if self.head_sent:
            self._write(chunk(_COMMENT) if self._chunked else _COMMENT)
            return
        self.early = True
        fields = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        fields += b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" + self._open_end()
        payload = chunk(_COMMENT) if self._chunked else _COMMENT
        self._write_head(fields, upstream, payload)

    def body(self, payload: bytes) -> None:
        """Send more of the body."""
        self.bytes_out += len(payload)
        self._write(chunk(payload) if self._chunked else payload)

    def error_event(self, line: bytes, *, named: bool, torn: bool = False) -> None:
        """Send an event that tells of an error; `line` is one line of JSON."""
        event = error_event(line, named=named, torn=torn)
        self._write(chunk(event) if self._chunked else event)

    def end(self) -> None:
        """End the body."""
        if self._chunked:
            self._write(LAST_CHUNK)

    def _open_end(self) -> bytes:
        """Choose a framing for a body of unknown length; return its field line."""
        if self._request.minor == 1:
            self._chunked = True
            return b"transfer-encoding: chunked\r\n"
        self.keep = False
        return b""

    def _write_head(self, fields: bytes, upstream: str, payload: bytes) -> None:
        if self._client.draining:
            self.keep = False
        self._write(
            b"%bx-request-id: %b\r\nx-zenlaunch-upstream: %b\r\n%b\r\n%b"
            % (
                fields,
                self._request_id,
                upstream.encode(),
                b"" if self.keep else b"connection: close\r\n",
                payload,
            )
        )
