"""`render systemd`: a plan becomes a target, a service per instance, the proxy and its socket.

One file per instance, not a template: CPUs, node, port and command differ in each, so that a
template would need a drop-in per instance, and nobody could read one unit as a whole. Every value
is quoted (`quoting`); the hardening is data (`hardening`). Written for systemd 252, with better
keys where the option says 254. systemd.service(5), systemd.resource-control(5), systemd.exec(5).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from zenlaunch import __version__
from zenlaunch.binding import split_numactl
from zenlaunch.config import PROXY_FILES, PROXY_KEY_FILES, Config
from zenlaunch.errors import RenderError
from zenlaunch.plan import Plan, PlannedInstance, PlannedProxy
from zenlaunch.proxy_command import proxy_command
from zenlaunch.render.files import RenderedFile, RenderOptions, header, plan_digest
from zenlaunch.render.hardening import instance_hardening, proxy_hardening
from zenlaunch.render.quoting import env_line, exec_line, paths, plain
from zenlaunch.spec import LaunchSpec
from zenlaunch.values import counted, host_port, in_gib, is_loopback

SCHEMA = 1
UNITS = "/etc/systemd/system"
PAUSE_S = 15  # between a crash and the next start
LONGEST_PAUSE_S = 300  # of systemd >= 254, which lets the pause grow
BURST = 5
STOP_MARGIN_S = 30
GUARD_S = 120  # what `guard check` may wait for memory of the run before
SLOWEST_READ = 100 << 20  # bytes a second: weights from a disk that nobody has read before
HOMES = ("/home/", "/root/")


def render(
    plan: Plan, specs: tuple[LaunchSpec, ...], config: Config, options: RenderOptions
) -> tuple[RenderedFile, ...]:
    """Return every file of a systemd deployment, in the order in which they are read.

    Raises RenderError for what a unit cannot carry.
    """
    folder = f"/etc/{options.name}"
    pairs = tuple(zip(plan.instances, specs, strict=True))
    files = [
        _target(plan, options),
        *(_instance(plan, i, spec, config, options) for i, spec in pairs),
        _socket(plan, options),
        _proxy(plan, config, options),
        RenderedFile(path=f"{folder}/plan.json", text=plan_file(plan, specs, options)),
        *(_environment(plan, spec, options) for spec in specs),
        RenderedFile(
            path=f"/etc/sysusers.d/{options.name}.conf",
            text=header(plan, options)
            + f'u {options.user} - "zenlaunch" /var/lib/{options.name} /usr/sbin/nologin\n',
        ),
        RenderedFile(
            path=f"/etc/tmpfiles.d/{options.name}.conf",
            text=header(plan, options)
            + f"# The proxy's admin socket; it outlives a restart of the proxy.\n"
            f"d /run/{options.name} 0750 {options.user} {options.user} -\n",
        ),
    ]
    return tuple(files)


def plan_file(plan: Plan, specs: tuple[LaunchSpec, ...], options: RenderOptions) -> str:
    """Return what the guard reads: the plan, its machine, how each instance is asked. No secrets.

    One line per item, so that a diff shows what changed.
    """
    machine = options.topology.to_dict() if options.topology is not None else None
    if machine is not None:
        machine["notes"] = []
        for node in machine["nodes"]:
            node["free_bytes"] = None  # changes by itself
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "zenlaunch": __version__,
        "plan_digest": plan_digest(plan),
        "remake": shlex.join(options.remake),
        "name": options.name,
        "runtime_folder": f"/run/{options.name}",
        "cache_folder": f"/var/cache/{options.name}",
        "model_folder": options.model_folder,
        "plan": plan.to_dict() | {"notes": []},
        "machine": machine,
        "launch": {spec.name: _launch(spec) for spec in specs},
    }
    return _json_by_line(data)


def _launch(spec: LaunchSpec) -> dict[str, Any]:
    return {
        "host": spec.host,
        "port": spec.port,
        "health": asdict(spec.health),
        "memory_bytes": spec.memory_bytes,
        "drain_s": spec.drain_s,
        "preload": spec.env.get("LD_PRELOAD", ""),
        "evidence": asdict(spec.evidence),
        "compile_cache": spec.compile_cache.key if spec.compile_cache else None,
    }


def _json_by_line(data: dict[str, Any]) -> str:
    """Print JSON with one line per leaf list item or short mapping."""

    def write(value: Any, depth: int) -> str:
        whole = json.dumps(value, separators=(", ", ": "))
        if not isinstance(value, dict | list) or not value or len(whole) <= 96 - depth:
            return whole
        pad, end = " " * (depth + 1), " " * depth
        if isinstance(value, dict):
            rows = [f"{json.dumps(k)}: {write(v, depth + 1)}" for k, v in value.items()]
        else:
            rows = [write(v, depth + 1) for v in value]
        brackets = "{}" if isinstance(value, dict) else "[]"
        inside = ",\n".join(pad + row for row in rows)
        return f"{brackets[0]}\n{inside}\n{end}{brackets[1]}"

    return write(data, 0) + "\n"


def _target(plan: Plan, options: RenderOptions) -> RenderedFile:
    name = options.name
    wants = [f"{name}-proxy.socket", f"{name}-proxy.service"]
    wants += [f"{name}-{i.name}.service" for i in plan.instances]
    what = f"{counted(len(plan.instances), 'instance')} of {plan.model or plan.engine}"
    text = (
        header(plan, options, f"Your own changes: systemctl edit {name}.target")
        + f"""
