"""The route table: which paths reach an engine, which the proxy answers, which nobody reaches.

An allow list. A request's path must be one of the table's paths byte for byte, and the path that
is sent upstream is the table's own spelling, never the client's: percent-encoding, dot segments,
double slashes or capitals cannot name a blocked route. Routes that are known and refused are listed
too, so that the refusal can say why. Knows nothing of headers, bodies or connections.
Source of the rows: the routes of a vLLM 0.32 server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Action(StrEnum):
    """What the proxy does with a request for a route."""

    PROXY = "proxy"
    HEALTH = "health"
    LOAD = "load"
    METRICS = "metrics"
    MODELS = "models"
    STATUS = "status"
    ADMIN = "admin"
    WEBSOCKET = "websocket"
    EACH_INSTANCE = "each-instance"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One row of the table.

    `guarded` routes need an API key when keys are configured. `stateless` requests may be sent
    again to another instance while no byte of their answer was forwarded. Event streams of a route
    with `ends_with_done` are complete only when they end with `data: [DONE]`; with `named_events`
    each event says what it is, so that an error must too.
    """

    path: str
    methods: tuple[str, ...]
    action: Action
    guarded: bool = True
    stateless: bool = True
    ends_with_done: bool = False
    named_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a request target means: `route` None is 404, `allow` set is 405.

    `target` is what to send upstream: the table's path with the client's query. `upstream` and
    `command` are set for the admin routes.
    """

    route: Route | None
    target: bytes = b""
    allow: tuple[str, ...] = ()
    upstream: str = ""
    command: str = ""


def _rows(
    action: Action,
    methods: str,
    *paths: str,
    guarded: bool = True,
    ends_with_done: bool = False,
    named_events: bool = False,
) -> tuple[Route, ...]:
    return tuple(
        Route(
            path=path,
            methods=tuple(methods.split()),
            action=action,
            guarded=guarded,
            ends_with_done=ends_with_done,
            named_events=named_events,
        )
        for path in paths
    )


# OPTIONS passes without a key: a browser's CORS preflight carries none, and the engine answers it.
ROUTES: tuple[Route, ...] = (
    *_rows(
        Action.PROXY,
        "POST OPTIONS",
        "/v1/chat/completions",
        "/v1/completions",
        ends_with_done=True,
    ),
    *_rows(Action.PROXY, "POST OPTIONS", "/v1/messages", "/v1/responses", named_events=True),
    *_rows(
        Action.PROXY,
        "POST OPTIONS",
        "/v1/chat/completions/batch",
        "/v1/messages/count_tokens",
        "/v1/systemone",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/generative_scoring",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
        "/cohere/v2/chat",
    ),
    *_rows(
        Action.PROXY,
        "GET HEAD",
        "/tokenizer_info",
        "/version",
        "/openapi.json",
        "/docs",
        "/redoc",
    ),
    *_rows(Action.MODELS, "GET HEAD OPTIONS", "/v1/models"),
    *_rows(Action.HEALTH, "GET HEAD", "/health", guarded=False),
    *_rows(Action.HEALTH, "GET HEAD POST", "/ping", guarded=False),
    *_rows(Action.METRICS, "GET HEAD", "/metrics", guarded=False),
    *_rows(Action.LOAD, "GET HEAD", "/load"),
    *_rows(Action.STATUS, "GET HEAD", "/zenlaunch/status"),
    *_rows(Action.WEBSOCKET, "GET", "/v1/realtime"),
    *_rows(
        Action.EACH_INSTANCE,
        "",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/adapters",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/release_kv_cache_memory",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/start_profile",
        "/stop_profile",
        "/kv_event_sources",
    ),
    *_rows(
        Action.BLOCKED,
        "",
        "/invocations",
        "/collective_rpc",
        "/server_info",
        "/abort_requests",
        "/update_weights",
        "/init_weight_transfer_engine",
        "/weight_info",
        "/weight_checker",
        "/get_world_size",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/fault_tolerance/apply",
        "/fault_tolerance/status",
        "/inference/v1/generate",
        "/inference/v1/abort_requests",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/derender",
    ),
)

_BY_PATH = {route.path.encode(): route for route in ROUTES}
_ADMIN_PATH = re.compile(rb"/zenlaunch/upstreams/([A-Za-z0-9._-]{1,64})/(drain|resume)")
_ADMIN = Route(path="/zenlaunch/upstreams/NAME", methods=("POST",), action=Action.ADMIN)
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_NOT_FOUND = Resolution(route=None)


@lru_cache(maxsize=512)
def _known(method: str, target: bytes) -> Resolution:
    return _resolve(method, target)


def resolve(method: str, target: bytes) -> Resolution:
    """Find what a request for `target` (origin or absolute form) may do.

    A route that is known but refused is returned with its action; everything else unknown has
    `route` None. A known path with another method has `allow` set.
    """
    return _known(method, target) if len(target) <= 512 else _resolve(method, target)


def _resolve(method: str, target: bytes) -> Resolution:
    if target[:1] != b"/":
        absolute = _ABSOLUTE.match(target)
        if absolute is None:
            return _NOT_FOUND
        target = target[absolute.end() :]
        if target[:1] != b"/":
            target = b"/" + target
    path, mark, query = target.partition(b"?")
    route = _BY_PATH.get(path)
    upstream = command = ""
    if route is None:
        admin = _ADMIN_PATH.fullmatch(path)
        if admin is None:
            return _NOT_FOUND
        route, upstream, command = _ADMIN, admin[1].decode(), admin[2].decode()
    if route.methods and method not in route.methods:
        return Resolution(route=route, allow=route.methods)
    return Resolution(route=route, target=path + mark + query, upstream=upstream, command=command)
