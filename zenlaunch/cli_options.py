"""Options that several commands share: one per key of the config, from one table.

Owns their names and their way into a Config. Reads the config file; decides nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zenlaunch.config import (
    Config,
    HalfClose,
    Layout,
    Policy,
    Recipe,
    Switch,
    load,
    override,
    parse_listen,
    validated,
)
from zenlaunch.errors import ConfigError
from zenlaunch.named_file import read_named_file
from zenlaunch.values import host_port


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One key of the config as a command-line option."""

    path: str
    kind: Any
    flags: tuple[str, ...]
    help: str

    @property
    def name(self) -> str:
        return self.path.replace(".", "_")


def _option(path: str, kind: Any, flag: str, help_text: str) -> _Option:
    return _Option(path=path, kind=kind, flags=(flag,), help=help_text)


# Every option that a plan can be changed with; the config file has the same keys.
WISHES = (
    _option("split.instances", int, "--instances", "Instances in all."),
    _option("split.instances_per_node", int, "--instances-per-node", "Instances per NUMA node."),
    _option("split.cores_per_instance", int, "--cores-per-instance", "Cores of each instance."),
    _option("split.layout", Layout, "--layout", "How a node's cores are dealt out."),
    _option("split.nodes", str, "--nodes", "NUMA nodes to use, such as 0,1."),
    _option("split.cpus", str, "--cpus", "CPUs to use, such as 0-63 (also isolated ones)."),
    _option("split.threads_per_core", int, "--threads-per-core", "1, or 2 with SMT."),
    _option("split.reserve_per_instance", int, "--reserve-per-instance",
            "Cores of each instance kept free of engine threads."),
    _option("split.reserve_proxy", int, "--reserve-proxy", "Cores for the proxy; 0: not pinned."),
    _option("split.recipe", Recipe, "--recipe", "A published split, exactly."),
    _option("memory.kv_cache", str, "--kv-cache", "KV cache of each instance (40G), or auto."),
    _option("memory.weights", str, "--weights", "Size of the weights, if the files are not here."),
    _option("memory.overhead", str, "--overhead", "Memory beside weights and KV cache (4G)."),
    _option("memory.margin", str, "--memory-margin", "Share of each node left alone (8%)."),
    _option("proxy.listen", str, "--listen", "HOST:PORT of the proxy."),
    _option("proxy.policy", Policy, "--policy", "How the proxy chooses an instance."),
    _option("base_port", int, "--base-port", "Port of the first instance."),
    _option("engine.name", str, "--engine", "vllm, or command."),
    _option("engine.python", str, "--python", "The interpreter of vLLM's environment."),
    _option("engine.version", str, "--vllm-version", "vLLM's version, if it is not here."),
    _option("engine.freezing", Switch, "--freezing", "TORCHINDUCTOR_FREEZING: auto, on, off."),
    _option("engine.explicit_cpu_list", bool, "--explicit-cpu-list/--no-explicit-cpu-list",
            "Give vLLM a list of CPUs instead of a memory node."),
    _option("engine.env", list[str], "--env", "KEY=VALUE for each instance; repeat it."),
    _option("engine.start_timeout_s", float, "--start-timeout-s", "How long a start may take."),
    _option("engine.drain_s", float, "--drain-s", "How long the last answers may take at a stop."),
    _option("engine.look_every_s", float, "--look-every-s", "How often placement is looked at."),
)  # fmt: skip


