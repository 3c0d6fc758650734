"""Talking to a running deployment: a unix socket with one line of JSON each way, and its log files.

Owns the socket (for its user alone), the framing, and the following of a log that is rotated. What
a command means is the handler's affair (commands).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from zenlaunch.errors import LaunchError

ANSWER_BYTES = 4 << 20

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def control(path: Path, handler: Handler) -> AsyncIterator[None]:
    """Answer commands on a socket for this user alone, until the context is left.

    A ZenlaunchError of the handler is told to the caller; the message alone of any other.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            answer = await _answer(await reader.readline(), handler)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the caller is gone, or we end: there is nobody to tell
        finally:
            tasks.discard(task)
            writer.close()

    server_socket = socket.socket(socket.AF_UNIX)
    with contextlib.ExitStack() as stack:
        old_mask = os.umask(0o177)
        try:
            server_socket.bind(stack.enter_context(_reachable(path)))
        except OSError as e:
            server_socket.close()
            raise LaunchError(f"cannot make the control socket {path}: {e.strerror or e}") from e
        finally:
            os.umask(old_mask)
        server = await asyncio.start_unix_server(serve, sock=server_socket)
        try:
            yield
        finally:
            server.close()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Give an address for a socket whose path may be longer than the 107 bytes of an address."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def _answer(line: bytes, handler: Handler) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("a request is an object")
        return {"ok": True} | await handler(request)
    except LaunchError as e:
        return {"ok": False, "error": e.message, "hint": e.hint}
    except (ValueError, KeyError, RecursionError) as e:
        return {"ok": False, "error": f"cannot do that: {e}", "hint": None}
    except OSError as e:  # of our own: a limit of open files, say
        return {"ok": False, "error": f"cannot do that now: {e.strerror or e}", "hint": None}


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Send one command to a running deployment and return its answer.

    Raises LaunchError where nobody answers, or with what the other side says.
    """
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(timeout_s)
            with _reachable(path) as address:
                s.connect(address)
            s.sendall(json.dumps(request).encode() + b"\n")
            with s.makefile("rb") as lines:
                line = lines.readline(ANSWER_BYTES)
        answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError) as e:
        raise LaunchError(
            f"the deployment does not answer on {path}: {e or type(e).__name__}",
            hint="is it ending? see its logs",
        ) from e
    if not answer.get("ok"):
        raise LaunchError(str(answer.get("error")), hint=answer.get("hint"))
    return answer


def follow(path: Path, *, last: int = 50, stop: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield the last lines of a log file; with `stop`, go on with new ones until it says so.

    A file that was rotated is left for its successor.
    """
    file = _opened(path)
    successor: TextIO | None = None
    try:
        *lines, rest = file.read().split("\n")
        yield from lines[-last:]
        while stop is not None and not stop():
            chunk = file.read()
            if chunk:
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
            elif successor is not None:
                file.close()
                file, successor = successor, None
            else:
                with contextlib.suppress(OSError, LaunchError):
                    if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                        # What came between our last reading and the rotation is read first.
                        successor = _opened(path)
                        continue
                time.sleep(0.1)
    finally:
        file.close()
        if successor is not None:
            successor.close()


def _opened(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as e:
        raise LaunchError(f"cannot read {path}: {e.strerror}") from e
