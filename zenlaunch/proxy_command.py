"""The proxy's command line, for whoever starts it: `up`, the units, the script.

Owns its words and their order, so that no way to start the proxy loses an option of the config.
Pure. The other way, from the options to what the proxy is told, is `front`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zenlaunch.config import Config, proxy_words
from zenlaunch.plan import Plan


def proxy_command(
    program: Sequence[str],
    plan: Plan,
    config: Config,
    *,
    listen: str,
    admin_socket: str | None = None,
    upstream_key_file: str | None = None,
    metrics_file: str | None = None,
) -> list[list[str]]:
    """Return the words in groups: program and options, then an upstream each.

    `program` is how zenlaunch is called, `listen` HOST:PORT.
    """
    options = ["--listen", listen, "--policy", plan.proxy.policy]
    if admin_socket is not None:
        options += ["--admin-socket", admin_socket]
    options += ["--drain-s", f"{config.engine.drain_s:.15g}"]
    if upstream_key_file is not None:
        options += ["--upstream-key-file", upstream_key_file]
    if metrics_file is not None:
        options += ["--metrics-file", metrics_file]
    options += proxy_words(config.proxy)
    upstreams = [["--upstream", f"{i.name}=http://127.0.0.1:{i.port}"] for i in plan.instances]
    return [[*program, "proxy", *options], *upstreams]