# The proxy's own keys; for the commands that start one or say how.
PROXY_WISHES = (
    _option("proxy.half_close", HalfClose, "--half-close",
            "What a client's FIN means while its answer is pending."),
    _option("proxy.connect_timeout_s", float, "--connect-timeout-s", "To reach an engine (5)."),
    _option("proxy.first_byte_timeout_s", float, "--first-byte-timeout-s",
            "From request to the first byte of the answer (900)."),
    _option("proxy.gap_timeout_s", float, "--gap-timeout-s", "Between two bytes (300)."),
    _option("proxy.keep_alive_s", float, "--keep-alive-s", "An idle client connection (75)."),
    _option("proxy.queue_timeout_s", float, "--queue-timeout-s", "In the queue (30)."),
    _option("proxy.sse_keepalive_s", float, "--sse-keepalive-s",
            "Send comments into silent streams (off)."),
    _option("proxy.hang_s", float, "--hang-s",
            "An engine with requests whose step counter stands still so long gets no more (120)."),
    _option("proxy.max_body_bytes", str, "--max-body-bytes", "Largest request (64M)."),
    _option("proxy.body_budget_bytes", str, "--body-budget-bytes", "All bodies held (512M)."),
    _option("proxy.max_in_flight", int, "--max-in-flight", "Requests under way (8192)."),
    _option("proxy.max_in_flight_per_upstream", int, "--max-in-flight-per-upstream",
            "The same for each engine (no limit)."),
    _option("proxy.max_queued", int, "--max-queued", "Requests that wait (1024)."),
    _option("proxy.api_keys_file", str, "--api-keys-file", "A `name: key` a line."),
    _option("proxy.admin_keys_file", str, "--admin-keys-file",
            "The same for who may drain and resume engines (nobody)."),
    _option("proxy.trusted_peers", list[str], "--trusted-peers",
            "Network whose X-Forwarded-* are believed; repeat it."),
    _option("proxy.access_log", str, "--access-log", "JSON lines; - is stderr (off)."),
)  # fmt: skip


def takes_wishes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per key of WISHES; it receives them as `wishes`, by dotted path."""
    return _takes(WISHES, command)


def takes_all_wishes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of WISHES and PROXY_WISHES."""
    return _takes((*WISHES, *PROXY_WISHES), command)


def takes_proxy_wishes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of PROXY_WISHES."""
    return _takes(PROXY_WISHES, command)


def _takes(options: Sequence[_Option], command: Callable[..., None]) -> Callable[..., None]:
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values()
           if p.name != "wishes"]  # fmt: skip
    added = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                option.kind | None,
                typer.Option(*option.flags, help=option.help, show_default=False),
            ],
        )
        for option in options
    ]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        wishes = {option.path: given.pop(option.name) for option in options}
        command(**given, wishes=wishes)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


ModelArgument = Annotated[
    str | None, typer.Argument(help="A hub name or a folder.", show_default=False)
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-f", help="A config file (YAML).", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]
SysRoot = Annotated[
    Path | None,
    typer.Option("--sysroot", help="Read DIR/sys and DIR/proc of another machine.",
                 show_default=False),
]  # fmt: skip
Port = Annotated[int | None, typer.Option("--port", help="Port of the proxy.", show_default=False)]
ZenTorch = Annotated[
    bool | None,
    typer.Option("--zentorch/--no-zentorch", help="Use ZenTorch, or do not.", show_default=False),
]


def read_config(
    ctx: typer.Context,
    model: str | None,
    config_file: Path | None,
    port: int | None,
    zentorch: bool | None,
    wishes: Mapping[str, Any],
) -> Config:
    """Lay the command line over the config file and check the result."""
    config = Config()
    if config_file is not None:
        try:
            text = read_named_file(str(config_file))
        except OSError as e:
            raise ConfigError(f"{config_file}: {e.strerror}") from None
        # By itself first: what is wrong after this is the command line's.
        config = validated(load(text, source=str(config_file)), source=str(config_file))
    given = dict(wishes)
    if (peers := given.get("proxy.trusted_peers")) is not None:
        given["proxy.trusted_peers"] = tuple(peers)
    if (pairs := given.pop("engine.env", None)) is not None:
        given["engine.env"] = {**config.engine.env, **_environment(pairs)}
    config = override(config, {**given, "model": model})
    if zentorch is not None:
        config = override(config, {"engine.zentorch": Switch.ON if zentorch else Switch.OFF})
    engine_args: tuple[str, ...] = ctx.obj or ()
    if engine_args:
        config = override(config, {"engine.args": (*config.engine.args, *engine_args)})
    config = validated(config)
    if port is None:
        return config
    host, _ = parse_listen(config.proxy.listen)
    listen = replace(config.proxy, listen=host_port(host, port))
    return validated(replace(config, proxy=listen))


def _environment(pairs: Sequence[str]) -> dict[str, str]:
    env = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not sep:
            raise ConfigError(f"--env {pair!r} is not KEY=VALUE")
        env[name] = value
    return env


def only_one(options: Mapping[str, object]) -> None:
    """Refuse options that exclude each other; raises ConfigError."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined")