[Unit]
Description={plain(f"zenlaunch: {what} on port {plan.proxy.port}")}
# Wants, never Requires: the others go on when one fails.
{_lines("Wants", wants)}
[Install]
WantedBy=multi-user.target
"""
    )
    return RenderedFile(path=f"{UNITS}/{name}.target", text=text)


def _instance(
    plan: Plan,
    instance: PlannedInstance,
    spec: LaunchSpec,
    config: Config,
    options: RenderOptions,
) -> RenderedFile:
    name, unit = options.name, f"{options.name}-{instance.name}"
    argv = _command(spec, options)
    start_s = start_timeout_s(instance, spec, config)
    waits = spec.compile_cache is not None and instance is not plan.instances[0]
    # Where the first instance fills the cache, the others begin their own start after its.
    start_s = 2 * start_s if waits else start_s
    longest_pause_s = LONGEST_PAUSE_S if options.systemd_version >= 254 else PAUSE_S
    window_s = BURST * (start_s + longest_pause_s) + 60
    guard = exec_line([*options.program, "guard"])
    which = f"--plan /etc/{name}/plan.json --instance {instance.name}"
    model = f" of {plan.model}" if plan.model else ""
    where = counted(len(instance.cpus), "CPU") + (f", memory of node {instance.mem_nodes}"
                                       if instance.mem_nodes else "")  # fmt: skip
    mounts = [f"/var/cache/{name}", f"/var/lib/{name}"]
    if options.model_folder:
        mounts.append(options.model_folder)
    readable = [options.model_folder or "", *options.program, *argv]
    text = (
        header(plan, options, f"Your own changes: systemctl edit {unit}.service")
        + f"""
[Unit]
Description={plain(f"zenlaunch {instance.name}{model}: {where}")}
PartOf={name}.target
After=network.target
RequiresMountsFor={paths(mounts)}
# {BURST} starts within {window_s} s and no more: longer than {BURST} x (start + pause), so that an
# engine which dies at the very end of each start trips it too. Starts by hand count as well:
# systemctl reset-failed lets it start again (zenlaunch restart does so by itself).
StartLimitIntervalSec={window_s}
StartLimitBurst={BURST}

[Service]
Type=exec
User={options.user}
Group={options.user}
StateDirectory={name}
CacheDirectory={name}
WorkingDirectory=/var/lib/{name}
EnvironmentFile=/etc/{name}/{instance.name}.env
# HF_TOKEN, VLLM_API_KEY and the like: a file of root, 0600, that zenlaunch never writes.
EnvironmentFile=-/etc/{name}/secrets.env
{_lines("UnsetEnvironment", [n for n in spec.unset if not n.endswith("*")])}
{_binding(instance)}
ExecStartPre={guard} check {which}
ExecStart={exec_line(argv)}
ExecStartPost={guard} ready {which}
# Out of the proxy first, so that no new request meets an engine that is leaving.
ExecStop=-{guard} drain {which}

