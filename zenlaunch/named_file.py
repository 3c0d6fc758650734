"""Reading a file that the user named: bounded in size, and never waiting for ever.

A pipe that somebody writes to (process substitution, standard input) is read to its end; one that
nobody has opened is an error after a moment instead of a hang.
"""

from __future__ import annotations

import os
import select
import stat
import sys

LIMIT_BYTES = 64 << 20
PATIENCE_S = 5.0


def read_named_file(name: str) -> str:
    """Return the text of a file ("-": standard input).

    Raises OSError with a reason for people in `strerror`.
    """
    if name == "-":
        return _bounded(sys.stdin.fileno(), wait=False)
    # Without O_NONBLOCK the open itself would wait for a writer.
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, "Is a directory")
        os.set_blocking(fd, True)
        return _bounded(fd, wait=stat.S_ISFIFO(mode))
    finally:
        os.close(fd)


def _bounded(fd: int, *, wait: bool) -> str:
    if wait and not select.select([fd], [], [], PATIENCE_S)[0]:
        raise TimeoutError(110, "nobody writes to this pipe")
    parts: list[bytes] = []
    size = 0
    while chunk := os.read(fd, 1 << 20):
        parts.append(chunk)
        size += len(chunk)
        if size > LIMIT_BYTES:
            raise OSError(27, f"larger than {LIMIT_BYTES >> 20} MiB")
    data = b"".join(parts)
    if data.startswith(b"\x1f\x8b"):
        raise OSError(
            22, "packed: unpack it first (of `probe --save`: tar -xzf FILE -C DIR, --sysroot DIR)"
        )
    return data.decode(errors="replace")
