"""Front: the proxy's settings become its options.

What is None in the settings is the proxy's own default. (The other way, to the words of a command
line, is `config.proxy_words`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zenlaunch.config import PROXY_FILES, ProxySettings, given_to_proxy, parse_listen, parse_size
from zenlaunch.proxy.options import ProxyOptions
from zenlaunch.values import is_loopback

_SIZES = {"max_body_bytes", "body_budget_bytes"}


def open_to_others(settings: ProxySettings, environ: Mapping[str, str]) -> str | None:
    """Warn of a proxy that others than this machine reach and that asks them for no key."""
    host, _ = parse_listen(settings.listen)
    # A key of the engines' own passes through the proxy.
    keys = environ.get("ZENLAUNCH_API_KEYS") or environ.get("VLLM_API_KEY")
    if is_loopback(host) or settings.api_keys_file or keys:
        return None
    where = "all addresses" if host in ("0.0.0.0", "::") else host
    return (
        f"the proxy listens on {where} and asks for no key: whoever reaches this machine may use "
        "the engines (--api-keys-file)"
    )


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
