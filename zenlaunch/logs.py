"""Log files of instances: rotated by size, and the lines of a stream of bytes.

Owns where a line ends, how long a file may grow, and that no secret reaches a file or a reader. A
disk that is full never stops an engine: what cannot be written is dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from zenlaunch.blot import blot

LINE_BYTES = 1 << 16
TAIL_LINES = 2000
TAIL_CHARS = 2000  # of a line that people are shown


class LogFile:
    """An appended file, moved to `.1`, `.2`, ... when it would grow beyond `most_bytes`."""

    def __init__(self, path: Path, *, most_bytes: int = 64 << 20, keep: int = 3) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self.keep = keep
        self.dropped_bytes = 0
        self._fd = -1
        self._size = 0

    def write(self, data: bytes) -> OSError | None:
        """Append; returns the error that made it drop `data`, else None."""
        try:
            if self._fd < 0:
                self._open()
            if self._size and self._size + len(data) > self.most_bytes:
                self.rotate()
            view = memoryview(data)
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
        except OSError as e:
            self.dropped_bytes += len(data)
            return e
        return None

    def rotate(self) -> None:
        """Begin a new file; raises OSError."""
        self.close()
        for number in range(self.keep, 0, -1):
            older = self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                older.replace(self._numbered(number))
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o640)
        self._size = os.fstat(self._fd).st_size


class Lines:
    """Cuts a stream into lines, keeps the last ones, and names the markers that a line holds."""

    def __init__(
        self,
        *,
        markers: Iterable[str] = (),
        secrets: tuple[bytes, ...] = (),
        tail: int = TAIL_LINES,
    ) -> None:
        self.tail: deque[str] = deque(maxlen=tail)
        self._markers = tuple((m, m.encode()) for m in dict.fromkeys(markers))
        self._secrets = secrets
        self._kept_back = max(map(len, secrets), default=1) - 1
        self._rest = b""

    def feed(
        self, data: bytes, *, found: Callable[[str, str], None] | None = None
    ) -> tuple[bytes, tuple[str, ...]]:
        """Take bytes; return the whole lines among them, as bytes for the file and as text.

        `found(marker, line)` is called for each marker in a line. A flood costs one search a chunk
        and marker, not one a line.
        """
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) > LINE_BYTES:
            # A line without an end goes out in pieces, and a secret must not be in two of them.
            data = blot(data, self._secrets)
            cut = len(data) - self._kept_back
        data, self._rest = data[:cut], data[cut:]
        if not data:
            return b"", ()
        data = blot(data, self._secrets)
        text = data.decode(errors="replace")
        lines = tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n"))
        self.tail.extend(map(short, lines[-(self.tail.maxlen or 0) :]))
        if found is not None:
            present = [m for m, raw in self._markers if raw in data]
            if present:
                for line in lines:
                    for marker in present:
                        if marker in line:
                            found(marker, line)
        return data, lines

    def flush(self) -> tuple[bytes, tuple[str, ...]]:
        """Return what was written after the last line end, as one line."""
        return self.feed(b"\n") if self._rest else (b"", ())


def short(line: str) -> str:
    """Return a line as people are shown it: the rest of a very long one is in the log file."""
    left = len(line) - TAIL_CHARS
    return line if left <= 0 else f"{line[:TAIL_CHARS]}... ({left} characters more)"