# always, not on-failure: an engine that dies at run time exits with status 0.
Restart=always
{_restart(options)}
# SIGTERM to the main process alone (it drains its requests), SIGKILL to all that is left.
KillMode=mixed
# Check, then load {_size(instance)} and compile.
TimeoutStartSec={start_s}
# {spec.drain_s:g} s for requests under way, and {STOP_MARGIN_S} s.
TimeoutStopSec={int(spec.drain_s) + STOP_MARGIN_S}
OOMPolicy=stop
LimitNOFILE=65536
# A core dump would be as large as the model.
LimitCORE=0

{instance_hardening(home=_in_home(readable, options))}"""
    )
    return RenderedFile(path=f"{UNITS}/{unit}.service", text=text)


def start_timeout_s(instance: PlannedInstance, spec: LaunchSpec, config: Config) -> int:
    """Return the seconds an instance may take to be ready: the config's, or by its weights."""
    wished = spec.health.start_timeout_s
    weights = instance.memory.weights_bytes
    if weights is None or wished != Config().engine.start_timeout_s:
        return int(wished) + GUARD_S
    return GUARD_S + max(900, 600 + weights // SLOWEST_READ)


def _size(instance: PlannedInstance) -> str:
    weights = instance.memory.weights_bytes
    return "the weights" if weights is None else f"{in_gib(weights)} of weights"


def _binding(instance: PlannedInstance) -> str:
    lines = [
        "# Contains: a real cpuset, which the engine reads. It fails open (a wrong value leaves",
        "# the service unbound), so `guard check` below refuses to go on unless it holds.",
        f"AllowedCPUs={instance.cpus}",
    ]
    if instance.mem_nodes:
        lines += [
            f"AllowedMemoryNodes={instance.mem_nodes}",
            "# Binds, and fails closed: without that node, systemd itself does not start it.",
            "NUMAPolicy=bind",
            f"NUMAMask={instance.mem_nodes}",
        ]
    lines.append("# No CPUAffinity=: no fence, and it does not come back after a CPU was offline.")
    return "\n".join(lines) + "\n"


def _restart(options: RenderOptions) -> str:
    if options.systemd_version < 254:
        return f"RestartSec={PAUSE_S}"
    return f"RestartSec=5\nRestartSteps=6\nRestartMaxDelaySec={LONGEST_PAUSE_S}"


def _command(spec: LaunchSpec, options: RenderOptions) -> list[str]:
    """Return argv without numactl (systemd binds), or with it where it was asked for."""
    numactl, program = split_numactl(spec.argv)
    if options.with_numactl and numactl:
        return [options.numactl, *numactl[1:], *program]
    return list(program)


def _environment(plan: Plan, spec: LaunchSpec, options: RenderOptions) -> RenderedFile:
    env = {
        "ZENLAUNCH_INSTANCE": f"{options.name}/{spec.name}",
        "XDG_CACHE_HOME": f"/var/cache/{options.name}",
        **spec.env,
    }
    lines = [env_line(name, value) for name, value in env.items()]
    return RenderedFile(
        path=f"/etc/{options.name}/{spec.name}.env",
        text=header(plan, options) + "\n".join(lines) + "\n",
        mode=0o600,
    )


def _socket(plan: Plan, options: RenderOptions) -> RenderedFile:
    name = options.name
    text = (
        header(plan, options, f"Your own changes: systemctl edit {name}-proxy.socket")
        + f"""
[Unit]
Description={plain(f"zenlaunch proxy: {_listen(plan.proxy)}")}
PartOf={name}.target

[Socket]
# Held by systemd: while the proxy restarts, new connections wait and none is refused.
ListenStream={_listen(plan.proxy)}
Backlog=4096
NoDelay=yes
"""
    )
    return RenderedFile(path=f"{UNITS}/{name}-proxy.socket", text=text)


def _proxy(plan: Plan, config: Config, options: RenderOptions) -> RenderedFile:
    name, proxy = options.name, plan.proxy
    drain_s = config.engine.drain_s
    groups = proxy_command(
        options.program, plan, config,
        listen=_listen(proxy), admin_socket=f"/run/{name}/proxy.sock",
    )  # fmt: skip
    argv = [word for group in groups for word in group]
    pinned = f"AllowedCPUs={proxy.cpus}\n" if proxy.cpus else ""
    named = {key: getattr(config.proxy, key) or "" for key in PROXY_FILES}
    for key, path in named.items():
        if path not in ("", "-") and not path.startswith("/"):
            raise RenderError(
                f"proxy.{key}: the unit runs in another folder", hint=f"write all of {path!r}"
            )
    readable = [*options.program, *(named[key] for key in PROXY_KEY_FILES)]
    text = (
        header(plan, options, f"Your own changes: systemctl edit {name}-proxy.service")
        + f"""
[Unit]
Description={plain(f"zenlaunch proxy of {counted(len(plan.instances), 'instance')}")}
PartOf={name}.target
Wants={name}-proxy.socket
After=network.target {name}-proxy.socket
# No start limit: it starts in a second, and without it nothing is served.
StartLimitIntervalSec=0

[Service]
# Ready when it serves; a loop that stands still for 30 s is ended and started anew.
Type=notify
NotifyAccess=main
WatchdogSec=30
User={options.user}
Group={options.user}
# ZENLAUNCH_API_KEYS and the like: a file of root, 0600, that zenlaunch never writes.
EnvironmentFile=-/etc/{name}/secrets.env
ReadWritePaths=/run/{name}
{_log_folder(named["access_log"], name)}{pinned}ExecStart={exec_line(argv)}
# reload: a successor takes over at once, this one finishes its streams. (restart: new requests
# wait in the socket until the streams of this one are done.) The shell's own kill: /bin/kill is a
# package that small systems do not have.
ExecReload=/bin/sh -c 'kill -USR2 $MAINPID'
Restart=always
RestartSec=1
KillMode=mixed
TimeoutStartSec=60
# {drain_s:g} s for answers under way, and {STOP_MARGIN_S} s.
TimeoutStopSec={int(drain_s) + STOP_MARGIN_S}
OOMPolicy=stop
# Two files per stream.
LimitNOFILE=262144
LimitCORE=0

{proxy_hardening(local=is_loopback(proxy.host), home=_in_home(readable, options))}"""
    )
    return RenderedFile(path=f"{UNITS}/{name}-proxy.service", text=text)


def _log_folder(log: str, name: str) -> str:
    """Return what lets the proxy write its access log."""
    folder = log.rpartition("/")[0]
    if folder == f"/var/log/{name}":
        return f"LogsDirectory={name}\n"
    return f"ReadWritePaths={paths([folder])}\n" if folder else ""


def _listen(proxy: PlannedProxy) -> str:
    host = "127.0.0.1" if proxy.host == "localhost" else proxy.host
    if not host.replace(".", "").isdigit() and ":" not in host:
        raise RenderError(
            f"a socket unit needs an address, not the name {host!r}", hint="--listen IP:PORT"
        )
    return host_port(host, proxy.port)


def _in_home(paths: Iterable[str], options: RenderOptions) -> bool:
    """Say whether one of these is read below a home folder, if only by way of a link."""
    places = (place for path in paths for place in (path, *options.places.get(path, ())))
    return any(place.startswith(HOMES) for place in places)


def _lines(key: str, values: list[str]) -> str:
    """Return `key=` lines of at most 100 characters; the key may be given several times."""
    rows: list[str] = []
    for value in values:
        if rows and len(rows[-1]) + 1 + len(value) <= 100:
            rows[-1] += f" {value}"
        else:
            rows.append(f"{key}={value}")
    return "\n".join(rows) + "\n" if rows else ""
