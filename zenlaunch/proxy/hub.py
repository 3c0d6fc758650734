"""What all connections share: options, balancer, upstreams, queue, budget, counters, one timer.

Every deadline is checked by one sweep instead of a timer for each request, since arming and
cancelling timers would cost more than relaying. Owns the bounded queue of requests that wait for an
instance, and the control plane's probes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections import deque
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING

from zenlaunch.checks import metric
from zenlaunch.proxy.accesslog import AccessLog
from zenlaunch.proxy.aside import aside
from zenlaunch.proxy.balancer import Balancer
from zenlaunch.proxy.fetch import fetch
from zenlaunch.proxy.metrics import Stats
from zenlaunch.proxy.options import ProxyOptions
from zenlaunch.proxy.progress import RUNNING, STEPS, Progress
from zenlaunch.proxy.pump import Pump
from zenlaunch.proxy.trust import KeyRing, Peers, load_key, load_keys
from zenlaunch.proxy.upstream import Upstream

if TYPE_CHECKING:
    from zenlaunch.proxy.downstream import ClientConnection
    from zenlaunch.proxy.exchange import Exchange

log = logging.getLogger("zenlaunch.proxy")


class Hub:
    """The state of one running proxy."""

    def __init__(
        self,
        options: ProxyOptions,
        loop: asyncio.AbstractEventLoop,
        wires: Pump,
        *,
        max_connections: int,
    ) -> None:
        self.options = options
        self.loop = loop
        self.now = time.monotonic  # `wires.now` is near enough for a request, and no call
        self.max_connections = max_connections
        self.wires = wires
        self.upstreams: dict[str, Upstream] = {}
        self.balancer = Balancer((), policy=options.policy, rules=options.rules)
        self.stats = Stats()
        self.log = AccessLog(options.access_log)
        self.peers = Peers(options.trusted_peers)
        self.keys = KeyRing()
        self.admin_keys = KeyRing()
        self.upstream_authorization = b""
        self.clients: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.waiting: deque[Exchange] = deque()
        self.body_bytes = 0
        self.draining = False
        self.date = b""
        self.epoch_s = 0.0  # from the loop's clock to the epoch, kept by `tick`
        self._second = -1
        self._ids = f"{os.urandom(6).hex()}-"
        self._id = 0
        self._pumping = False
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._progress: dict[str, Progress] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.tick()

    # -- start, reload, stop

    def start(self) -> None:
        """Read the keys and begin to probe the upstreams and to watch the time."""
        self.load_secrets()
        self.set_upstreams(self.options)
        options = self.options
        shortest_s = min(
            options.connect_timeout_s,
            options.first_byte_timeout_s,
            options.gap_timeout_s,
            options.head_timeout_s,
            options.keep_alive_s,
            options.queue_timeout_s,
            options.client_stall_s,
            options.body_grace_s,
            options.sse_keepalive_s or 60.0,
        )
        self.spawn(self._sweep(max(0.02, min(0.5, shortest_s / 10))))
        # Imported before anybody asks: at the first scrape it would hold up every stream.
        self.spawn(aside(partial(importlib.import_module, "prometheus_client")))

    def load_secrets(self) -> None:
        """Read keys and the upstream key again; raises `ProxyError` and then changes nothing."""
        options = self.options
        environment = os.environ.get(options.api_keys_env, "") if options.api_keys_env else ""
        keys = load_keys(options.api_keys_file, environment)
        admin_keys = load_keys(options.admin_keys_file, None)
        authorization = b""
        if options.upstream_key_file is not None:
            key = load_key(options.upstream_key_file)
            authorization = b"authorization: Bearer %b\r\n" % key.encode()
        self.keys, self.admin_keys = keys, admin_keys
        self.upstream_authorization = authorization

    def set_upstreams(self, options: ProxyOptions) -> None:
        """Take the list of upstreams from `options`; those that stay keep their state."""
        wanted = {address.name: address for address in options.addresses}
        gone = [n for n, u in self.upstreams.items() if wanted.get(n) != u.address]
        for name in gone:
            upstream = self.upstreams.pop(name)
            upstream.retire()
            self._probes.pop(name).cancel()
            del self._wake[name], self._progress[name]
            log.info("upstream %s: %s gets no more requests", name, upstream.address.url)
        new = [name for name in wanted if name not in self.upstreams]
        self.balancer.set_members(wanted, self.now(), replaced=gone)
        for name in new:
            self.upstreams[name] = Upstream(
                wanted[name], self.wires, pool_idle_s=options.pool_idle_s
            )
            self._wake[name] = asyncio.Event()
            self._progress[name] = Progress(options.hang_s)
            self._probes[name] = self.loop.create_task(self._probe(name))
            log.info("upstream %s: %s is new", name, wanted[name].url)
        self.pump_soon()

    def spawn(self, coroutine: object) -> None:
        """Run a coroutine beside the connections until it ends or the proxy does."""
        assert asyncio.iscoroutine(coroutine)
        task: asyncio.Task[None] = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._reaped)

    def _reaped(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the proxy failed", exc_info=task.exception())

    async def stop(self) -> None:
        """End probes and timers and close what is idle."""
        tasks = [*self._probes.values(), *self.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams.values():
            upstream.close_idle()
        self.wires.hang_up()
        self.log.close()

    # -- time

    def tick(self) -> None:
        """Refresh what changes once a second."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            # One subtraction instead of a system call a request; the clock may be set at any time.
            self.epoch_s = now - time.monotonic()
            self.date = formatdate(second, usegmt=True).encode()
            self.log.flush()

    async def _sweep(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            now = self.now()
            self.tick()
            checked: list[Exchange | ClientConnection] = [*self.exchanges, *self.clients]
            for one in checked:
                try:
                    one.check(now)
                except Exception:  # one that is odd must not end the time of all others
                    log.exception("checking %r failed", one)
            for upstream in self.upstreams.values():
                upstream.close_idle(now)
            if self.waiting:
                self.pump()

    def new_id(self) -> str:
        """Return a request id that no other request of any proxy has."""
        self._id += 1
        return self._ids + str(self._id)

    # -- the queue

    def enqueue(self, exchange: Exchange) -> bool:
        """Let a request wait for an instance; False when too many wait already."""
        if len(self.waiting) >= self.options.max_queued:
            return False
        self.waiting.append(exchange)
        self.pump_soon()
        return True

    def pump_soon(self) -> None:
        """Give the next in the queue its turn, once the caller is done."""
        if self.waiting and not self._pumping:
            self._pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Start waiting requests, in order, as long as instances take them.

        One that has failed somewhere waits for the others only: it holds up nobody who does not.
        """
        self._pumping = False
        passed: list[Exchange] = []
        while self.waiting:
            exchange = self.waiting.popleft()
            if not exchange.retake():
                passed.append(exchange)
                if not exchange.tried:
                    break
        self.waiting.extendleft(reversed(passed))

    # -- probes

    def probe_soon(self, name: str) -> None:
        """Ask an upstream now how it is: a request has just failed there."""
        event = self._wake.get(name)
        if event is not None:
            event.set()

    async def _probe(self, name: str) -> None:
        options = self.options
        wake = self._wake[name]
        while True:
            try:
                await self._probe_once(name)
            except Exception:  # nobody else would ever ask again
                log.exception("a probe of upstream %s failed", name)
            self.pump_soon()  # who waited for it has a place now, or must be told
            ready = self.balancer.is_ready(name)
            pause_s = options.probe_ready_interval_s if ready else options.probe_interval_s
            wake.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await wake.wait()
                # A burst of failures asks once, not once for each.
                await asyncio.sleep(min(0.05, pause_s))
            except TimeoutError:
                pass

    async def _probe_once(self, name: str) -> None:
        upstream = self.upstreams[name]
        received = self._received(name)
        try:
            head, _ = await fetch(
                upstream,
                self.options.probe_path,
                timeout_s=self.options.probe_timeout_s,
                fields=self.upstream_authorization,
            )
        except ConnectionRefusedError:
            gone = self.balancer.probe_missed(name, decisive=True)
            self._note(name, gone, "refuses connections")
            return
        except OSError as error:
            # Busy is not dead: while its tokens flow, silence of /health says nothing.
            if self._received(name) == received:
                what = "is silent" if isinstance(error, TimeoutError) else "breaks connections"
                self._note(name, self.balancer.probe_missed(name, decisive=False), what)
            return
        if head.status == 200:
            self._note(name, self.balancer.probe_answered(name), "is ready")
            await self._look_for_progress(name)
        else:
            gone = self.balancer.probe_missed(name, decisive=True)
            self._note(name, gone, f"says {head.status}")

    async def _look_for_progress(self, name: str) -> None:
        """Let an engine rest that says it is well and stands still with requests in it."""
        progress, balancer = self._progress[name], self.balancer
        in_flight, received = balancer.in_flight_at(name), self._received(name)
        if not progress.is_doubtful(self.now(), in_flight=in_flight, received=received):
            return
        try:
            head, body = await fetch(
                self.upstreams[name],
                "/metrics",
                timeout_s=self.options.probe_timeout_s,
                fields=self.upstream_authorization,
                limit_bytes=8 * 2**20,
            )
        except OSError:
            return
        text = body.decode("utf-8", "replace") if head.status == 200 else ""
        running, steps = metric(text, RUNNING), metric(text, STEPS)
        now = self.now()
        if progress.stands_still(now, running=running, steps=steps):
            pause_s = self.options.probe_ready_interval_s
            balancer.rest(name, now + self.options.hang_s / 5 + 2 * pause_s)
            log.warning("upstream %s has %d requests and stands still", name, in_flight)

    def settle(self) -> None:
        """Bring the counters up to date: streams put off what can wait."""
        for exchange in self.exchanges:
            exchange.settle()

    def _received(self, name: str) -> int:
        self.settle()
        return self.stats.of(name).bytes_received

    def _note(self, name: str, changed: bool, what: str) -> None:
        if changed:
            if what != "is ready":
                self.upstreams[name].close_idle()
            log.info("upstream %s %s", name, what)
