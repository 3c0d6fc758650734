"""One request's way through the proxy: take an instance, send, relay, try again, end honestly.

The client's connection hands over a whole, checked request and is told when its answer is done.
Which fault allows what is decided in `retry`, who is asked in `balancer`; here it is carried out.
Every path ends in `_end`, once: there the lease, the budget and the log line are settled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from bisect import bisect_left
from time import monotonic
from typing import TYPE_CHECKING

from zenlaunch.proxy.answers import REASONS, error_body
from zenlaunch.proxy.balancer import Lease, Outcome, Verdict
from zenlaunch.proxy.http1 import (
    LAST_CHUNK,
    RequestHead,
    ResponseHead,
    chunk,
    field,
)
from zenlaunch.proxy.metrics import SECONDS, Counters, bump
from zenlaunch.proxy.retry import FIRST, Fault, History, Next, counts_against, decide
from zenlaunch.proxy.sse import EventTracker, error_event
from zenlaunch.proxy.upstream import Relay, Upstream, UpstreamConnection

if TYPE_CHECKING:
    from zenlaunch.proxy.downstream import ClientConnection
    from zenlaunch.proxy.hub import Hub
    from zenlaunch.proxy.routes import Route

log = logging.getLogger("zenlaunch.proxy")

KEEPALIVE = b": keep-alive" + b" " * 1024 + b"\n\n"

# What a client is told when nothing can be tried any more.
_TOLD: dict[Fault, tuple[int, str, str]] = {
    Fault.UNREACHABLE: (503, "upstream_unreachable", "no instance could be reached"),
    Fault.CONNECT_TIMEOUT: (503, "upstream_unreachable", "no instance took the connection in time"),
    Fault.UNAVAILABLE: (503, "upstream_unavailable", "no instance takes requests now"),
    Fault.IDLE_RESET: (502, "upstream_broken", "the instance closed the connection"),
    Fault.DIED: (502, "upstream_broken", "the instance broke the connection before it answered"),
    Fault.GARBAGE: (502, "upstream_garbage", "the instance answered something that is not HTTP"),
    Fault.TRUNCATED: (502, "upstream_truncated", "the instance's answer ended before its end"),
    Fault.FIRST_BYTE_TIMEOUT: (504, "upstream_timeout", "the instance did not answer in time"),
    Fault.GAP_TIMEOUT: (504, "upstream_stalled", "the instance's answer stood still"),
}


class Exchange:
    """A request between the moment it is whole and the moment its answer is done."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_chunked_down",
        "_client",
        "_connection",
        "_counters",
        "_deadline",
        "_dial",
        "_early",
        "_ended",
        "_error",
        "_first_byte_s",
        "_head",
        "_held",
        "_held_bytes",
        "_history",
        "_hub",
        "_keep",
        "_last_byte",
        "_lease",
        "_length_down",
        "_out_bytes",
        "_queued_at",
        "_request_fields",
        "_reserved_bytes",
        "_response",
        "_route",
        "_started",
        "_stream_wanted",
        "_target",
        "_tracker",
        "begun",
        "key_name",
        "method",
        "request_id",
        "write",
    )

    def __init__(
        self,
        hub: Hub,
        client: ClientConnection,
        *,
        head: RequestHead,
        route: Route,
        target: bytes,
        request_id: str,
        key_name: str | None,
        body: bytes | bytearray,
        body_bytes: int,
        reserved_bytes: int,
    ) -> None:
        self._hub = hub
        self._client = client
        self._head = head
        self._route = route
        self._target = target
        self._body = body
        self._body_bytes = body_bytes
        self._reserved_bytes = reserved_bytes
        self.method = head.method
        self.request_id = request_id
        self.key_name = key_name
        self.write = client.transport.write
        self.begun = False
        self._started = hub.now()
        self._history: History = FIRST
        self._lease: Lease | None = None
        self._counters: Counters | None = None
        self._connection: UpstreamConnection | None = None
        self._dial: asyncio.Task[None] | None = None
        self._queued_at: float | None = None
        self._deadline = 0.0
        self._last_byte = 0.0
        self._response: ResponseHead | None = None
        self._tracker: EventTracker | None = None
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._chunked_down = False
        self._length_down = False
        self._keep = head.keep_alive
        self._early = False
        self._stream_wanted = False
        self._ended = False
        self._error = ""
        self._first_byte_s: float | None = None
        self._out_bytes = 0
        self._request_fields = b""

    def __repr__(self) -> str:
        at = self._lease.upstream if self._lease else "nowhere"
        return f"<Exchange {self.method} {self._route.path} at {at} begun={self.begun}>"

    # -- choosing and sending

    def start(self) -> None:
        """Begin: take an instance, or a place in the queue, or be refused."""
        hub = self._hub
        hub.exchanges.add(self)
        if hub.options.sse_keepalive_s is not None:
            self._stream_wanted = _wants_stream(self._body, self._body_bytes)
            self._last_byte = self._started
        # A key that was checked here is not the engine's business: it gets its own, or none.
        keyless = hub.upstream_authorization or len(hub.keys)
        has_body = self._body_bytes or self.method == "POST"
        self._request_fields = b"%b%bx-request-id: %b\r\n%b%b\r\n" % (
            self._head.up_keyless if keyless else self._head.up,
            self._client.forwarded(self._head),
            self.request_id.encode(),
            hub.upstream_authorization,
            b"content-length: %d\r\n" % self._body_bytes if has_body else b"",
        )
        if hub.waiting:
            self._queue()
        else:
            self._take()

    def retake(self) -> bool:
        """Try to leave the queue; False when the instances are still busy."""
        if self._ended:
            return True
        now = self._hub.now()
        choice = self._hub.balancer.acquire(now, exclude=self._history.tried)
        if choice.verdict is Verdict.BUSY:
            return False
        if self._queued_at is not None:
            self._hub.stats.queue_waits.observe(now - self._queued_at)
            self._queued_at = None
        if choice.lease is None:
            self._refuse_none_usable()
        else:
            self._go(choice.lease)
        return True

    def _take(self) -> None:
        choice = self._hub.balancer.acquire(self._hub.now(), exclude=self._history.tried)
        if choice.lease is not None:
            self._go(choice.lease)
        elif choice.verdict is Verdict.BUSY:
            self._queue()
        else:
            self._refuse_none_usable()

    def _queue(self) -> None:
        if self._hub.enqueue(self):
            self._queued_at = self._hub.now()
            self._deadline = self._queued_at + self._hub.options.queue_timeout_s
        else:
            self._refuse(429, "queue_full", "too many requests wait already", retry_after=True)

    def _go(self, lease: Lease, *, fresh: bool = False) -> None:
        hub = self._hub
        self._lease = lease
        self._counters = hub.stats.of(lease.upstream)
        upstream = hub.upstreams.get(lease.upstream)
        if upstream is None:  # removed by a reload between choosing and sending
            self._failed(Fault.UNREACHABLE)
            return
        connection = None if fresh else upstream.take(hub.now())
        if connection is None:
            self._dial = hub.loop.create_task(self._connect(upstream))
        else:
            self._send(connection)

    async def _connect(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(self._hub.options.connect_timeout_s):
                connection = await upstream.connect()
        except TimeoutError:
            self._dial = None
            self._failed(Fault.CONNECT_TIMEOUT)
        except OSError:
            self._dial = None
            self._failed(Fault.UNREACHABLE)
        else:
            self._dial = None
            try:
                self._send(connection)
            except Exception:
                log.exception("sending a request failed")
                self._failed(Fault.UNREACHABLE)

    def _send(self, connection: UpstreamConnection) -> None:
        if connection.transport.is_closing():  # lost between the dial and now; nothing was sent
            self._failed(Fault.UNREACHABLE)
            return
        now = self._hub.now()
        self._connection = connection
        self._deadline = now + self._hub.options.first_byte_timeout_s
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (
            self.method.encode(),
            self._target,
            connection.upstream.authority,
            self._request_fields,
        )
        if self._counters is not None:
            self._counters.bytes_sent += self._body_bytes
        connection.send(self, head, self._body, now)

    # -- what the upstream says

    def on_head(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        if head.status == 503 and not self.begun:
            now = self._hub.now()
            lease = self._lease
            assert lease is not None
            _, history, _ = decide(
                Fault.UNAVAILABLE,
                lease.upstream,
                self._history,
                begun=False,
                stateless=self._route.stateless,
            )
            choice = self._hub.balancer.acquire(now, exclude=history.tried)
            if choice.lease is not None:
                connection.cancel(self)
                self._connection = None
                self._count_fault(Fault.UNAVAILABLE, retried=True)
                self._release(Outcome.FAILURE, retry_after_s=_retry_after_s(head))
                self._history = history
                self._go(choice.lease)
                return
        self._response = head
        content_type = head.content_type
        if content_type.startswith(b"text/event-stream"):
            if field(head.fields, b"content-encoding") is None:
                self._tracker = EventTracker()
        elif (
            content_type.startswith(b"application/json")
            if head.length_bytes is None
            else head.length_bytes <= self._hub.options.hold_bytes
        ):
            self._held = []

    def on_body(self, connection: UpstreamConnection, payload: bytes) -> None:
        now = self._hub.now()
        counters = self._counters
        assert counters is not None
        counters.bytes_received += len(payload)
        if self._first_byte_s is None:
            self._first_byte_s = now - self._started
            counters.first_byte.observe(self._first_byte_s)
        elif self._tracker is not None:
            counters.gaps.observe(now - self._last_byte)
        self._last_byte = now
        tracker = self._tracker
        if tracker is not None:
            events = tracker.events
            payload = tracker.feed(payload)
            counters.events += tracker.events - events
            if payload:
                self._forward(payload)
        elif self._held is not None:
            self._held.append(payload)
            self._held_bytes += len(payload)
            if self._held_bytes > self._hub.options.hold_bytes:
                held, self._held = b"".join(self._held), None
                self._forward(held)
        else:
            self._forward(payload)

    def relay(self) -> Relay | None:
        """Take whole chunks as they are once all before them has gone out the same way."""
        tracker = self._tracker
        if self.begun and self._chunked_down and tracker is not None and tracker.at_rest:
            return self._relay_chunk
        return None

    def _relay_chunk(self, data: bytes) -> None:
        # Most of the proxy's life is here. One system call at once is cheaper than the transport's
        # queue; the transport still takes what the socket does not, and finds out what is broken.
        # The descriptor is the connection's own: it is closed after `connection_lost` only.
        size = len(data)
        transport = self._client.transport
        if transport.get_write_buffer_size() or transport.is_closing():
            transport.write(data)
        else:
            try:
                sent = os.write(self._client.fd, data)
            except OSError:
                sent = 0
            if sent != size:
                transport.write(data[sent:])
        now = monotonic()
        counters = self._counters
        assert counters is not None
        self._out_bytes += size
        counters.bytes_received += size
        counters.events += data.count(b"\n\n")
        gaps = counters.gaps
        gap_s = now - self._last_byte
        gaps.counts[bisect_left(SECONDS, gap_s)] += 1
        gaps.sum_s += gap_s
        self._last_byte = now

    def on_end(self, connection: UpstreamConnection) -> None:
        self._connection = None
        head, tracker = self._response, self._tracker
        assert head is not None
        if tracker is not None:
            rest = tracker.flush()
            if not tracker.done and self._route.ends_with_done and head.status == 200:
                self._failed(Fault.TRUNCATED if self.begun else Fault.DIED)
                return
            if rest:
                self._forward(rest)
            if tracker.error_status is not None:
                self._error = "engine-error"
        if self._early and tracker is None:
            self._end_early_stream(b"".join(self._held or ()))
            return
        if not self.begun:
            payload = b"".join(self._held or ())
            self._write_head(head, length_bytes=len(payload), payload=payload)
        elif self._chunked_down:
            self.write(LAST_CHUNK)
        self._end(self._outcome(head), status=head.status, keep=self._keep)

    def on_broken(self, connection: UpstreamConnection, fault: Fault) -> None:
        self._connection = None
        if self.begun and fault in (Fault.DIED, Fault.IDLE_RESET):
            fault = Fault.TRUNCATED
        self._failed(fault)

    def _outcome(self, head: ResponseHead) -> Outcome:
        engine_status = self._tracker.error_status if self._tracker is not None else None
        status = engine_status or head.status
        if status >= 500 or status in (408, 429):
            if self._counters is not None:
                kind = "engine-error" if engine_status else f"status-{head.status}"
                bump(self._counters.errors, kind)
            return Outcome.FAILURE
        return Outcome.SUCCESS if status < 400 else Outcome.NEUTRAL

    # -- to the client

    def _forward(self, payload: bytes) -> None:
        if not self.begun:
            head = self._response
            assert head is not None
            self._drop_body()
            # An event stream's length is not passed on: an error event must fit in at any time.
            length_bytes = head.length_bytes if self._tracker is None else None
            self._write_head(head, length_bytes=length_bytes, payload=payload)
            return
        self._out_bytes += len(payload)
        self.write(chunk(payload) if self._chunked_down else payload)

    def _write_head(self, head: ResponseHead, *, length_bytes: int | None, payload: bytes) -> None:
        """Send the held head with the first bytes of the body, in one write."""
        self.begun = True
        if self._client.paused:  # still full of an earlier answer
            self.pause()
        self._out_bytes += len(payload)
        if self._early:
            self.write(chunk(payload) if self._chunked_down else payload)
            return
        has_body = self.method != "HEAD" and head.status not in (204, 304)
        fields = head.down
        if not has_body:
            if head.length_bytes is not None and head.status != 204:
                fields += b"content-length: %d\r\n" % head.length_bytes
        elif length_bytes is not None:
            fields += b"content-length: %d\r\n" % length_bytes
            self._length_down = True
        elif self._head.minor == 1:
            fields += b"transfer-encoding: chunked\r\n"
            self._chunked_down = True
            payload = chunk(payload)
        else:
            self._keep = False
        if self._tracker is not None:
            if field(head.fields, b"x-accel-buffering") is None:
                fields += b"x-accel-buffering: no\r\n"
            if field(head.fields, b"cache-control") is None:
                fields += b"cache-control: no-cache\r\n"
        self._finish_head(b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason), fields, payload)

    def _drop_body(self) -> None:
        """Forget the request's body: it will not be sent again."""
        self._body = b""
        self._hub.body_bytes -= self._reserved_bytes
        self._reserved_bytes = 0

    def _finish_head(self, line: bytes, fields: bytes, payload: bytes) -> None:
        if self._hub.draining:
            self._keep = False
        upstream = self._lease.upstream.encode() if self._lease else b""
        self.write(
            b"%b%bx-request-id: %b\r\nx-zenlaunch-upstream: %b\r\n%b\r\n%b"
            % (
                line,
                fields,
                self.request_id.encode(),
                upstream,
                b"" if self._keep else b"connection: close\r\n",
                payload,
            )
        )

    def _keepalive(self) -> None:
        """Send a comment while the engine is silent; the first gives up the holding of the head."""
        if not (self._early or self.begun):
            self._early = True
            self._chunked_down = self._head.minor == 1
            fields = b"content-type: text/event-stream; charset=utf-8\r\n"
            fields += b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
            if self._chunked_down:
                fields += b"transfer-encoding: chunked\r\n"
            else:
                self._keep = False
            payload = chunk(KEEPALIVE) if self._chunked_down else KEEPALIVE
            self._finish_head(b"HTTP/1.1 200 OK\r\n", fields, payload)
        else:
            self.write(chunk(KEEPALIVE) if self._chunked_down else KEEPALIVE)

    def _end_early_stream(self, body: bytes) -> None:
        """Tell a client whose head is out already of an answer that is not a stream."""
        head = self._response
        assert head is not None
        try:
            line = json.dumps(json.loads(body)).encode()
        except ValueError:
            line = error_body(head.status, "upstream_error", f"the instance said {head.status}")
        event = error_event(line)
        self.write(chunk(event) if self._chunked_down else event)
        self._end(self._outcome(head), status=head.status, keep=False)

    # -- when things break

    def _failed(self, fault: Fault) -> None:
        lease = self._lease
        assert lease is not None
        after, self._history, fault = decide(
            fault,
            lease.upstream,
            self._history,
            begun=self.begun,
            stateless=self._route.stateless,
        )
        self._count_fault(fault, retried=after is not Next.GIVE_UP)
        if fault in (Fault.UNREACHABLE, Fault.DIED, Fault.TRUNCATED, Fault.CONNECT_TIMEOUT):
            self._hub.probe_soon(lease.upstream)
        if after is not Next.GIVE_UP:
            self._response = self._tracker = self._held = None
            self._held_bytes = 0
            self._first_byte_s = None
        if after is Next.SAME_FRESH:
            self._go(lease, fresh=True)
            return
        self._release(Outcome.FAILURE if counts_against(fault) else Outcome.NEUTRAL)
        if after is Next.OTHER:
            self._error = fault
            self._take()
        else:
            self._give_up(fault)

    def _give_up(self, fault: Fault) -> None:
        status, code, message = _TOLD[fault]
        self._error = fault
        if self.begun or self._early:
            self._break_off(status, error_body(status, code, message))
        else:
            self._refuse(status, code, message, retry_after=status == 503)

    def _break_off(self, status: int, body: bytes) -> None:
        """End a begun answer honestly: an error event where events are read, never a clean end."""
        if self._tracker is not None or self._early:
            event = error_event(body)
            self.write(chunk(event) if self._chunked_down else event)
        # Chunks without the last and a body shorter than its length show the break by themselves;
        # where the end of the connection is the end of the body, only a reset does.
        shown = self._chunked_down or self._length_down
        self._end(Outcome.NEUTRAL, status=status, keep=False, reset=not shown)

    def _refuse_none_usable(self) -> None:
        fault = self._error
        if fault in (Fault.UNREACHABLE, Fault.CONNECT_TIMEOUT, Fault.DIED):
            self._give_up(Fault(fault))
        else:
            self._refuse(503, "no_instance", "no instance is ready", retry_after=True)

    def _refuse(self, status: int, code: str, message: str, *, retry_after: bool = False) -> None:
        self._error = self._error or code
        body = error_body(status, code, message)
        if self._early:
            self._break_off(status, body)
            return
        extra = b""
        if retry_after:
            wait_s = self._hub.balancer.retry_after_s(self._hub.now())
            extra = b"retry-after: %d\r\n" % wait_s
        self._keep = self._keep and not self._hub.draining
        self._client.write_own(
            status, body, request_id=self.request_id, keep_alive=self._keep, extra=extra
        )
        self._out_bytes += len(body)
        self._end(Outcome.NEUTRAL, status=status, keep=self._keep, own=True)

    def client_gone(self) -> None:
        """Stop everything: the client has left."""
        if not self._ended:
            self._hub.stats.cancelled += 1
            self._error = self._error or "client-gone"
            self._end(Outcome.NEUTRAL, status=499, keep=False, tell=False)

    def cut(self) -> None:
        """End an answer that has no more time: the proxy stops."""
        if self._ended:
            return
        self._error = "shutdown"
        message = "the proxy is shutting down"
        if self.begun or self._early:
            self._break_off(503, error_body(503, "shutdown", message))
        else:
            self._refuse(503, "shutdown", message, retry_after=True)

    # -- time and back-pressure

    def check(self, now: float) -> None:
        """Look at the deadlines."""
        options = self._hub.options
        if self._queued_at is not None:
            if now >= self._deadline:
                self._refuse(503, "queue_timeout", "no instance was free in time", retry_after=True)
            return
        if self._connection is None or self._client.paused:
            return
        if self._first_byte_s is None:
            if now >= self._deadline:
                self._time_out(Fault.FIRST_BYTE_TIMEOUT)
                return
        elif now - self._last_byte >= options.gap_timeout_s:
            self._time_out(Fault.GAP_TIMEOUT)
            return
        if (
            self._stream_wanted
            and options.sse_keepalive_s is not None
            and not self.begun
            and self._response is None
            and now - self._last_byte >= options.sse_keepalive_s
        ):
            self._last_byte = now
            self._keepalive()

    def _time_out(self, fault: Fault) -> None:
        assert self._connection is not None
        self._connection.cancel(self)
        self._connection = None
        self._failed(fault)

    def pause(self) -> None:
        """Let the engine wait: the client reads too slowly."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Let the engine go on."""
        self._last_byte = self._hub.now()
        if self._connection is not None:
            self._connection.resume()

    # -- the end

    def _count_fault(self, fault: Fault, *, retried: bool) -> None:
        if self._counters is None:
            return
        if counts_against(fault):
            bump(self._counters.errors, str(fault))
        if retried:
            bump(self._counters.retries, str(fault))

    def _release(self, outcome: Outcome, *, retry_after_s: float | None = None) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            hub = self._hub
            if hub.balancer.release(lease, outcome, hub.now(), retry_after_s=retry_after_s):
                log.warning("upstream %s is ejected: it failed again and again", lease.upstream)
            if hub.waiting:
                hub.pump_soon()

    def _end(
        self,
        outcome: Outcome,
        *,
        status: int,
        keep: bool,
        own: bool = False,
        reset: bool = False,
        tell: bool = True,
    ) -> None:
        if self._ended:
            return
        self._ended = True
        hub = self._hub
        if self._dial is not None:
            self._dial.cancel()
            self._dial = None
        if self._connection is not None:
            self._connection.cancel(self)
            self._connection = None
        if self._queued_at is not None:
            hub.waiting.remove(self)
            self._queued_at = None
        upstream = self._lease.upstream if self._lease is not None else ""
        if self._lease is not None:
            retry_after_s = None
            if self._response is not None and outcome is Outcome.FAILURE:
                retry_after_s = _retry_after_s(self._response)
            self._release(outcome, retry_after_s=retry_after_s)
        if own:
            bump(hub.stats.own, status)
        elif self._counters is not None:
            bump(self._counters.codes, status)
        hub.exchanges.discard(self)
        self._drop_body()
        if hub.log.enabled:
            now = hub.now()
            hub.log.add(
                at_s=hub.epoch_s + self._started,
                client=self._client.peer,
                method=self.method,
                path=self._route.path,
                status=status,
                upstream=upstream,
                request_id=self.request_id,
                key=self.key_name,
                bytes_in=self._body_bytes,
                bytes_out=self._out_bytes,
                first_byte_s=self._first_byte_s,
                duration_s=now - self._started,
                attempts=self._history.attempts + 1,
                error=self._error,
            )
        if tell:
            self._client.exchange_done(keep=keep, reset=reset)


def _wants_stream(body: bytes | bytearray, size_bytes: int) -> bool:
    """Tell whether a request asks for an event stream; large ones are not looked into."""
    if size_bytes > 262_144:
        return False
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("stream") is True


def _retry_after_s(head: ResponseHead) -> float | None:
    value = field(head.fields, b"retry-after")
    if value is None or not value.isdigit() or len(value) > 6:
        return None
    return float(value)


assert set(_TOLD) == set(Fault)
assert 503 in REASONS
