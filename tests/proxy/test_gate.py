"""Who is let in: one table."""

from __future__ import annotations

import pytest

from zenlaunch.proxy.gate import (
    ADMIN_ONLY,
    EACH_INSTANCE,
    NO_KEY,
    NO_WEBSOCKET,
    NOT_FOUND,
    WRONG_KEY,
    Refusal,
    examine,
)
from zenlaunch.proxy.http1 import parse_request_head
from zenlaunch.proxy.routes import ROUTES, Action, resolve
from zenlaunch.proxy.trust import KeyRing

KEYS = KeyRing((("alice", "k"),))
ADMINS = KeyRing((("root", "r"),))
NOBODY = KeyRing()


def ask(
    line: str, fields: str = "", *, private: bool = False, keys: KeyRing = KEYS,
    admins: KeyRing = ADMINS,
) -> tuple[Refusal | None, str | None]:  # fmt: skip
    head = parse_request_head(f"{line} HTTP/1.1\r\nhost: x{fields}".encode())
    resolution = resolve(head.method, head.target)
    return examine(head, resolution, private=private, keys=keys, admin_keys=admins)


ALICE = "\r\nauthorization: Bearer k"
DRAIN = "POST /zenlaunch/upstreams/a/drain"


@pytest.mark.parametrize(
    ("line", "fields", "refusal", "name"),
    [
        ("POST /v1/completions", ALICE, None, "alice"),
        ("POST /v1/completions", "\r\nx-api-key: k", None, "alice"),
        ("POST /v1/completions", "", NO_KEY, None),
        ("POST /v1/completions", "\r\nauthorization: Bearer", NO_KEY, None),
        ("POST /v1/completions", "\r\nauthorization: Basic k", NO_KEY, None),
        ("POST /v1/completions", "\r\nauthorization: Bearer no", WRONG_KEY, None),
        ("POST /v1/completions", "\r\nauthorization: Bearer r", WRONG_KEY, None),
        ("OPTIONS /v1/completions", "", None, None),
        ("GET /health", "", None, None),
        ("GET /metrics", "", None, None),
        ("GET /zenlaunch/status", "", NO_KEY, None),
        ("POST /collective_rpc", ALICE, NOT_FOUND, None),
        ("POST /nowhere", "", NOT_FOUND, None),
        ("POST /sleep", ALICE, EACH_INSTANCE, None),
        ("GET /v1/realtime", ALICE, NO_WEBSOCKET, "alice"),
        ("GET /v1/realtime", "", NO_KEY, None),
        ("POST /v1/completions", ALICE + "\r\nupgrade: WebSocket", NO_WEBSOCKET, "alice"),
        (DRAIN, ALICE, ADMIN_ONLY, None),
        (DRAIN, "", ADMIN_ONLY, None),
        (DRAIN, "\r\nauthorization: Bearer r", None, "root"),
    ],
)
def test_who_is_let_in(line: str, fields: str, refusal: Refusal | None, name: str | None) -> None:
    assert ask(line, fields) == (refusal, name)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.action is Action.PROXY],
                         ids=lambda r: r.path)  # fmt: skip
def test_every_inference_route_is_guarded(route: object) -> None:
    path, method = route.path, route.methods[0]  # type: ignore[attr-defined]
    assert ask(f"{method} {path}")[0] is NO_KEY
    assert ask(f"{method} {path}", keys=NOBODY) == (None, None)


def test_the_admin_socket_needs_no_key_and_addresses_give_no_right() -> None:
    assert ask(DRAIN, private=True) == (None, None)
    assert ask("POST /v1/completions", private=True) == (None, None)
    assert ask(DRAIN, keys=NOBODY, admins=NOBODY)[0] is ADMIN_ONLY


def test_wrong_methods_are_told_which_are_right() -> None:
    refusal, _ = ask("GET /v1/completions")
    assert refusal is not None
    assert (refusal.status, refusal.fields) == (405, b"allow: POST, OPTIONS\r\n")
