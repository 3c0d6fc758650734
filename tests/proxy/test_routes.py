"""The route table: what passes, what the proxy answers, what no spelling reaches."""

from __future__ import annotations

import pytest

from zenlaunch.proxy.routes import ROUTES, Action, resolve

BLOCKED = [r for r in ROUTES if r.action in (Action.BLOCKED, Action.EACH_INSTANCE)]
REACHES_ENGINE = {r.path.encode() for r in ROUTES if r.action is Action.PROXY}


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: r.path)
def test_every_row_resolves_to_itself(route: object) -> None:
    for row in ROUTES:
        for method in row.methods:
            found = resolve(method, row.path.encode())
            assert found.route is row
            assert not found.allow
            assert found.target == row.path.encode()


def test_paths_are_unique() -> None:
    assert len({r.path for r in ROUTES}) == len(ROUTES)


def spellings(path: str) -> list[str]:
    first, second = path[1], path[1:]
    return [
        path + "/", "/" + path, path + "//", "/." + path, "/x/.." + path, path + "/.",
        f"/%{ord(first):02x}{path[2:]}", f"/%{ord(first):02X}{path[2:]}", path.upper(),
        path.title(), path + "%20", path + "%00", path + ";x=1", "/%2e%2e" + path,
        "/v1/chat/completions/.." + path, "/v1/completions/../.." + path, "\\" + second,
        "/v1/completions%2f.." + path, path.replace("_", "%5f"), "//x" + path, path + "\\",
        "http:" + path, "///" + second, path + "%2f", "/v1" + path,
    ]  # fmt: skip


@pytest.mark.parametrize("route", BLOCKED, ids=lambda r: r.path)
def test_no_spelling_of_a_blocked_route_reaches_an_engine(route: object) -> None:
    path = route.path  # type: ignore[attr-defined]
    for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD"):
        for spelling in [path, *spellings(path), "http://h" + path, "HTTP://h:1" + path]:
            found = resolve(method, spelling.encode())
            if found.route is not None and found.route.action is Action.PROXY and not found.allow:
                assert spelling.encode() in REACHES_ENGINE, spelling


@pytest.mark.parametrize("route", [r for r in ROUTES if r.action is Action.PROXY],
                         ids=lambda r: r.path)  # fmt: skip
def test_what_is_sent_upstream_is_the_tables_spelling(route: object) -> None:
    path = route.path  # type: ignore[attr-defined]
    for spelling in spellings(path):
        found = resolve("POST", spelling.encode())
        if found.route is not None and not found.allow:
            assert found.target.split(b"?")[0].decode() in {r.path for r in ROUTES} | {
                found.target.decode()} & {spelling}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (b"/v1/completions?a=%2e%2e&b=/../x", b"/v1/completions?a=%2e%2e&b=/../x"),
        (b"http://any.host/v1/completions?x", b"/v1/completions?x"),
        (b"HTTPS://user@h:99/v1/completions", b"/v1/completions"),
    ],
)
def test_queries_and_absolute_form(target: bytes, sent: bytes) -> None:
    assert resolve("POST", target).target == sent


@pytest.mark.parametrize("target", [b"*", b"", b"x", b"http://h", b"http://h?x", b"h:443", b"/v1"])
def test_unknown_targets(target: bytes) -> None:
    assert resolve("GET", target).route is None


def test_method_not_allowed() -> None:
    assert resolve("GET", b"/v1/completions").allow == ("POST", "OPTIONS")
    assert resolve("DELETE", b"/health").allow == ("GET", "HEAD")


@pytest.mark.parametrize("name", ["i0", "a.b-c_d", "x" * 64])
def test_admin_routes(name: str) -> None:
    found = resolve("POST", f"/zenlaunch/upstreams/{name}/drain".encode())
    assert (found.upstream, found.command) == (name, "drain")
    assert found.route is not None
    assert found.route.action is Action.ADMIN
    assert resolve("GET", f"/zenlaunch/upstreams/{name}/resume".encode()).allow == ("POST",)


@pytest.mark.parametrize("name", ["", "a/b", "..%2f", "x" * 65, "a b", "ä"])
def test_admin_routes_with_odd_names(name: str) -> None:
    assert resolve("POST", f"/zenlaunch/upstreams/{name}/drain".encode()).route is None


def test_stateless_and_endings() -> None:
    done = {r.path for r in ROUTES if r.ends_with_done}
    assert done == {"/v1/completions", "/v1/chat/completions"}
    open_to_all = {r.path for r in ROUTES if not r.guarded}
    assert open_to_all == {"/health", "/ping", "/metrics"}
