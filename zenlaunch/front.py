"""Front: the proxy's settings become its options.

What is None in the settings is the proxy's own default. (The other way, to the words of a command
line, is `config.proxy_words`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zenlaunch.config import PROXY_FILES, ProxySettings, given_to_proxy, parse_listen, parse_size
from zenlaunch.proxy.options import ProxyOptions

_SIZES = {"max_body_bytes", "body_budget_bytes"}


def proxy_options(
    settings: ProxySettings,
    upstreams: Sequence[tuple[str, str]],
    *,
    admin_socket: Path | None,
    upstream_key_file: Path | None = None,
    metrics_file: Path | None = None,
    listen_fd: int | None,
    drain_s: float,
) -> ProxyOptions:
    """Return what `proxy.server.run` takes; raises ProxyError for contradictions."""
    host, port = parse_listen(settings.listen)
    given: dict[str, Any] = {}
    for name, value in given_to_proxy(settings):
        if name in _SIZES:
            value = parse_size(value)
        elif name in PROXY_FILES:
            value = Path(value)
        given[name] = value
    return ProxyOptions(
        upstreams=tuple(upstreams),
        listen_host=host,
        listen_port=port,
        listen_fd=listen_fd,
        policy=settings.policy,
        admin_socket=admin_socket,
        upstream_key_file=upstream_key_file,
        metrics_file=metrics_file,
        drain_s=drain_s,
        **given,
    )
