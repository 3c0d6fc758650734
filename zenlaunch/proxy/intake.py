"""One request as it comes in: who asks, what for, and its body, counted against the budget.

Takes framing off bodies and bounds them; what is counted is what has arrived, so that a client that
only announces much takes no room. Reads no socket and writes nothing: a refusal is a value, and
`downstream` tells it. `exchange` keeps the request until its body will not be sent again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from zenlaunch.proxy.chunks import ChunkDecoder
from zenlaunch.proxy.gate import Refusal, examine
from zenlaunch.proxy.http1 import RequestHead
from zenlaunch.proxy.routes import resolve

if TYPE_CHECKING:
    from zenlaunch.proxy.hub import Hub


class Request:
    """A request whose head is there; `whole` once its body is too.

    `refusal` is set when it is not let in, whatever its body.
    """

    __slots__ = (
        "_decoder",
        "_hub",
        "_left",
        "_reserved",
        "body",
        "body_bytes",
        "head",
        "id",
        "key_name",
        "refusal",
        "resolution",
    )

    def __init__(self, hub: Hub, head: RequestHead, *, private: bool) -> None:
        self._hub = hub
        self.head = head
        self.id = head.request_id or hub.new_id()
        self.resolution = resolve(head.method, head.target)
        self.refusal, self.key_name = examine(
            head, self.resolution, private=private, keys=hub.keys, admin_keys=hub.admin_keys
        )
        self.body: bytes | bytearray = b""
        self.body_bytes = 0
        self._reserved = 0
        self._left = head.length_bytes or 0
        self._decoder = ChunkDecoder() if head.chunked else None

    @property
    def whole(self) -> bool:
        """Whether all of the body has been cut off what came."""
        return self._left == 0 if self._decoder is None else self._decoder.done

    def cut(self, data: bytes) -> tuple[bytes, bytes, int]:
        """Return body bytes without framing, what follows the body, and how much work it was.

        Raises `BadMessage`.
        """
        if self._decoder is not None:
            pieces, tail = self._decoder.feed(data)
            return b"".join(pieces), tail, 1 + len(pieces) // 32
        tail = data[self._left :]
        payload = data[: self._left] if tail else data
        self._left -= len(payload)
        return payload, tail, 1

    def too_much(self, size_bytes: int) -> Refusal | None:
        """Return why a body may not grow to this size, if it may not."""
        options = self._hub.options
        if size_bytes > options.max_body_bytes:
            limit = options.max_body_bytes
            return Refusal(
                status=413,
                code="body_too_large",
                message=f"the body is larger than {limit} bytes",
            )
        if self._hub.body_bytes + size_bytes - self._reserved > options.body_budget_bytes:
            return Refusal(
                status=503,
                code="body_budget",
                message="too many large requests at once",
                fields=b"retry-after: 2\r\n",
            )
        return None

    def keep(self, payload: bytes) -> None:
        """Add to the body: one buffer, since a list of tiny pieces takes many times their size."""
        size = len(payload)
        self.body_bytes += size
        self._reserved += size
        self._hub.body_bytes += size
        if not self.body:
            self.body = payload
            return
        if isinstance(self.body, bytes):
            self.body = bytearray(self.body)
        self.body += payload

    def wants_stream(self) -> bool:
        """Tell whether it asks for an event stream; large ones are not looked into."""
        if self.body_bytes > 262_144:
            return False
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and value.get("stream") is True

    def drop(self) -> None:
        """Forget the body, which takes no room any more."""
        self._hub.body_bytes -= self._reserved
        self._reserved = 0
        self.body = b""
