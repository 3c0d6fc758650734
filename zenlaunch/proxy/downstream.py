"""The client's side: one connection, its requests one after the other, and who may ask what.

Frames and checks requests, takes their bodies in (bounded), refuses what must be refused before
any engine hears of it, and notices a client that leaves. A waiting client's socket is read all the
time: pausing it would hide both its FIN and its reset. What happens to an accepted request is
`exchange`'s; the proxy's own routes are `admin`'s.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import socket
import struct
import sys
import termios
from enum import IntEnum
from typing import TYPE_CHECKING, cast

from zenlaunch.config import HalfClose
from zenlaunch.proxy.answers import CONTINUE, JSON, Answer, error_body, own_head
from zenlaunch.proxy.chunks import ChunkDecoder
from zenlaunch.proxy.exchange import Exchange
from zenlaunch.proxy.gate import examine
from zenlaunch.proxy.http1 import (
    BadMessage,
    RequestHead,
    field,
    parse_request_head,
    problem_of_partial_head,
)
from zenlaunch.proxy.metrics import bump
from zenlaunch.proxy.routes import Action, Resolution, resolve
from zenlaunch.proxy.trust import forwarded_fields

if TYPE_CHECKING:
    from zenlaunch.proxy.admin import Admin
    from zenlaunch.proxy.hub import Hub

log = logging.getLogger("zenlaunch.proxy")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_LINGER_S = 5.0
_READ_BYTES = 2**20  # more than one read of the event loop brings
_TCP_CLOSE = 7  # include/net/tcp_states.h
_WORK_AT_ONCE = 64
_SLICE_BYTES = 16_384
_RESET = struct.pack("ii", 1, 0)


class _At(IntEnum):
    HEAD = 0
    LENGTH = 1
    CHUNKS = 2
    ANSWER = 3
    LINGER = 4
    CLOSED = 5


class ClientConnection(asyncio.Protocol):
    """One client's connection; `private` ones come through the admin socket."""

    __slots__ = (
        "_admin",
        "_advancing",
        "_at",
        "_behind",
        "_body",
        "_body_bytes",
        "_buffer",
        "_continued",
        "_deadline",
        "_decoder",
        "_exchange",
        "_fd",
        "_finished_reading",
        "_forwarded",
        "_head",
        "_hub",
        "_key_name",
        "_left",
        "_own",
        "_paused_at",
        "_private",
        "_request_id",
        "_reserved",
        "_resolution",
        "_stalled_bytes",
        "_yielded",
        "paused",
        "peer",
        "transport",
        "trusted",
    )
    transport: asyncio.Transport

    def __init__(self, hub: Hub, admin: Admin, *, private: bool) -> None:
        self._hub = hub
        self._admin = admin
        self._private = private
        self._at = _At.HEAD
        self._buffer = b""
        self._head: RequestHead | None = None
        self._resolution: Resolution | None = None
        self._request_id = ""
        self._key_name: str | None = None
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._reserved = 0
        self._left = 0
        self._decoder: ChunkDecoder | None = None
        self._exchange: Exchange | None = None
        self._own: asyncio.Task[None] | None = None
        self._advancing = False
        self._finished_reading = False
        self._yielded = False
        self._continued = 0.0
        self._deadline = hub.now() + hub.options.head_timeout_s
        self._paused_at = 0.0
        self._stalled_bytes = 0
        self._forwarded: tuple[bytes, bytes] | None = None
        self._fd = -1
        self._behind = False
        self.paused = False
        self.peer = "local"
        self.trusted = False

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        hub = self._hub
        self._fd = transport.get_extra_info("socket").fileno()
        if not self._private:
            self._watch_peer()
            peername = transport.get_extra_info("peername")
            if isinstance(peername, tuple):
                self.peer = str(peername[0])
            self.trusted = hub.peers.trusts(self.peer)
        if len(hub.clients) >= hub.max_connections and not self._private:
            self._request_id = hub.new_id()
            self._at = _At.CLOSED
            body = error_body(503, "too_many_connections", "too many connections")
            self.write_own(503, body, keep_alive=False, extra=b"retry-after: 1\r\n")
            self.transport.close()
            return
        hub.clients.add(self)

    def _watch_peer(self) -> None:
        """Let the kernel find out that a client's machine is gone, which sends no FIN."""
        sock = self.transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def connection_lost(self, exc: Exception | None) -> None:
        self._at = _At.CLOSED
        self._hub.clients.discard(self)
        self._leave()

    def eof_received(self) -> bool | None:
        self._finished_reading = True
        if self._at is _At.ANSWER:
            # What the proxy answers itself costs nothing: it is answered in any case.
            if self._own is not None or self._hub.options.half_close is HalfClose.ANSWER:
                return True
            self._leave()
        self._at = _At.CLOSED
        return None

    def _leave(self) -> None:
        """Give up what was under way for this client."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
        own, self._own = self._own, None
        if own is not None:
            own.cancel()
        self._drop_body()

    @property
    def draining(self) -> bool:
        """Whether the proxy is stopping, so that no connection goes on."""
        return self._hub.draining

    def forwarded(self, head: RequestHead) -> bytes:
        """Return the X-Forwarded-* lines for a request of this client."""
        if self.trusted:
            return forwarded_fields(head, peer=self.peer, trusted=True)
        if self._forwarded is None or self._forwarded[0] != head.host:
            lines = forwarded_fields(head, peer=self.peer, trusted=False)
            self._forwarded = (head.host, lines)
        return self._forwarded[1]

    def write(self, data: bytes) -> None:
        """Write to the client: at once what its socket takes, the rest through the transport.

        Most of the proxy's life is here, and one system call is cheaper than the transport's queue.
        The transport finds out what is broken. A descriptor may be another's as soon as the
        transport is closing.
        """
        transport = self.transport
        if self._behind:
            if transport.get_write_buffer_size():
                transport.write(data)
                return
            self._behind = False
        if transport.is_closing():
            return
        try:
            sent = os.write(self._fd, data)
        except OSError:
            sent = 0
        if sent != len(data):
            self._behind = True
            transport.write(data[sent:])

    def pause_writing(self) -> None:
        self.paused = True
        self._paused_at = self._hub.now()
        self._stalled_bytes = self.transport.get_write_buffer_size()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._exchange is not None:
            self._exchange.resume()

    def close_when_idle(self) -> None:
        """Close now if no request is under way; else after its answer (the proxy is draining)."""
        if self._at is _At.HEAD and not self._buffer:
            self._close()

    def cut(self) -> None:
        """End what is under way, honestly, and close."""
        if self._exchange is not None:
            self._exchange.cut()
        else:
            self._close()

    def _close(self) -> None:
        self._at = _At.CLOSED
        self.transport.close()

    def check(self, now: float) -> None:
        """Look at the deadlines: idle, slow head, slow body, a client that does not read."""
        at = self._at
        if self.transport.get_write_buffer_size():
            self._check_stall(now)
            return
        self._paused_at = 0.0
        if at in (_At.CLOSED, _At.LINGER):
            if now >= self._deadline:
                self.transport.abort()
        elif at is _At.HEAD:
            if now >= self._deadline:
                if self._buffer:
                    self._refuse(408, "head_timeout", "the request head took too long")
                else:
                    self._close()
        elif at is _At.ANSWER:
            # After its FIN a socket is not read any more, so a reset shows here only.
            if self._finished_reading and self._is_reset():
                self._leave()
                self.transport.abort()
        elif at in (_At.LENGTH, _At.CHUNKS) and now >= self._deadline + (
            self._body_bytes / self._hub.options.body_min_rate
        ):
            self._refuse(408, "body_timeout", "the request body came too slowly")

    def _is_reset(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        if sock is None or sock.family == socket.AF_UNIX:
            return False
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)

    def _check_stall(self, now: float) -> None:
        """Let go of a client that has taken nothing for long, however slowly others read.

        What its kernel has not acknowledged counts too: the socket buffer may be so large that
        a slow reader leaves ours untouched for many minutes.
        """
        left = self.transport.get_write_buffer_size() + self._unacknowledged_bytes()
        if left != self._stalled_bytes or self._paused_at == 0.0:
            self._stalled_bytes = left
            self._paused_at = now
        elif now - self._paused_at >= self._hub.options.client_stall_s:
            self._leave()
            self.transport.abort()

    def _unacknowledged_bytes(self) -> int:
        try:
            packed = fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return 0
        return int.from_bytes(packed, sys.byteorder)

    # -- requests

    def data_received(self, data: bytes) -> None:
        at = self._at
        if at >= _At.ANSWER:
            if at is not _At.ANSWER:
                return
            # A pipelined request: kept for its turn, within bounds.
            self._buffer += data
            if len(self._buffer) > self._hub.options.max_pipelined_bytes:
                self._leave()
                self._at = _At.CLOSED
                self.transport.abort()
            return
        if at is _At.HEAD and not self._buffer:
            self._deadline = self._hub.now() + self._hub.options.head_timeout_s
        self._buffer = self._buffer + data if self._buffer else data
        if len(self._buffer) > self._hub.options.max_pipelined_bytes + _READ_BYTES:
            self.transport.abort()
            return
        self._advance()

    def _advance(self) -> None:
        """Take as much of the buffer as can be taken now."""
        if self._advancing:
            return
        self._advancing = True
        try:
            work = 0
            while self._at < _At.ANSWER and self._buffer:
                step = self._step()
                if step == 0:
                    break
                work += step
                if work > _WORK_AT_ONCE and not self._yielded:
                    # Thousands of tiny requests or chunks must not hold up everybody else. Nobody
                    # waits for an answer here, so not reading hides nothing.
                    self._yielded = True
                    self.transport.pause_reading()
                    self._hub.loop.call_soon(self._go_on)
                    break
        except BadMessage as problem:
            self._refuse(problem.status, "bad_request", problem.message)
        finally:
            self._advancing = False

    def _go_on(self) -> None:
        self._yielded = False
        if not self.transport.is_closing():
            self._advance()
        if not self._yielded and not self.transport.is_closing():
            self.transport.resume_reading()

    def _step(self) -> int:
        """Take one step; return how much work it was, 0 when more bytes are needed."""
        if self._at is _At.HEAD:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0 or end > 65_536:
                problem = problem_of_partial_head(self._buffer)
                if problem is not None:
                    raise problem
                return 0
            raw, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._head = None
            self._request_id = ""
            self._take_head(parse_request_head(raw))
            return 1
        work = 1
        if self._at is _At.LENGTH:
            data, self._buffer = self._buffer, b""
            tail = data[self._left :]
            payload = data[: self._left] if tail else data
            self._left -= len(payload)
            whole = self._left == 0
        else:
            assert self._decoder is not None
            data, self._buffer = self._buffer[:_SLICE_BYTES], self._buffer[_SLICE_BYTES:]
            pieces, tail = self._decoder.feed(data)
            work += len(pieces) // 32
            payload = b"".join(pieces)
            whole = self._decoder.done
        if not self._fits(self._body_bytes + len(payload)):
            return work
        self._keep_body(payload)
        if whole:
            self._buffer = tail + self._buffer if self._buffer else tail
            self._dispatch()
        return work

    def _take_head(self, head: RequestHead) -> None:
        hub = self._hub
        self._head = head
        given = field(head.fields, b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            self._request_id = given.decode()
        else:
            self._request_id = hub.new_id()
        resolution = self._resolution = resolve(head.method, head.target)
        refusal, self._key_name = examine(
            head, resolution, private=self._private, keys=hub.keys, admin_keys=hub.admin_keys
        )
        if refusal is not None:
            self._refuse(refusal.status, refusal.code, refusal.message, extra=refusal.fields)
            return
        self._body = b""
        self._body_bytes = 0
        size_bytes = head.length_bytes or 0
        if not self._fits(size_bytes):
            return
        if not head.chunked and size_bytes <= len(self._buffer):
            if size_bytes:
                body, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
                self._keep_body(body)
            self._dispatch()
            return
        self._deadline = hub.now() + hub.options.body_grace_s
        if head.chunked:
            self._decoder = ChunkDecoder()
            self._at = _At.CHUNKS
        else:
            self._left = size_bytes
            self._at = _At.LENGTH
        if head.expects_continue and not self._buffer:
            self.write(CONTINUE)

    def _fits(self, size_bytes: int) -> bool:
        """Tell whether a body of this size may come; False when the request was refused.

        What is counted is what has arrived: a client that only announces much takes no room.
        """
        options = self._hub.options
        if size_bytes > options.max_body_bytes:
            limit = options.max_body_bytes
            self._refuse(413, "body_too_large", f"the body is larger than {limit} bytes")
            return False
        more = size_bytes - self._reserved
        if self._hub.body_bytes + more > options.body_budget_bytes:
            message = "too many large requests at once"
            self._refuse(503, "body_budget", message, extra=b"retry-after: 2\r\n")
            return False
        return True

    def _keep_body(self, payload: bytes) -> None:
        """Add to the body: one buffer, since a list of tiny pieces takes many times their size."""
        size = len(payload)
        self._body_bytes += size
        self._reserved += size
        self._hub.body_bytes += size
        if not self._body:
            self._body = payload
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += payload

    def _drop_body(self) -> None:
        self._hub.body_bytes -= self._reserved
        self._reserved = 0
        self._body = b""
        self._decoder = None

    def _dispatch(self) -> None:
        """The request is whole: hand it over."""
        head, resolution = self._head, self._resolution
        assert head is not None
        assert resolution is not None
        route = resolution.route
        assert route is not None
        self._at = _At.ANSWER
        self._decoder = None
        if route.action is Action.PROXY:
            body, self._body = self._body, b""
            reserved, self._reserved = self._reserved, 0  # the exchange gives it back
            self._exchange = Exchange(
                self._hub,
                self,
                head=head,
                route=route,
                target=resolution.target,
                request_id=self._request_id,
                key_name=self._key_name,
                body=body,
                body_bytes=self._body_bytes,
                reserved_bytes=reserved,
            )
            self._exchange.start()
            return
        self._drop_body()
        self._own = self._hub.loop.create_task(self._answer_own(head, resolution))

    async def _answer_own(self, head: RequestHead, resolution: Resolution) -> None:
        try:
            answer = await self._admin.answer(head, resolution, private=self._private)
        except Exception:
            log.exception("an own route failed")
            body = error_body(500, "internal", "the proxy failed to answer")
            answer = Answer(status=500, body=body)
        self._own = None
        keep = head.keep_alive and not self._hub.draining
        self.write_own(
            answer.status,
            answer.body,
            content_type=answer.content_type,
            keep_alive=keep,
            extra=answer.fields,
        )
        bump(self._hub.stats.own, answer.status)
        self._log(answer.status, len(answer.body), "")
        self.exchange_done(keep=keep)

    def exchange_done(self, *, keep: bool, reset: bool = False) -> None:
        """Go on to the next request, or close: the answer has been written."""
        self._exchange = None
        self._head = None
        if self._at is _At.CLOSED:
            return
        if reset:
            self._at = _At.CLOSED
            self._hub.spawn(self._reset_when_written())
        elif not keep or (self._finished_reading and not self._buffer):
            self._at = _At.CLOSED
            self._deadline = self._hub.now() + _LINGER_S
            self.transport.close()
        else:
            self._at = _At.HEAD
            now = self._hub.now()
            wait_s = self._hub.options.head_timeout_s if self._buffer else 0.0
            self._deadline = now + (wait_s or self._hub.options.keep_alive_s)
            if self._buffer and not self._advancing:
                self._advance()

    async def _reset_when_written(self) -> None:
        """Reset the connection once the client's kernel has what was written, or after 5 s."""
        loop = self._hub.loop
        deadline = loop.time() + _LINGER_S
        while self.transport.get_write_buffer_size() and loop.time() < deadline:
            await asyncio.sleep(0.02)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # -- the proxy's own words

    def write_own(
        self,
        status: int,
        body: bytes,
        *,
        request_id: str | None = None,
        content_type: bytes = JSON,
        keep_alive: bool,
        extra: bytes = b"",
    ) -> None:
        """Write an answer that the proxy makes itself."""
        head = own_head(
            status,
            length_bytes=len(body),
            content_type=content_type,
            request_id=(request_id or self._request_id).encode(),
            date=self._hub.date,
            keep_alive=keep_alive,
            extra=extra,
        )
        bodyless = self._head is not None and self._head.method == "HEAD"
        self.write(head if bodyless else head + body)

    def _refuse(self, status: int, code: str, message: str, *, extra: bytes = b"") -> None:
        """Answer with an error. The connection goes on only if the rest of the request is known."""
        head = self._head
        keep = False
        if head is not None and self._at is _At.HEAD and not head.chunked and status != 408:
            rest = head.length_bytes or 0
            if rest <= len(self._buffer) and not self._hub.draining:
                self._buffer = self._buffer[rest:]
                keep = head.keep_alive
        if not self._request_id:
            self._request_id = self._hub.new_id()
        self._drop_body()
        body = error_body(status, code, message)
        self.write_own(status, body, keep_alive=keep, extra=extra)
        bump(self._hub.stats.own, status)
        self._log(status, len(body), code)
        if keep:
            self._deadline = self._hub.now() + self._hub.options.keep_alive_s
        else:
            self._linger()

    def _linger(self) -> None:
        """Say that nothing more comes and swallow what the client still sends, for a while.

        Closing with unread bytes would reset the connection and could destroy the answer.
        """
        self._at = _At.LINGER
        self._buffer = b""
        self._deadline = self._hub.now() + _LINGER_S
        if self._finished_reading or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    def _log(self, status: int, bytes_out: int, error: str) -> None:
        hub, head = self._hub, self._head
        if not hub.log.enabled:
            return
        now = hub.now()
        hub.log.add(
            at_s=hub.epoch_s + now,
            client=self.peer,
            method=head.method if head is not None else "",
            path=head.target.partition(b"?")[0].decode("latin-1") if head is not None else "",
            status=status,
            upstream="",
            request_id=self._request_id,
            key=self._key_name,
            bytes_in=0,
            bytes_out=bytes_out,
            first_byte_s=None,
            duration_s=0.0,
            attempts=0,
            error=error,
        )
