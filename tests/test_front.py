"""Front: every key of the proxy reaches it, by the config file and by the words of `up`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from zenlaunch import config as c
from zenlaunch.cli_options import takes_proxy_wishes
from zenlaunch.config import HalfClose
from zenlaunch.front import open_to_others, proxy_options
from zenlaunch.proxy.options import ProxyOptions

TEXT = """
proxy:
  listen: 0.0.0.0:9000
  policy: round-robin
  half_close: answer
  connect_timeout_s: 1
  first_byte_timeout_s: 2
  gap_timeout_s: 3
  keep_alive_s: 4
  queue_timeout_s: 5
  sse_keepalive_s: 6
  max_body_bytes: 7M
  body_budget_bytes: 8M
  max_in_flight: 9
  max_in_flight_per_upstream: 10
  max_queued: 11
  hang_s: 12
  api_keys_file: /keys
  admin_keys_file: /admins
  trusted_peers: [10.0.0.0/8, 192.168.0.0/16]
  access_log: "-"
"""


def options(settings: c.ProxySettings) -> ProxyOptions:
    return proxy_options(
        settings, [("i0", "http://127.0.0.1:8001")], admin_socket=None, listen_fd=None, drain_s=12
    )


def test_defaults_are_the_proxys_own() -> None:
    assert options(c.ProxySettings()) == ProxyOptions(
        upstreams=(("i0", "http://127.0.0.1:8001"),), drain_s=12
    )


def test_every_key_arrives() -> None:
    settings = c.validated(c.load(TEXT, source="f")).proxy
    assert all(getattr(settings, f.name) not in (None, ()) for f in fields(settings))
    found = options(settings)
    assert (found.listen_host, found.listen_port, found.drain_s) == ("0.0.0.0", 9000, 12)
    assert found.half_close is HalfClose.ANSWER
    assert found.policy.value == "round-robin"
    numbers = (
        found.connect_timeout_s, found.first_byte_timeout_s, found.gap_timeout_s,
        found.keep_alive_s, found.queue_timeout_s, found.sse_keepalive_s,
        found.max_body_bytes >> 20, found.body_budget_bytes >> 20, found.max_in_flight,
        found.max_in_flight_per_upstream, found.max_queued, found.hang_s,
    )  # fmt: skip
    assert numbers == tuple(range(1, 13))
    assert (found.api_keys_file, found.admin_keys_file) == (Path("/keys"), Path("/admins"))
    assert found.trusted_peers == ("10.0.0.0/8", "192.168.0.0/16")
    assert found.access_log == Path("-")


def test_the_words_of_up_say_the_same() -> None:
    """What `up` and the units put on the proxy's command line, read back by its own options."""
    settings = c.load(TEXT, source="f").proxy
    seen: dict[str, object] = {}
    app = typer.Typer()

    @app.command()
    @takes_proxy_wishes
    def proxy(*, wishes: dict[str, object]) -> None:
        seen.update(wishes)

    result = CliRunner().invoke(app, c.proxy_words(settings))
    assert result.exit_code == 0, result.output
    seen["proxy.trusted_peers"] = tuple(seen["proxy.trusted_peers"])  # type: ignore[arg-type]
    again = c.override(
        c.Config(), {**seen, "proxy.listen": "0.0.0.0:9000", "proxy.policy": c.Policy.ROUND_ROBIN}
    )
    assert options(again.proxy) == options(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_in_flight", 0), ("gap_timeout_s", -1.0), ("max_queued", -1), ("max_body_bytes", "big")],
)
def test_bad_values(key: str, value: object) -> None:
    problems = c.find_problems(c.override(c.Config(), {f"proxy.{key}": value}))
    assert [p for p in problems if p.startswith(f"proxy.{key}:")]
    assert not c.find_problems(c.override(c.Config(), {"proxy.max_queued": 0}))


@pytest.mark.parametrize(
    ("listen", "environ", "warned"),
    [
        ("127.0.0.1:8000", {}, False),
        ("127.1.2.3:8000", {}, False),
        ("[::1]:8000", {}, False),
        ("localhost:8000", {}, False),
        (":8000", {}, False),
        ("0.0.0.0:8000", {}, True),
        ("[::]:8000", {}, True),
        ("10.0.0.7:8000", {}, True),
        ("10.0.0.7:8000", {"ZENLAUNCH_API_KEYS": "k"}, False),
        ("0.0.0.0:8000", {"VLLM_API_KEY": "k"}, False),
    ],
)
def test_a_door_that_is_open_to_others_is_told(
    listen: str, environ: dict[str, str], warned: bool
) -> None:
    text = open_to_others(c.ProxySettings(listen=listen), environ)
    assert (text is not None) is warned
    kept = c.ProxySettings(listen=listen, api_keys_file="/keys")
    assert open_to_others(kept, environ) is None
