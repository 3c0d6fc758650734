"""The client's side: one connection, its requests one after the other, and who may ask what.

Frames and checks requests, takes their bodies in (bounded), refuses what must be refused before
any engine hears of it, and notices a client that leaves. A waiting client's socket is read all the
time: pausing it would hide both its FIN and its reset. What happens to an accepted request is
`exchange`'s; the proxy's own routes are `admin`'s.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from zenlaunch.config import HalfClose
from zenlaunch.proxy.answers import CONTINUE, JSON, Answer, error_body, own_head
from zenlaunch.proxy.exchange import SHUTDOWN, Exchange
from zenlaunch.proxy.gate import Refusal
from zenlaunch.proxy.http1 import (
    BadMessage,
    RequestHead,
    parse_request_head,
    problem_of_partial_head,
)
from zenlaunch.proxy.intake import Request
from zenlaunch.proxy.metrics import bump
from zenlaunch.proxy.peer import unacknowledged_bytes
from zenlaunch.proxy.routes import Action
from zenlaunch.proxy.trust import forwarded_fields
from zenlaunch.proxy.wire import Wire

if TYPE_CHECKING:
    from zenlaunch.proxy.admin import Admin
    from zenlaunch.proxy.hub import Hub

log = logging.getLogger("zenlaunch.proxy")

_LINGER_S = 5.0
_FLUSH_S = 5.0
_SLACK_BYTES = 2**20  # more than one read of a wire brings
_WORK_AT_ONCE = 64
_SLICE_BYTES = 16_384

# Where a connection is, in this order. Plain numbers: looking up a member of an enum costs more
# than the comparison, and every request does it thirty times.
_HEAD, _LENGTH, _CHUNKS, _ANSWER, _LINGERS, _RESETS, _CLOSED = range(7)
_PROXY = Action.PROXY


class ClientConnection:
    """One client's connection; `private` ones come through the admin socket."""

    __slots__ = (
        "_admin",
        "_advancing",
        "_at",
        "_buffer",
        "_deadline",
        "_exchange",
        "_finished_reading",
        "_forwarded",
        "_hub",
        "_own",
        "_private",
        "_request",
        "_yielded",
        "peer",
        "trusted",
        "wire",
    )

    def __init__(
        self, hub: Hub, admin: Admin, sock: socket.socket, address: Any, *, private: bool
    ) -> None:
        self._hub = hub
        self._admin = admin
        self._private = private
        self._at = _HEAD
        self._buffer = b""
        self._request: Request | None = None
        self._exchange: Exchange | None = None
        self._own: asyncio.Task[None] | None = None
        self._advancing = False
        self._finished_reading = False
        self._yielded = False
        self._deadline = hub.now() + hub.options.head_timeout_s
        self._forwarded: tuple[bytes, bytes] | None = None
        # A socket in the file system has no such address, whichever door it is.
        self.peer = str(address[0]) if isinstance(address, tuple) else "local"
        self.trusted = not private and hub.peers.trusts(self.peer)
        self.wire: Wire = hub.wires.adopt(sock, self.receive, filled=self._filled, lost=self._lost)
        if len(hub.clients) >= hub.max_connections and not private:
            self._at = _CLOSED
            body = error_body(503, "too_many_connections", "too many connections")
            self.write_own(
                503,
                body,
                request_id=hub.new_id(),
                keep_alive=False,
                extra=b"retry-after: 1\r\n",
            )
            self.wire.finish()
            return
        hub.clients.add(self)

    # -- the connection

    def _lost(self) -> None:
        """Clean up: the connection is closed, by whomever."""
        self._at = _CLOSED
        self._hub.clients.discard(self)
        self._leave()

    def _end_of_input(self) -> None:
        """Take note that the client sends nothing more: most have left, some wait for an answer."""
        self._finished_reading = True
        if self._at == _RESETS:
            return
        answers = self._hub.options.half_close is HalfClose.ANSWER
        if self._at == _ANSWER:
            # What the proxy answers itself costs nothing: it is answered in any case.
            if self._own is not None or answers:
                return
            exchange = self._exchange
            reset = exchange is not None and exchange.would_look_whole
            self._leave()
            if reset:  # it may still read, and must not take what it got for all
                self.exchange_done(keep=False, reset=True)
                return
        elif answers and self._at < _ANSWER and self._buffer and self.wire.full:
            return  # asked already, and looked at when there is room for the answers
        self._close()

    def _leave(self) -> None:
        """Give up what was under way for this client."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
        own, self._own = self._own, None
        if own is not None:
            own.cancel()
        if self._request is not None:
            self._request.drop()

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

    def _filled(self) -> None:
        """Let the engine wait while the client does not take what there is already."""
        if self.wire.full:
            if self._exchange is not None:
                self._exchange.pause()
        elif self._exchange is not None:
            self._exchange.resume()
        elif self._at < _ANSWER and self._buffer and not self._yielded:
            self._deadline = self._hub.now() + self._hub.options.head_timeout_s
            self._advance()

    @property
    def busy(self) -> bool:
        """Whether a request is on its way here, or its answer on the way back."""
        return self._at < _LINGERS and (self._at != _HEAD or bool(self._buffer))

    def close_when_idle(self) -> None:
        """Close now if no request is under way; else after its answer (the proxy is draining)."""
        if self._at == _HEAD and not self._buffer:
            self._close()

    def cut(self) -> None:
        """End what is under way, honestly, and close."""
        if self._exchange is not None:
            self._exchange.cut()
        elif self.busy and self._own is None:
            self._refuse(503, "shutdown", SHUTDOWN, extra=b"retry-after: 1\r\n")
        elif self._at != _RESETS:
            self._close()

    def abandon(self) -> None:
        """Close now; an answer that was not whole does not end as if it were."""
        if self._at == _RESETS:
            self.wire.reset()
        else:
            self.wire.close()

    def _close(self) -> None:
        self._at = _CLOSED
        self.wire.finish()

    def check(self, now: float) -> None:
        """Look at the deadlines: idle, slow head, slow body, a client that does not read."""
        at = self._at
        stands_s = self.wire.stands_s(now)
        if at == _RESETS:
            # Not before the client's kernel has what was written: a reset throws the rest away.
            wire = self.wire
            if now >= self._deadline or not (wire.unsent_bytes or unacknowledged_bytes(wire.fd)):
                wire.reset()
        elif stands_s is not None:
            if stands_s >= self._hub.options.client_stall_s:
                self.wire.close()
        elif at == _LINGERS:
            if now >= self._deadline:
                self.wire.close()
        elif at == _HEAD:
            if now >= self._deadline:
                if self._buffer:
                    self._refuse(408, "head_timeout", "the request head took too long")
                else:
                    self._close()
        elif at == _ANSWER:
            return
        elif self._request is not None and now >= self._deadline + (
            self._request.body_bytes / self._hub.options.body_min_rate
        ):
            self._refuse(408, "body_timeout", "the request body came too slowly")

    # -- requests

    def receive(self, data: bytes) -> None:
        """Take what has come; b"" is the end of it, or of the connection."""
        if not data:
            if self.wire.error is None:
                self._end_of_input()
            return
        at = self._at
        if at >= _ANSWER:
            if at != _ANSWER:
                return
            # A pipelined request: kept for its turn, within bounds.
            self._buffer += data
            if len(self._buffer) > self._hub.options.max_pipelined_bytes:
                self.wire.reset()
            return
        if at == _HEAD and not self._buffer:
            self._deadline = self._hub.wires.now + self._hub.options.head_timeout_s
        self._buffer = self._buffer + data if self._buffer else data
        if len(self._buffer) > self._hub.options.max_pipelined_bytes + _SLACK_BYTES:
            self.wire.close()
            return
        self._advance()

    def _advance(self) -> None:
        """Take as much of the buffer as can be taken now."""
        if self._advancing:
            return
        self._advancing = True
        try:
            work = 0
            # Who does not take the answers is asked no more questions: they would fill the memory.
            while self._at < _ANSWER and self._buffer and not self.wire.full:
                step = self._step()
                if step == 0:
                    break
                work += step
                if work > _WORK_AT_ONCE and not self._yielded:
                    # Thousands of tiny requests or chunks must not hold up everybody else. Nobody
                    # waits for an answer here, so not reading hides nothing.
                    self._yielded = True
                    self.wire.pause()
                    self._hub.loop.call_soon(self._go_on)
                    break
            waits = self._yielded or (self._buffer and self.wire.full)
            if self._finished_reading and self._at < _ANSWER and not waits:
                self._close()  # nothing more comes that could be answered
        except BadMessage as problem:
            self._refuse(problem.status, "bad_request", problem.message)
        finally:
            self._advancing = False

    def _go_on(self) -> None:
        self._yielded = False
        self._advance()
        if not self._yielded:
            self.wire.resume()

    def _step(self) -> int:
        """Take one step; return how much work it was, 0 when more bytes are needed."""
        if self._at == _HEAD:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0 or end > 65_536:
                problem = problem_of_partial_head(self._buffer)
                if problem is not None:
                    raise problem
                return 0
            raw, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._request = None
            self._begin(Request(self._hub, parse_request_head(raw), private=self._private))
            return 1
        request = self._request
        assert request is not None
        if self._at == _LENGTH:
            data, self._buffer = self._buffer, b""
        else:
            data, self._buffer = self._buffer[:_SLICE_BYTES], self._buffer[_SLICE_BYTES:]
        payload, tail, work = request.cut(data)
        refusal = request.too_much(request.body_bytes + len(payload))
        if refusal is not None:
            self._refuse_as(refusal)
            return work
        request.keep(payload)
        if request.whole:
            self._buffer = tail + self._buffer if self._buffer else tail
            self._dispatch(request)
        return work

    def _begin(self, request: Request) -> None:
        self._request = request
        head = request.head
        size_bytes = head.length_bytes or 0
        refusal = request.refusal or request.too_much(size_bytes)
        if refusal is not None:
            self._refuse_as(refusal)
            return
        if not head.chunked and size_bytes <= len(self._buffer):
            if size_bytes:
                body, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
                request.keep(body)
            self._dispatch(request)
            return
        self._deadline = self._hub.now() + self._hub.options.body_grace_s
        self._at = _CHUNKS if head.chunked else _LENGTH
        if head.expects_continue and not self._buffer:
            self.wire.write(CONTINUE)

    def _dispatch(self, request: Request) -> None:
        """The request is whole: hand it over."""
        resolution = request.resolution
        assert resolution.route is not None
        self._at = _ANSWER
        if resolution.route.action is _PROXY or request.head.method == "OPTIONS":
            self._exchange = Exchange(self._hub, self, request, resolution.route)
            self._exchange.start()
            return
        request.drop()
        self._own = self._hub.loop.create_task(self._answer_own(request))

    async def _answer_own(self, request: Request) -> None:
        head = request.head
        try:
            answer = await self._admin.answer(head, request.resolution, private=self._private)
        except Exception:
            log.exception("an own route failed")
            body = error_body(500, "internal", "the proxy failed to answer")
            answer = Answer(status=500, body=body)
        self._own = None
        keep = head.keep_alive and not self._hub.draining
        self.write_own(
            answer.status,
            answer.body,
            request_id=request.id,
            content_type=answer.content_type,
            keep_alive=keep,
            extra=answer.fields,
        )
        bump(self._hub.stats.own, answer.status)
        self._log(answer.status, len(answer.body), request.id)
        self.exchange_done(keep=keep)

    def exchange_done(self, *, keep: bool, reset: bool = False) -> None:
        """Go on to the next request, or close: the answer has been written."""
        self._exchange = None
        self._request = None
        if self._at == _CLOSED:
            return
        if reset:
            self._at = _RESETS
            now = self._hub.now()
            self._deadline = now + _FLUSH_S
            self.check(now)
        elif not keep or (self._finished_reading and not self._buffer):
            self._close()
        else:
            self._at = _HEAD
            now = self._hub.wires.now
            wait_s = self._hub.options.head_timeout_s if self._buffer else 0.0
            self._deadline = now + (wait_s or self._hub.options.keep_alive_s)
            if self._buffer and not self._advancing:
                self._advance()

    # -- the proxy's own words

    def write_own(
        self,
        status: int,
        body: bytes,
        *,
        request_id: str,
        content_type: bytes = JSON,
        keep_alive: bool,
        extra: bytes = b"",
    ) -> None:
        """Write an answer that the proxy makes itself."""
        head = own_head(
            status,
            length_bytes=len(body),
            content_type=content_type,
            request_id=request_id.encode(),
            date=self._hub.date,
            keep_alive=keep_alive,
            extra=extra,
        )
        request = self._request
        bodyless = request is not None and request.head.method == "HEAD"
        self.wire.write(head if bodyless else head + body)

    def _refuse_as(self, refusal: Refusal) -> None:
        self._refuse(refusal.status, refusal.code, refusal.message, extra=refusal.fields)

    def _refuse(self, status: int, code: str, message: str, *, extra: bytes = b"") -> None:
        """Answer with an error. The connection goes on only if the rest of the request is known."""
        keep = False
        request = self._request
        if request is not None:
            head = request.head
            if self._at == _HEAD and not head.chunked and status != 408:
                rest = head.length_bytes or 0
                if rest <= len(self._buffer) and not self._hub.draining:
                    self._buffer = self._buffer[rest:]
                    keep = head.keep_alive
            request.drop()
        body = error_body(status, code, message)
        request_id = request.id if request is not None else self._hub.new_id()
        self.write_own(status, body, request_id=request_id, keep_alive=keep, extra=extra)
        bump(self._hub.stats.own, status)
        self._log(status, len(body), request_id, code)
        if keep:
            self._request = None
            self._deadline = self._hub.now() + self._hub.options.keep_alive_s
        else:
            self._linger()

    def _linger(self) -> None:
        """Say that nothing more comes and swallow what the client still sends, for a while.

        Closing with unread bytes would reset the connection and could destroy the answer.
        """
        self._at = _LINGERS
        self._buffer = b""
        self._deadline = self._hub.now() + _LINGER_S
        if self._finished_reading:
            self.wire.finish()
        else:
            self.wire.shut()

    def _log(self, status: int, bytes_out: int, request_id: str, error: str = "") -> None:
        hub, request = self._hub, self._request
        if not hub.log.enabled:
            return
        hub.log.add(
            at_s=hub.epoch_s + hub.now(),
            client=self.peer,
            method=request.head.method if request is not None else "",
            path=request.head.target.partition(b"?")[0].decode("latin-1") if request else "",
            status=status,
            upstream="",
            request_id=request_id,
            key=request.key_name if request is not None else None,
            bytes_in=0,
            bytes_out=bytes_out,
            first_byte_s=None,
            duration_s=0.0,
            attempts=0,
            error=error,
        )
