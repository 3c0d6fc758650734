"""What the proxy is told at its start: one frozen value with the defaults of every limit.

Built by the command line or by `up`; knows nothing of how it is read or kept. Times are seconds,
sizes bytes. Contradictions raise `ProxyError` here, before anything is opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path

from zenlaunch.config import HalfClose, Policy
from zenlaunch.errors import ProxyError
from zenlaunch.proxy.address import UpstreamAddress, address_of
from zenlaunch.proxy.balancer import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """All that `run` needs.

    `upstreams` are (name, URL) pairs. `listen_fd` is a socket that listens already (systemd); host
    and port are then not bound. Paths are None where the feature is off; `access_log` "-" is
    stderr. `api_keys_file` and `admin_keys_file` hold a `name: key` (or a bare key) per line;
    `api_keys_env` names a variable with the same, separated by commas. `upstream_key_file` holds
    the one key that the engines were given. `metrics_file` is Prometheus text that somebody else
    keeps, added to `/metrics`.
    """

    upstreams: tuple[tuple[str, str], ...]
    listen_host: str = "127.0.0.1"
    listen_port: int = 8000
    listen_fd: int | None = None
    policy: Policy = Policy.LEAST_INFLIGHT
    half_close: HalfClose = HalfClose.CANCEL

    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 900.0
    gap_timeout_s: float = 300.0
    head_timeout_s: float = 15.0
    body_grace_s: float = 30.0
    body_min_rate: int = 1024  # bytes a second, on average, once the grace is over
    keep_alive_s: float = 75.0
    client_stall_s: float = 300.0
    pool_idle_s: float = 4.0  # below the 5 s after which uvicorn closes an idle connection
    queue_timeout_s: float = 30.0
    drain_s: float = 120.0
    sse_keepalive_s: float | None = None

    max_body_bytes: int = 64 * 2**20
    body_budget_bytes: int = 512 * 2**20
    max_pipelined_bytes: int = 2**20
    hold_bytes: int = 2**20  # answers that are not streamed are forwarded whole up to this size
    max_connections: int | None = None  # None: what the limit on open files allows
    max_in_flight: int | None = 8192
    max_in_flight_per_upstream: int | None = None
    max_queued: int = 1024

    probe_path: str = "/health"
    probe_interval_s: float = 1.0  # while not ready
    probe_ready_interval_s: float = 5.0
    probe_timeout_s: float = 10.0
    probe_misses: int = 3
    hang_s: float = 120.0  # requests, silence and a counter that stands still: no more requests
    eject_after: int = 3
    eject_s: float = 5.0
    eject_max_s: float = 60.0

    api_keys_file: Path | None = None
    api_keys_env: str | None = "ZENLAUNCH_API_KEYS"
    admin_keys_file: Path | None = None
    upstream_key_file: Path | None = None
    trusted_peers: tuple[str, ...] = ()  # networks whose X-Forwarded-* are believed
    admin_socket: Path | None = None
    access_log: Path | None = None
    metrics_file: Path | None = None

    addresses: tuple[UpstreamAddress, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", _addresses(self.upstreams))
        for network in self.trusted_peers:
            try:
                ip_network(network, strict=False)
            except ValueError as error:
                raise ProxyError(f"trusted peer {network!r}: {error}") from error
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ProxyError(f"{name} must be more than 0, not {value}")
        if self.listen_fd is None and not 0 <= self.listen_port < 65536:
            raise ProxyError(f"port {self.listen_port} is not between 0 and 65535")

    @property
    def rules(self) -> Rules:
        """The balancer's part of the options."""
        return Rules(
            eject_after=self.eject_after,
            eject_s=self.eject_s,
            eject_max_s=self.eject_max_s,
            probe_misses=self.probe_misses,
            max_in_flight=self.max_in_flight,
            max_in_flight_per_upstream=self.max_in_flight_per_upstream,
        )


# Every time and size but these, for which 0 has a meaning.
_POSITIVE = (
    *(
        name
        for name in ProxyOptions.__dataclass_fields__
        if name.endswith(("_s", "_bytes", "_rate", "_misses", "_after"))
        and name not in ("drain_s", "hold_bytes", "max_pipelined_bytes")
    ),
    "max_connections",
    "max_in_flight",
    "max_in_flight_per_upstream",
)


def _addresses(upstreams: tuple[tuple[str, str], ...]) -> tuple[UpstreamAddress, ...]:
    found: dict[str, UpstreamAddress] = {}
    for name, url in upstreams:
        address = address_of(name, url)
        if name in found:
            raise ProxyError(f"two upstreams are called {name!r}")
        found[name] = address
    return tuple(found.values())
