"""HTTP/1.1 heads as the proxy speaks them: bytes in, checked values out.

Owns what is malformed and therefore refused (RFC 9112, read strictly: whatever two parsers could
read in two ways is an error), which header fields go no further than one hop, and how a body is
framed. Does no IO and keeps no connection: `downstream` and `upstream` feed it; chunks are taken
apart in `chunks`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

MAX_HEAD_BYTES = 65_536
MAX_FIELDS = 128
MAX_REQUEST_LINE_BYTES = 16_384

_TCHAR = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_REQUEST_LINE = re.compile(rb"(" + _TCHAR + rb"+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
FIELD_LINE = re.compile(_TCHAR + rb"+:" + _VALUE)
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_DIGITS = re.compile(rb"[0-9]{1,15}")
_TOKEN = re.compile(_TCHAR + rb"*")

# Fields of one hop: never forwarded, in either direction (RFC 9110 7.6.1, and their old relatives).
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
# Rebuilt by the proxy, or not the client's to say.
_NOT_FORWARDED_UP = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-data-parallel-rank",
    b"x-request-id",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-real-ip",
    b"forwarded",
}
_NOT_FORWARDED_DOWN = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_FRAMING = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"}
)


class Field(NamedTuple):
    """One header field: lower-case name, value, and the whole line as it travels on.

    `up` and `down` are empty where the field ends here. `framing` fields say how to read the
    message.
    """

    name: bytes
    value: bytes
    up: bytes
    down: bytes
    framing: bool


Fields = tuple[Field, ...]

# The same heads and lines come again with every request of a client and every answer of an engine:
# parsing and checking them once is most of what a small request saves. Long ones are not kept.
_KEPT_LINE_BYTES = 512
_KEPT_HEAD_BYTES = 2048


class BadMessage(Exception):
    """A message that is malformed or ambiguous; `status` answers it where it is a request."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


# One of these is made for each message: a NamedTuple costs a fifth of a frozen dataclass.
class RequestHead(NamedTuple):
    """A request's head, checked; `fields` have lower-case names, `one_hop` are those that end here.

    `length_bytes` is None without Content-Length; `chunked` excludes it.
    """

    method: str
    target: bytes
    minor: int
    fields: Fields
    host: bytes
    length_bytes: int | None
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    upgrade: bytes
    one_hop: frozenset[bytes]
    up: bytes  # the lines that travel on
    up_keyless: bytes  # the same without the client's API key
    key: bytes  # that key, empty if there is none
    request_id: str  # the client's own, empty if it gave none that is fit to be passed on


class ResponseHead(NamedTuple):
    """A response's head, checked; framing as in `RequestHead`, both absent: until the close."""

    status: int
    reason: bytes
    minor: int
    fields: Fields
    length_bytes: int | None
    chunked: bool
    keep_alive: bool
    one_hop: frozenset[bytes]
    content_type: bytes  # lower case
    down: bytes  # the status line and the lines that travel on


KEY_FIELDS = frozenset({b"authorization", b"x-api-key"})
_USUAL = HOP_BY_HOP | {b"close"}
_NO_NAMES: frozenset[bytes] = frozenset()


def problem_of_partial_head(data: bytes) -> BadMessage | None:
    """Return what is already wrong with a request head whose end has not arrived, if anything.

    Without this a client that speaks something else (TLS, bare line feeds) would wait for the
    header timeout instead of being told.
    """
    if len(data) > MAX_HEAD_BYTES:
        return BadMessage("the request head is larger than 64 KiB", status=431)
    line_end = data.find(b"\r\n")
    if line_end < 0 and len(data) > MAX_REQUEST_LINE_BYTES:
        return BadMessage("the request line is longer than 16 KiB", status=414)
    if data and re.match(_TCHAR, data) is None:
        return BadMessage("this is not an HTTP request (is the client speaking TLS?)")
    if b"\0" in data:
        return BadMessage("NUL in the request head")
    if data.count(b"\n") != data.count(b"\r\n"):
        return BadMessage("a line of the request head ends with a bare LF")
    if data.count(b"\r") - data.endswith(b"\r") != data.count(b"\r\n"):
        return BadMessage("bare CR in the request head")
    return None


