"""What the proxy itself says to a client: OpenAI-shaped error bodies and the heads of own answers.

Every answer made here carries `x-zenlaunch-source: proxy`, so that an operator can tell the proxy's
words from an engine's. Bytes out, nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
REASONS[413] = b"Content Too Large"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = b"application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the proxy's own; `fields` is whole header lines."""

    status: int
    body: bytes
    content_type: bytes = JSON
    fields: bytes = b""


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(status: int, code: str, message: str) -> bytes:
    """Return an error as OpenAI's API spells it: one line of JSON."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, ensure_ascii=False).encode()


def one_line(body: bytes, status: int) -> bytes:
    """Return a JSON body as one line, or an error of our own when it is something else."""
    try:
        return json.dumps(json.loads(body)).encode()
    except (ValueError, RecursionError):
        message = f"the instance said {status}, and no events"
        return error_body(status if status >= 400 else 502, "upstream_error", message)


def own_head(
    status: int,
    *,
    length_bytes: int,
    content_type: bytes = JSON,
    request_id: bytes,
    date: bytes,
    keep_alive: bool,
    extra: bytes = b"",
) -> bytes:
    """Return the head of an answer that the proxy makes; `extra` is whole field lines."""
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\ndate: %b\r\n"
        b"x-request-id: %b\r\nx-zenlaunch-source: proxy\r\n%b%b\r\n"
        % (
            status,
            REASONS.get(status, b"Unknown"),
            content_type,
            length_bytes,
            date,
            request_id,
            extra,
            b"" if keep_alive else b"connection: close\r\n",
        )
    )
