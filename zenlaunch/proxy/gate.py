"""Who is let in: from a request's head to a refusal or an admission, before its body is read.

Decides by the route table, the method and the keys; writes nothing. The order matters: what does
not exist is 404 for everybody, a key is asked for only where there is something to guard.
"""

from __future__ import annotations

from dataclasses import dataclass

from zenlaunch.proxy.http1 import RequestHead
from zenlaunch.proxy.routes import Action, Resolution
from zenlaunch.proxy.trust import KeyRing

_PROXY, _ADMIN = Action.PROXY, Action.ADMIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer instead of service; `fields` is whole header lines."""

    status: int
    code: str
    message: str
    fields: bytes = b""


NOT_FOUND = Refusal(status=404, code="not_found", message="there is no such route here")
EACH_INSTANCE = Refusal(
    status=404,
    code="not_found",
    message="this route changes one instance only: send it to each instance itself",
)
ADMIN_ONLY = Refusal(
    status=403,
    code="admin_only",
    message="administration needs the admin socket or an admin key",
)
NO_KEY = Refusal(
    status=401,
    code="invalid_api_key",
    message="an API key is needed",
    fields=b"www-authenticate: Bearer\r\n",
)
WRONG_KEY = Refusal(
    status=401,
    code="invalid_api_key",
    message="the API key is not valid",
    fields=b"www-authenticate: Bearer\r\n",
)
NO_WEBSOCKET = Refusal(
    status=501, code="websocket_not_supported", message="WebSocket is not relayed yet"
)


def examine(
    head: RequestHead,
    resolution: Resolution,
    *,
    private: bool,
    keys: KeyRing,
    admin_keys: KeyRing,
) -> tuple[Refusal | None, str | None]:
    """Return why a request is refused, if it is, and the name of the key it came with.

    `private` requests come through the admin socket: its file's mode is their key.
    """
    route = resolution.route
    if route is None:
        return NOT_FOUND, None
    action = route.action
    if action is not _PROXY:
        if action is Action.BLOCKED:
            return NOT_FOUND, None
        if action is Action.EACH_INSTANCE:
            return EACH_INSTANCE, None
    if resolution.allow:
        return _not_allowed(resolution), None
    name = None
    if private or head.method == "OPTIONS":  # a CORS preflight carries no key
        pass
    elif action is _ADMIN:
        name = admin_keys.name_of(head.key) if len(admin_keys) else None
        if name is None:
            return ADMIN_ONLY, None
    elif route.guarded and len(keys):
        name = keys.name_of(head.key)
        if name is None:
            return (WRONG_KEY if head.key else NO_KEY), None
    if b"websocket" in head.upgrade or (action is not _PROXY and action is Action.WEBSOCKET):
        return NO_WEBSOCKET, name
    return None, name


def _not_allowed(resolution: Resolution) -> Refusal:
    assert resolution.route is not None
    return Refusal(
        status=405,
        code="method_not_allowed",
        message=f"{resolution.route.path} takes {' or '.join(resolution.allow)}",
        fields=b"allow: %b\r\n" % ", ".join(resolution.allow).encode(),
    )
