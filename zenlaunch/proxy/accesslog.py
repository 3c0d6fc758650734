"""The access log: one JSON object a line for every request, never a body, a key or a query.

Lines are collected and written once a second (or when there are many), so that a request pays for a
string and not for a system call. The file is opened again on SIGHUP, for logrotate.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from zenlaunch.errors import ProxyError

_FLUSH_LINES = 256
_quoted = lru_cache(maxsize=256)(json.dumps)


class AccessLog:
    """Append JSON lines to a file, or to stderr for `-`; nothing for None."""

    __slots__ = ("_fd", "_lines", "_path", "_second", "_stamp", "enabled")

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[str] = []
        self._fd = -1
        self._second = -1
        self._stamp = ""
        self.enabled = path is not None
        if self.enabled:
            self.reopen()

    def reopen(self) -> None:
        """Open the file again; raises `ProxyError`."""
        if self._path is None:
            return
        self.flush()
        if str(self._path) == "-":
            self._fd = sys.stderr.fileno()
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ProxyError(f"cannot write {self._path}: {error.strerror}") from error
        if self._fd > 2:
            os.close(self._fd)
        self._fd = fd

    def add(
        self,
        *,
        at_s: float,
        client: str,
        method: str,
        path: str,
        status: int,
        upstream: str,
        request_id: str,
        key: str | None,
        bytes_in: int,
        bytes_out: int,
        first_byte_s: float | None,
        duration_s: float,
        attempts: int,
        error: str,
    ) -> None:
        """Add one request. `at_s` is seconds since the epoch, `status` 499: the client left."""
        first = "null" if first_byte_s is None else f"{first_byte_s:.6f}"
        second = int(at_s)
        if second != self._second:
            self._second = second
            self._stamp = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        # Only `path` is the client's own text; everything else is checked or ours.
        self._lines.append(
            f'{{"time":"{self._stamp}{int((at_s - second) * 1000):03d}Z","client":"{client}",'
            f'"method":"{method}","path":{_quoted(path)},"status":{status},"upstream":"{upstream}",'
            f'"request_id":"{request_id}","key":"{key or ""}","bytes_in":{bytes_in},'
            f'"bytes_out":{bytes_out},"first_byte_s":{first},"duration_s":{duration_s:.6f},'
            f'"attempts":{attempts},"error":"{error}"}}\n'
        )
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what has collected; a full disk loses lines, never requests."""
        if not self._lines or self._fd < 0:
            return
        data = "".join(self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            return

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        if self._fd > 2:
            os.close(self._fd)
        self._fd = -1
