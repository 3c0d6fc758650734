"""Chunked bodies: taking the framing off, putting it on, and telling when it may stay as it is.

RFC 9112 7.1, read strictly. Chunk extensions and trailers are checked and dropped; payload is never
changed. Knows nothing of heads or connections.
"""

from __future__ import annotations

import re

from zenlaunch.proxy.http1 import FIELD_LINE, BadMessage

MAX_CHUNK_LINE_BYTES = 1_024
MAX_TRAILER_BYTES = 16_384

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")


def chunk(payload: bytes) -> bytes:
    """Frame a payload as one chunk; an empty one gives nothing, since it would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


LAST_CHUNK = b"0\r\n\r\n"

_known_sizes: dict[bytes, int] = {}


def are_whole_events(data: bytes) -> bool:
    """Tell whether `data` is exactly whole chunks, each of whole events, without extensions.

    Such data may be relayed as it is: after it a chunk of our own can follow at any time.
    """
    at, size = 0, len(data)
    while at < size:
        end = data.find(b"\r\n", at, at + 10)
        line = data[at:end]
        length = _known_sizes.get(line)
        if length is None:
            length = _learn_size(line) if end > at else 0
        if not length:
            return False
        at = end + length + 4
        if data[at - 4 : at] != b"\n\n\r\n":
            return False
    return size > 0


def _learn_size(line: bytes) -> int:
    """Return the size that a plain size line says, 0 if it is none, and know it next time."""
    match = _CHUNK_LINE.fullmatch(line)
    if match is None or match[1] != line:
        return 0
    length = int(line, 16)
    if len(_known_sizes) < 16_384:
        _known_sizes[line] = length
    return length


class ChunkDecoder:
    """Take chunk framing off a body, in any pieces it arrives in.

    Chunk extensions and trailers are checked and dropped. `done` is set at the end of the message.
    """

    __slots__ = ("_left", "_rest", "_trailer_bytes", "done", "in_trailer")

    def __init__(self) -> None:
        self._left = -1  # of the chunk at hand and its CRLF; -1: a size line is next
        self._rest = b""
        self._trailer_bytes = 0
        self.in_trailer = False
        self.done = False

    @property
    def at_boundary(self) -> bool:
        """Whether the next byte begins a chunk."""
        return self._left == -1 and not self._rest and not self.in_trailer

    def feed(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Return the payload in `data`, and what follows the end of the message.

        Raises `BadMessage` at framing that is not exactly chunked.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        payload: list[bytes] = []
        pos, size = 0, len(data)
        while pos < size:
            if self.in_trailer:
                end = data.find(b"\r\n", pos)
                if end < 0:
                    self._keep(data[pos:], MAX_TRAILER_BYTES - self._trailer_bytes)
                    break
                line = data[pos:end]
                pos = end + 2
                if not line:
                    self.done = True
                    break
                self._trailer_bytes += len(line)
                if self._trailer_bytes > MAX_TRAILER_BYTES or FIELD_LINE.fullmatch(line) is None:
                    raise BadMessage("malformed trailer")
            elif self._left < 0:
                end = data.find(b"\r\n", pos, pos + MAX_CHUNK_LINE_BYTES)
                if end < 0:
                    self._keep(data[pos:], MAX_CHUNK_LINE_BYTES)
                    break
                match = _CHUNK_LINE.fullmatch(data, pos, end)
                if match is None:
                    raise BadMessage("malformed chunk size")
                pos = end + 2
                length = int(match[1], 16)
                if length:
                    self._left = length + 2
                else:
                    self.in_trailer = True
            else:
                pos = self._take(data, pos, payload)
        return payload, data[pos:] if self.done else b""

    def _take(self, data: bytes, pos: int, payload: list[bytes]) -> int:
        """Move past payload and the CRLF that closes it; `_left` counts both."""
        if self._left > 2:
            piece = data[pos : pos + self._left - 2]
            payload.append(piece)
            self._left -= len(piece)
            return pos + len(piece)
        if data[pos] != b"\n\r"[self._left - 1]:
            raise BadMessage("a chunk is longer than its size")
        self._left -= 1
        if self._left == 0:
            self._left = -1
        return pos + 1

    def _keep(self, rest: bytes, limit: int) -> None:
        if len(rest) > limit or b"\n" in rest or b"\r" in rest[:-1]:
            raise BadMessage("malformed chunk size or trailer")
        self._rest = rest
