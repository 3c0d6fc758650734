"""One request's way through the proxy: take an instance, send, relay, try again, end honestly.

The client's connection hands over a whole, checked request and is told when its answer is done.
Which fault allows what is decided in `retry`, who is asked in `balancer`; here it is carried out.
Every path ends in `_end`, once: there the lease, the budget and the log line are settled.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zenlaunch.proxy.answers import error_body, one_line
from zenlaunch.proxy.attempt import Attempt, Receive
from zenlaunch.proxy.balancer import Lease, Outcome, Verdict
from zenlaunch.proxy.http1 import ResponseHead, field
from zenlaunch.proxy.metrics import Counters, bump
from zenlaunch.proxy.reply import Reply
from zenlaunch.proxy.retry import (
    FIRST,
    TOLD,
    Fault,
    History,
    Next,
    counts_against,
    decide,
    retry_after_s,
)
from zenlaunch.proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from zenlaunch.proxy.downstream import ClientConnection
    from zenlaunch.proxy.hub import Hub
    from zenlaunch.proxy.intake import Request
    from zenlaunch.proxy.routes import Route

log = logging.getLogger("zenlaunch.proxy")

_FAILURE = Outcome.FAILURE
SHUTDOWN = "the proxy is shutting down"


class Exchange:
    """A request between the moment it is whole and the moment its answer is done."""

    __slots__ = (
        "_attempt",
        "_client",
        "_connection",
        "_counters",
        "_deadline",
        "_ended",
        "_error",
        "_history",
        "_hub",
        "_last_comment",
        "_lease",
        "_queued_at",
        "_reply",
        "_request",
        "_route",
        "_started",
        "_stream_wanted",
        "_upstream",
        "method",
    )

    def __init__(self, hub: Hub, client: ClientConnection, request: Request, route: Route) -> None:
        self._hub = hub
        self._client = client
        self._request = request
        self._route = route
        self.method = request.head.method
        self._reply = Reply(client, request.head, request.id)
        self._upstream = ""
        self._started = hub.wires.now
        self._history: History = FIRST
        self._lease: Lease | None = None
        self._counters: Counters | None = None
        self._connection: UpstreamConnection | None = None
        self._attempt: Attempt | None = None
        self._queued_at: float | None = None
        self._deadline = 0.0
        self._last_comment = 0.0
        self._stream_wanted = False
        self._ended = False
        self._error = ""

    def __repr__(self) -> str:
        at = self._lease.upstream if self._lease else "nowhere"
        return f"<Exchange {self.method} {self._route.path} at {at} begun={self._reply.begun}>"

    @property
    def tried(self) -> frozenset[str]:
        """The instances that this request is not sent to any more."""
        return self._history.tried

    @property
    def would_look_whole(self) -> bool:
        """Whether what the client has got would pass for all of it if the connection just ended."""
        return self._reply.head_sent and not self._reply.shows_a_break

    # -- choosing and sending

    def start(self) -> None:
        """Begin: take an instance, or a place in the queue, or be refused."""
        hub = self._hub
        hub.exchanges.add(self)
        request = self._request
        if hub.options.sse_keepalive_s is not None:
            self._stream_wanted = request.wants_stream()
            self._last_comment = self._started
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
        choice = self._hub.balancer.acquire(self._hub.wires.now, exclude=self._history.tried)
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
        self._upstream = lease.upstream
        self._counters = hub.stats.of(lease.upstream)
        upstream = hub.upstreams.get(lease.upstream)
        if upstream is None:  # removed by a reload between choosing and sending
            self._failed(Fault.UNREACHABLE)
            return
        now = hub.wires.now
        connection = None if fresh else upstream.take(now)
        if connection is None:
            try:
                connection = upstream.connect()
            except OSError:
                self._failed(Fault.UNREACHABLE)
                return
        request = self._request
        self._connection = connection
        self._attempt = Attempt(
            self._counters, started=self._started, hold_bytes=hub.options.hold_bytes
        )
        self._deadline = now + hub.options.first_byte_timeout_s
        has_body = request.body_bytes or self.method == "POST"
        # A key that was checked here is not the engine's business: it gets its own, or none.
        keyless = hub.upstream_authorization or len(hub.keys)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b\r\n%b%b\r\n" % (
            self.method.encode(),
            request.resolution.target,
            upstream.authority,
            request.head.up_keyless if keyless else request.head.up,
            self._client.forwarded(request.head),
            request.id.encode(),
            hub.upstream_authorization,
            b"content-length: %d\r\n" % request.body_bytes if has_body else b"",
        )
        self._counters.bytes_sent += request.body_bytes
        connection.send(self, head, request.body, now)

    # -- what the upstream says

    def on_head(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        if head.status == 503 and not self._reply.begun:
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
                self._release(Outcome.FAILURE, retry_after_s=self._rest_s(head))
                self._history = history
                self._go(choice.lease)
                return
        assert self._attempt is not None
        self._attempt.take_head(head, early=self._reply.early)

    def on_body(self, connection: UpstreamConnection, payload: bytes) -> None:
        assert self._attempt is not None
        ready = self._attempt.take(payload, self._hub.wires.now)
        if ready:
            self._forward(self._attempt, ready)

    def relay(self, otherwise: Receive) -> Receive | None:
        attempt, reply = self._attempt, self._reply
        if not reply.takes_chunks or attempt is None:
            return None
        if attempt.tracker is None or not attempt.tracker.at_rest:
            return None
        return attempt.open_short_way(self._client.wire, self._hub.wires, otherwise)

    def on_end(self, connection: UpstreamConnection) -> None:
        self._connection = None
        attempt, reply = self._attempt, self._reply
        assert attempt is not None
        head, tracker = attempt.head, attempt.tracker
        assert head is not None
        self._error = ""  # of an attempt before this one
        rest = attempt.take_rest()
        if tracker is not None:
            if not tracker.done and self._route.ends_with_done and head.status == 200:
                self._failed(Fault.TRUNCATED if reply.begun else Fault.DIED)
                return
            if rest:
                self._forward(attempt, rest)
                rest = b""
            if tracker.error_status is not None:
                self._error = "engine-error"
        elif reply.early:
            # The client was promised a stream: what came instead can be told as an event only.
            reply.error_event(one_line(rest, head.status), named=self._route.named_events)
            self._end(attempt.outcome(), status=head.status, keep=False)
            return
        if not reply.begun:
            self._begin(head, rest, length_bytes=len(rest))
        reply.end()
        self._end(attempt.outcome(), status=head.status, keep=reply.keep)

    def on_broken(self, connection: UpstreamConnection, fault: Fault) -> None:
        self._connection = None
        if self._reply.begun and fault in (Fault.DIED, Fault.IDLE_RESET):
            fault = Fault.TRUNCATED
        self._failed(fault)

    def _forward(self, attempt: Attempt, payload: bytes) -> None:
        if self._reply.begun:
            self._reply.body(payload)
            return
        head = attempt.head
        assert head is not None
        # An event stream's length is not passed on: an error event must fit in at any time.
        length_bytes = head.length_bytes if attempt.tracker is None else None
        self._begin(head, payload, length_bytes=length_bytes)

    def _begin(self, head: ResponseHead, payload: bytes, *, length_bytes: int | None) -> None:
        self._request.drop()  # it will not be sent again
        if self._client.wire.full:  # still full of an earlier answer
            self.pause()
        self._reply.begin(
            head,
            payload,
            upstream=self._upstream,
            length_bytes=length_bytes,
            events=head.content_type.startswith(b"text/event-stream"),
        )

    # -- when things break

    def _failed(self, fault: Fault) -> None:
        lease = self._lease
        assert lease is not None
        after, self._history, fault = decide(
            fault,
            lease.upstream,
            self._history,
            begun=self._reply.begun,
            stateless=self._route.stateless,
        )
        self._count_fault(fault, retried=after is not Next.GIVE_UP)
        if fault in (Fault.UNREACHABLE, Fault.DIED, Fault.TRUNCATED, Fault.CONNECT_TIMEOUT):
            self._hub.probe_soon(lease.upstream)
        if after is not Next.GIVE_UP:
            self._attempt = None
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
        status, code, message = TOLD[fault]
        self._error = fault
        if self._reply.head_sent:
            self._break_off(status, error_body(status, code, message))
        else:
            self._refuse(status, code, message, retry_after=status == 503)

    def _break_off(self, status: int, body: bytes) -> None:
        """End a begun answer honestly: an error event where events are read, never a clean end."""
        reply = self._reply
        tracker = self._attempt.tracker if self._attempt is not None else None
        if tracker is not None or reply.early:
            torn = tracker is not None and tracker.torn
            reply.error_event(body, named=self._route.named_events, torn=torn)
        self._end(Outcome.NEUTRAL, status=status, keep=False, reset=not reply.shows_a_break)

    def _refuse_none_usable(self) -> None:
        fault = self._error
        if fault in (Fault.UNREACHABLE, Fault.CONNECT_TIMEOUT, Fault.DIED):
            self._give_up(Fault(fault))
        else:
            self._refuse(503, "no_instance", "no instance is ready", retry_after=True)

    def _refuse(self, status: int, code: str, message: str, *, retry_after: bool = False) -> None:
        self._error = self._error or code
        body = error_body(status, code, message)
        reply = self._reply
        if reply.early:
            self._break_off(status, body)
            return
        extra = b""
        if retry_after:
            wait_s = self._hub.balancer.retry_after_s(self._hub.now())
            extra = b"retry-after: %d\r\n" % wait_s
        keep = reply.keep and not self._hub.draining
        self._client.write_own(
            status, body, request_id=self._request.id, keep_alive=keep, extra=extra
        )
        reply.bytes_out += len(body)
        self._end(Outcome.NEUTRAL, status=status, keep=keep, own=True)

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
        if self._reply.head_sent:
            self._break_off(503, error_body(503, "shutdown", SHUTDOWN))
        else:
            self._refuse(503, "shutdown", SHUTDOWN, retry_after=True)

    # -- time and back-pressure

    def settle(self) -> None:
        """Bring the counters up to date."""
        if self._attempt is not None:
            self._attempt.settle()

    def check(self, now: float) -> None:
        """Look at the deadlines."""
        options = self._hub.options
        if self._queued_at is not None:
            if now >= self._deadline:
                self._refuse(503, "queue_timeout", "no instance was free in time", retry_after=True)
            return
        connection = self._connection
        if connection is None:
            return
        if not connection.wire.connected:
            if now - connection.sent_at >= options.connect_timeout_s:
                self._time_out(Fault.CONNECT_TIMEOUT)
            return
        if self._client.wire.full:
            return
        attempt = self._attempt
        assert attempt is not None
        if attempt.first_byte_s is None:
            if now >= self._deadline:
                self._time_out(Fault.FIRST_BYTE_TIMEOUT)
                return
        elif now - attempt.last_byte >= options.gap_timeout_s:
            self._time_out(Fault.GAP_TIMEOUT)
            return
        if (
            self._stream_wanted
            and options.sse_keepalive_s is not None
            and not self._reply.begun
            and attempt.head is None
            and now - self._last_comment >= options.sse_keepalive_s
        ):
            self._last_comment = now
            self._reply.comment(upstream=self._upstream)

    def _time_out(self, fault: Fault) -> None:
        assert self._connection is not None
        self._connection.cancel(self)
        self._connection = None
        self._failed(fault)

    def pause(self) -> None:
        """Let the engine wait: the client reads too slowly."""
        if self._connection is not None:
            self._connection.wire.pause()

    def resume(self) -> None:
        """Let the engine go on."""
        if self._attempt is not None:
            self._attempt.restart(self._hub.now())
        if self._connection is not None:
            self._connection.wire.resume()

    # -- the end

    def _count_fault(self, fault: Fault, *, retried: bool) -> None:
        if self._counters is None:
            return
        if counts_against(fault):
            bump(self._counters.errors, str(fault))
        if retried:
            bump(self._counters.retries, str(fault))

    def _rest_s(self, head: ResponseHead) -> float | None:
        hub = self._hub
        return retry_after_s(field(head.fields, b"retry-after"), epoch_s=hub.epoch_s + hub.now())

    def _release(self, outcome: Outcome, *, retry_after_s: float | None = None) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            hub = self._hub
            if hub.balancer.release(lease, outcome, hub.wires.now, retry_after_s=retry_after_s):
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
        hub, attempt = self._hub, self._attempt
        if attempt is not None and attempt.short_bytes:
            attempt.settle()
        if self._connection is not None:
            self._connection.cancel(self)
            self._connection = None
        if self._queued_at is not None:
            hub.waiting.remove(self)
            self._queued_at = None
        if self._lease is not None:
            wait_s = None
            if attempt is not None and attempt.head and outcome is _FAILURE:
                wait_s = self._rest_s(attempt.head)
            self._release(outcome, retry_after_s=wait_s)
        if own:
            bump(hub.stats.own, status)
        elif self._counters is not None:
            bump(self._counters.codes, status)
        hub.exchanges.discard(self)
        self._request.drop()
        if hub.log.enabled:
            now = hub.wires.now
            hub.log.add(
                at_s=hub.epoch_s + self._started,
                client=self._client.peer,
                method=self.method,
                path=self._route.path,
                status=status,
                upstream=self._upstream,
                request_id=self._request.id,
                key=self._request.key_name,
                bytes_in=self._request.body_bytes,
                bytes_out=self._reply.bytes_out + (attempt.short_bytes if attempt else 0),
                first_byte_s=attempt.first_byte_s if attempt is not None else None,
                duration_s=now - self._started,
                attempts=self._history.attempts + 1,
                error=self._error,
            )
        if tell:
            self._client.exchange_done(keep=keep, reset=reset)
