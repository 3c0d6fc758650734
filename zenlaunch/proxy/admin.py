"""The proxy's own routes: health, models, load, metrics, status, and draining an upstream.

What needs the engines is asked of them all at once, each with its own short timeout, and made from
whoever answers. Nothing here touches a client's connection: requests in, answers out.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from zenlaunch.proxy.answers import Answer, error_body
from zenlaunch.proxy.aside import aside
from zenlaunch.proxy.fetch import fetch
from zenlaunch.proxy.http1 import RequestHead, ResponseHead, field
from zenlaunch.proxy.hub import Hub
from zenlaunch.proxy.metrics import CONTENT_TYPE, Aggregate, own_exposition
from zenlaunch.proxy.routes import Action, Resolution

_FETCH_TIMEOUT_S = 5.0
_FETCH_BYTES = 8 * 2**20
_MODELS_PATIENCE_S = 0.5  # one instance that hangs must not hang who asks for the models


def _json(status: int, value: object, *, fields: bytes = b"") -> Answer:
    return Answer(status=status, body=json.dumps(value).encode(), fields=fields)


class Admin:
    """Answer the proxy's own routes from the state of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def answer(self, head: RequestHead, resolution: Resolution, *, private: bool) -> Answer:
        """Make the answer to a request for an own route."""
        route = resolution.route
        assert route is not None
        match route.action:
            case Action.HEALTH:
                return self.health()
            case Action.STATUS:
                return _json(200, self.status())
            case Action.LOAD:
                return _json(200, {"server_load": self._hub.balancer.in_flight})
            case Action.ADMIN:
                return self.command(resolution.upstream, resolution.command)
            case Action.MODELS:
                return await self.models(head)
            case Action.METRICS:
                return await self.metrics()
            case _:
                raise AssertionError(route)

    def health(self) -> Answer:
        """200 while at least one upstream is usable and the proxy is not stopping."""
        hub = self._hub
        usable = len(hub.balancer.usable())
        total = len(hub.upstreams)
        if hub.draining:
            return _json(503, {"status": "draining", "usable": usable, "upstreams": total})
        if usable:
            return _json(200, {"status": "ok", "usable": usable, "upstreams": total})
        wait_s = hub.balancer.retry_after_s(hub.now())
        return _json(
            503,
            {"status": "unavailable", "usable": 0, "upstreams": total},
            fields=b"retry-after: %d\r\n" % wait_s,
        )

    def status(self) -> dict[str, Any]:
        """Return what `GET /zenlaunch/status` says."""
        hub = self._hub
        now = hub.now()
        return {
            "schema": 1,
            "state": "draining" if hub.draining else "serving",
            "policy": str(hub.balancer.policy),
            "in_flight": hub.balancer.in_flight,
            "queued": len(hub.waiting),
            "client_connections": len(hub.clients),
            "buffered_body_bytes": hub.body_bytes,
            "upstreams": [
                {
                    "name": view.name,
                    "url": hub.upstreams[view.name].address.url,
                    "state": str(view.state),
                    "in_flight": view.in_flight,
                    "requests": view.requests,
                    "errors": view.errors,
                    "ejected_until": (
                        None
                        if view.barred_s is None
                        else round(hub.epoch_s + now + view.barred_s, 3)
                    ),
                    "connections": hub.upstreams[view.name].connections,
                }
                for view in hub.balancer.views(now)
            ],
        }

    def command(self, name: str, command: str) -> Answer:
        """Drain or resume an upstream; say how many requests it still has."""
        hub = self._hub
        if name not in hub.upstreams:
            body = error_body(404, "no_such_upstream", f"there is no upstream called {name}")
            return Answer(status=404, body=body)
        act = hub.balancer.drain if command == "drain" else hub.balancer.resume
        in_flight = act(name)
        if command == "drain":
            hub.upstreams[name].close_idle()
        else:
            hub.probe_soon(name)
            hub.pump_soon()
        return _json(200, {"name": name, "draining": command == "drain", "in_flight": in_flight})

    async def _ask_all(
        self, path: str, fields: bytes, *, patience_s: float = _FETCH_TIMEOUT_S
    ) -> list[tuple[str, ResponseHead, bytes]]:
        """GET a path of every usable upstream; return the good answers in order.

        Once one is there, the others are waited for no longer than `patience_s`.
        """
        hub = self._hub
        asked = {
            name: hub.loop.create_task(
                fetch(
                    hub.upstreams[name],
                    path,
                    timeout_s=_FETCH_TIMEOUT_S,
                    fields=fields,
                    limit_bytes=_FETCH_BYTES,
                )
            )
            for name in hub.balancer.usable()
        }
        found: dict[str, tuple[ResponseHead, bytes]] = {}
        pending = set(asked.values())
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=patience_s if found else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for name, task in asked.items():
                    if task in done and task.exception() is None:
                        head, body = task.result()
                        if head.status == 200:
                            found[name] = head, body
                if not done:
                    break
        finally:
            for task in pending:
                task.cancel()
        return [(name, *found[name]) for name in asked if name in found]

    async def models(self, head: RequestHead) -> Answer:
        """Join the models of the living; the same model of several instances is one."""
        hub = self._hub
        fields = hub.upstream_authorization
        if not fields and not len(hub.keys):
            given = field(head.fields, b"authorization")
            fields = b"authorization: %b\r\n" % given if given else b""
        origin = field(head.fields, b"origin")
        if origin:  # a browser's: whether it may read the answer is the engines' to say
            fields += b"origin: %b\r\n" % origin
        answers = await self._ask_all("/v1/models", fields, patience_s=_MODELS_PATIENCE_S)
        models: dict[str, Any] = {}
        known = False
        cors = b""
        for _, answered, body in answers:
            try:
                data = json.loads(body)["data"]
                for model in data:
                    models.setdefault(model["id"], model)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            known = True
            cors = cors or _cors_fields(answered)
        if not known:
            wait_s = hub.balancer.retry_after_s(hub.now())
            body = error_body(503, "no_instance", "no instance says which models it has")
            return Answer(status=503, body=body, fields=b"retry-after: %d\r\n" % wait_s)
        return _json(200, {"object": "list", "data": list(models.values())}, fields=cors)

    async def metrics(self) -> Answer:
        """Return the proxy's metrics, those kept for it in a file, and those of all instances."""
        hub = self._hub
        answers = await self._ask_all("/metrics", hub.upstream_authorization)
        hub.settle()
        own = own_exposition(
            hub.stats,
            hub.balancer.views(hub.now()),
            queued=len(hub.waiting),
            connections=len(hub.clients),
        )
        aggregate = Aggregate()
        aggregate.add(None, own.decode())  # an instance may be such a proxy: each family is one
        aggregate.add(None, _text_of(hub.options.metrics_file))
        for name, _, body in answers:
            # A large exposition must not hold up the streams: in a thread, and one at a time.
            await aside(partial(aggregate.add, name, body.decode("utf-8", "replace")))
        return Answer(status=200, body=aggregate.text().encode(), content_type=CONTENT_TYPE)


def _text_of(path: Path | None) -> str:
    """Return a metrics file; nothing while there is none."""
    if path is None:
        return ""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cors_fields(head: ResponseHead) -> bytes:
    names = (b"access-control-", b"vary")
    return b"".join(one.down for one in head.fields if one.name.startswith(names))
