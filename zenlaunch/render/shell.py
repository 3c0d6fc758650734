"""`render shell`: a plan becomes one bash script that a person can read and run.

It starts each instance bound as planned, waits until all are ready, then runs the proxy; when it
ends, however it ends but by SIGKILL, the instances end with it. It restarts nothing: that is what
`zenlaunch up` and systemd are for. Needs bash, env, setsid, and numactl where memory is bound.
"""

from __future__ import annotations

import shlex

from zenlaunch.binding import split_numactl
from zenlaunch.config import Config
from zenlaunch.errors import RenderError
from zenlaunch.plan import Plan
from zenlaunch.proxy_command import proxy_command
from zenlaunch.render.files import RenderedFile, RenderOptions, header, secret_names
from zenlaunch.spec import LaunchSpec
from zenlaunch.values import host_port

_FUNCTIONS = """\
set -euo pipefail
logs=${LOGS:-logs}
mkdir -p "$logs"
declare -A pids=()

# SIGTERM to the main processes, which finish their requests; SIGKILL to all that is left.
stop() {
    trap - EXIT INT TERM HUP
    local name until=$((SECONDS + drain))
    for name in "${!pids[@]}"; do kill -TERM "${pids[$name]}" 2>/dev/null || true; done
    for name in "${!pids[@]}"; do
        while kill -0 "${pids[$name]}" 2>/dev/null && ((SECONDS < until)); do sleep 0.2; done
        kill -KILL -- "-${pids[$name]}" 2>/dev/null || true
    done
}
trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND...: in a session of its own, so that its whole tree can be ended.
start() {
    local name=$1
    shift
    setsid "$@" >"$logs/$name.log" 2>&1 </dev/null &
    pids[$name]=$!
}

# healthy PORT PATH: one question, over bash's own TCP.
healthy() {
    local status=
    { exec 3<>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null || return 1
    printf 'GET %s HTTP/1.0\\r\\n\\r\\n' "$2" >&3
    read -r -t 10 status <&3 || true
    exec 3>&-
    [[ $status == *" 200"* ]]
}

# ready NAME PORT PATH SECONDS: wait until it serves; give up when it ends or takes too long.
ready() {
    local until=$((SECONDS + $4))
    until healthy "$2" "$3"; do
        if ! kill -0 "${pids[$1]}" 2>/dev/null; then
            echo "$1 ended; the end of $logs/$1.log:" >&2
            tail -n 20 "$logs/$1.log" >&2
            exit 6
        fi
        if ((SECONDS >= until)); then
            echo "$1 is not ready after $4 s; see $logs/$1.log" >&2
            exit 6
        fi
        sleep 0.5
    done
    echo "$1 is ready on port $2" >&2
}
"""


def render(
    plan: Plan, specs: tuple[LaunchSpec, ...], config: Config, options: RenderOptions
) -> tuple[RenderedFile, ...]:
    """Return the script. Raises RenderError for what a shell cannot carry."""
    parts = [
        "#!/usr/bin/env bash\n",
        header(plan, options, "Logs go to ./logs, or to $LOGS. Ctrl-C stops everything."),
        "# shellcheck disable=SC2016 # the engines' words are meant as they stand\n",
        _FUNCTIONS,
        f"drain={int(config.engine.drain_s) + 15}\n",
    ]
    first = True
    for instance, spec in zip(plan.instances, specs, strict=True):
        parts.append(f"\n# {instance.name}: {instance.reason}\n{_start(spec)}\n")
        if first and spec.compile_cache is not None and len(specs) > 1:
            parts.append(f"# Alone at first: it fills the compile cache.\n{_ready(spec)}\n")
        first = False
    parts.append("\n")
    parts += [f"{_ready(spec)}\n" for spec in specs]
    parts.append(f"\n{_proxy(plan, config, options)}\n")
    text = "".join(parts)
    mode = 0o700 if secret_names(config) else 0o755
    return (RenderedFile(path=f"/{options.name}.sh", text=text, mode=mode),)


def _start(spec: LaunchSpec) -> str:
    rows = [["start", spec.name], ["env", *(w for name in spec.unset for w in ("-u", name))]]
    if rows[1] == ["env"] and not spec.env:
        rows.pop()
    rows += [[f"{name}={value}"] for name, value in spec.env.items()]
    rows += [list(part) for part in split_numactl(spec.argv)]
    return " \\\n    ".join(_words(row) for row in rows if row)


def _words(words: list[str]) -> str:
    for word in words:
        if "\0" in word or "\n" in word or "\r" in word:
            raise RenderError(f"{word!r} holds a newline, which the script does not carry")
    return shlex.join(words)


def _ready(spec: LaunchSpec) -> str:
    return _words(
        [
            "ready",
            spec.name,
            str(spec.port),
            spec.health.path,
            str(int(spec.health.start_timeout_s)),
        ]
    )


def _proxy(plan: Plan, config: Config, options: RenderOptions) -> str:
    proxy = plan.proxy
    rows = [["start", "proxy"]]
    if proxy.cpus:
        rows.append(["taskset", "-c", str(proxy.cpus)])
    listen = host_port(proxy.host, proxy.port)
    rows += proxy_command(options.program, plan, config, listen=listen)
    # Not in the foreground: bash would answer a signal only when the proxy has ended.
    wait = _words(["ready", "proxy", str(proxy.port), "/health", "60"])
    return " \\\n    ".join(_words(row) for row in rows) + f'\n{wait}\nwait "${{pids[proxy]}}"'