def parse_request_head(head: bytes) -> RequestHead:
    """Parse a request head without its closing empty line.

    Raises `BadMessage` with the status to answer (400, 414, 417, 431, 505).
    """
    return _known_request(head) if len(head) <= _KEPT_HEAD_BYTES else _parse_request(head)


def parse_response_head(head: bytes) -> ResponseHead:
    """Parse a response head without its closing empty line; raises `BadMessage`."""
    return _known_response(head) if len(head) <= _KEPT_HEAD_BYTES else _parse_response(head)


def _parse_request(head: bytes) -> RequestHead:
    line, _, block = head.partition(b"\r\n")
    known = len(line) <= _KEPT_LINE_BYTES
    method, target, minor = _known_request_line(line) if known else _request_line(line)
    fields = _parse_fields(block)
    hosts: list[bytes] = []
    length: bytes | None = None
    coding = connection = expect = upgrade = b""
    for name, value, _, _, _ in [one for one in fields if one[4]]:
        if name == b"host":
            hosts.append(value)
        elif name == b"content-length":
            if length is not None:
                raise BadMessage("more than one Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if coding:
                raise BadMessage("more than one Transfer-Encoding")
            coding = value.lower() or b"?"
        elif name == b"connection":
            connection = connection + b"," + value.lower() if connection else value.lower()
        elif name == b"expect":
            expect = expect + b"," + value.lower() if expect else value.lower()
        else:
            upgrade = value.lower()
    if len(hosts) != 1 and (hosts or minor):
        raise BadMessage("an HTTP/1.1 request needs exactly one Host")
    host = hosts[0] if hosts else b""
    if _HOST.fullmatch(host) is None:
        raise BadMessage("malformed Host")
    length_bytes = _framing(length, coding, minor=minor)
    if expect and expect != b"100-continue":
        raise BadMessage("the only expectation known is 100-continue", status=417)
    one_hop = _tokens(connection) if connection else _NO_NAMES
    # The usual tokens name no field that would travel anyway.
    travelling = fields if one_hop <= _USUAL else [f for f in fields if f[0] not in one_hop]
    return RequestHead(
        method,
        target,
        minor,
        fields,
        host,
        length_bytes,
        bool(coding),
        minor == 1 and b"close" not in one_hop,
        bool(expect) and minor == 1,
        upgrade,
        one_hop,
        b"".join([one[2] for one in travelling]),
        b"".join([one[2] for one in travelling if one[0] not in KEY_FIELDS]),
        _key(fields),
        _request_id(fields),
    )


def _key(fields: Fields) -> bytes:
    """Return the key of `Authorization: Bearer` (OpenAI) or `x-api-key` (Anthropic)."""
    value = field(fields, b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return field(fields, b"x-api-key") or b""


def _request_id(fields: Fields) -> str:
    given = field(fields, b"x-request-id")
    return given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else ""


def _parse_response(head: bytes) -> ResponseHead:
    line, _, block = head.partition(b"\r\n")
    known = len(line) <= _KEPT_LINE_BYTES
    status, reason, minor = _known_status_line(line) if known else _status_line(line)
    fields = _parse_fields(block)
    length: bytes | None = None
    coding = connection = b""
    for name, value, _, _, _ in [one for one in fields if one[4]]:
        if name == b"content-length":
            if length is not None:
                raise BadMessage("more than one Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if coding:
                raise BadMessage("more than one Transfer-Encoding")
            coding = value.lower() or b"?"
        elif name == b"connection":
            connection = connection + b"," + value.lower() if connection else value.lower()
    length_bytes = _framing(length, coding, minor=minor)
    one_hop = _tokens(connection) if connection else _NO_NAMES
    keep_alive = b"close" not in one_hop and (minor == 1 or b"keep-alive" in one_hop)
    return ResponseHead(
        status,
        reason,
        minor,
        fields,
        length_bytes,
        bool(coding),
        keep_alive,
        one_hop,
        (field(fields, b"content-type") or b"").lower(),
        b"HTTP/1.1 %d %b\r\n%b"
        % (status, reason, b"".join([one[3] for one in fields if one[0] not in one_hop])),
    )


def _parse_fields(block: bytes) -> Fields:
    if not block:
        return ()
    parse = _known_field if len(block) <= _KEPT_HEAD_BYTES else _field
    fields = tuple(map(parse, block.split(b"\r\n")))
    if len(fields) > MAX_FIELDS:
        raise BadMessage(f"more than {MAX_FIELDS} header fields", status=431)
    return fields


def _field(line: bytes) -> Field:
    if FIELD_LINE.fullmatch(line) is None:
        raise BadMessage(_why_malformed(line))
    name, _, value = line.partition(b":")
    name, value = name.lower(), value.strip(b" \t")
    travels = b"%b: %b\r\n" % (name, value) if not name.startswith(b"x-zenlaunch-") else b""
    up = travels if name not in _NOT_FORWARDED_UP else b""
    down = travels if name not in _NOT_FORWARDED_DOWN else b""
    return Field(name, value, up, down, name in _FRAMING)


def _why_malformed(line: bytes) -> str:
    if line[:1] in (b" ", b"\t"):
        return "a folded header line (obs-fold)"
    if re.match(_TCHAR + rb"+[ \t]+:", line):
        return "white space between a field name and its colon"
    if b"\n" in line or b"\r" in line:
        return "bare CR or LF in a header line"
    return "malformed header line"


def _request_line(line: bytes) -> tuple[str, bytes, int]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadMessage("malformed request line")
    if len(line) > MAX_REQUEST_LINE_BYTES:
        raise BadMessage("the request line is longer than 16 KiB", status=414)
    if match[3] != b"1":
        raise BadMessage("only HTTP/1.0 and HTTP/1.1 are spoken here", status=505)
    return match[1].decode(), match[2], 1 if match[4] != b"0" else 0


def _status_line(line: bytes) -> tuple[int, bytes, int]:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise BadMessage("malformed status line")
    return int(match[2]), match[3] or b"", int(match[1])


_known_request = lru_cache(maxsize=1024)(_parse_request)
_known_response = lru_cache(maxsize=1024)(_parse_response)
_known_field = lru_cache(maxsize=4096)(_field)
_known_request_line = lru_cache(maxsize=512)(_request_line)
_known_status_line = lru_cache(maxsize=512)(_status_line)


def _framing(length: bytes | None, coding: bytes, *, minor: int) -> int | None:
    if coding:
        if length is not None:
            raise BadMessage("both Transfer-Encoding and Content-Length")
        if coding != b"chunked":
            raise BadMessage("the only transfer coding known is chunked")
        if minor == 0:
            raise BadMessage("Transfer-Encoding in an HTTP/1.0 message")
        return None
    if length is None:
        return None
    if _DIGITS.fullmatch(length) is None:
        raise BadMessage("malformed Content-Length")
    return int(length)


@lru_cache(maxsize=256)
def _tokens(value: bytes) -> frozenset[bytes]:
    # Taken apart before it is matched: one pattern for the list would take quadratic time.
    tokens = [token.strip(b" \t") for token in value.split(b",")]
    if not all(map(_TOKEN.fullmatch, tokens)):
        raise BadMessage("malformed Connection")
    return frozenset(tokens) - {b""}


def field(fields: Fields, name: bytes) -> bytes | None:
    """Return the value of the first field called `name` (lower case), or None."""
    for one in fields:
        if one[0] == name:
            return one[1]
    return None
