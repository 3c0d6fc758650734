"""The command line: options become a Config, commands call the rooms below and print the result.

The only place that prints, exits or writes files. What a command needs is imported inside it, so
that `zenlaunch --help` and `zenlaunch plan` start at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zenlaunch import __version__, cli_render
from zenlaunch.cli_options import (
    AsJson,
    ConfigFile,
    ModelArgument,
    Port,
    SysRoot,
    ZenTorch,
    only_one,
    read_config,
    takes_wishes,
)
from zenlaunch.config import (
    Policy,
    parse_listen,
)
from zenlaunch.errors import ConfigError

if TYPE_CHECKING:
    from zenlaunch.events import Outcome
    from zenlaunch.output import UpScreen
    from zenlaunch.plan import Plan
    from zenlaunch.supervisor import Deployment

app = typer.Typer(
    name="zenlaunch",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config", help="About the config file.")
app.add_typer(cli_render.app, name="render", help="Make files that run the plan: systemd, shell.")
app.add_typer(cli_render.guard_app, name="guard", help="What the units ask.", hidden=True)


def run(argv: Sequence[str]) -> int:
    """Run one command; what follows `--` goes to the engine. Returns the exit status."""
    args = list(argv)
    engine_args: tuple[str, ...] = ()
    if "--" in args:
        at = args.index("--")
        args, engine_args = args[:at], tuple(args[at + 1 :])
    status = app(args=args, prog_name="zenlaunch", obj=engine_args, standalone_mode=True)
    return int(status or 0)


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    """Serve LLMs on many-core servers: pinned vLLM instances behind one OpenAI endpoint."""
    if version:
        print(f"zenlaunch {__version__}")
        raise typer.Exit


@app.command()
def probe(
    as_json: AsJson = False,
    sysroot: SysRoot = None,
    source: Annotated[
        str | None,
        typer.Option("--from", show_default=False,
                     help="A saved probe, or text of lscpu or numactl -H; - is standard input."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", show_default=False,
                     help="Pack this machine's description into a folder, to send it."),
    ] = None,
) -> None:  # fmt: skip
    """Show what this machine is: sockets, NUMA nodes, L3 domains, cores."""
    from zenlaunch.compose import read_machine

    only_one({"--from": source, "--sysroot": sysroot})
    topology, _ = read_machine(source, sysroot)
    if as_json:
        print(json.dumps(topology.to_dict(), indent=1))
        return
    from zenlaunch.output import make_console, print_topology

    print_topology(topology, make_console())


@app.command()
@takes_wishes
def plan(
    ctx: typer.Context,
    model: ModelArgument = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the planner's steps.", show_default=False)
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option("--machine", show_default=False,
                     help="Plan for another machine: a saved probe, or text of lscpu."),
    ] = None,
    sysroot: SysRoot = None,
    port: Port = None,
    zentorch: ZenTorch = None,
    *,
    wishes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Show how this machine would be split, and the commands that do it."""
    from zenlaunch.compose import compose, read_machine

    only_one({"--machine": machine, "--sysroot": sysroot})
    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(machine, sysroot)
    composed = compose(config, topology, here=here)
    if as_json:
        print(json.dumps(composed.to_dict(), indent=1))
        return
    from zenlaunch.output import make_console, print_plan, print_steps

    console = make_console()
    if explain:
        print_steps(composed.plan, console)
        return
    print_plan(composed, console, dict(os.environ))


@app.command()
@takes_wishes
def up(
    ctx: typer.Context,
    model: ModelArgument = None,
    config_file: ConfigFile = None,
    name: Annotated[str, typer.Option("--name", help="Name of the deployment.")] = "default",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, start nothing.", show_default=False)
    ] = False,
    ask: Annotated[
        str | None,
        typer.Option("--ask", show_default=False,
                     help="When all is ready, put this question through the proxy."),
    ] = None,
    port: Port = None,
    zentorch: ZenTorch = None,
    *,
    wishes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Start the instances and the proxy; stay until Ctrl-C."""
    from zenlaunch.compose import compose, read_machine
    from zenlaunch.output import UpScreen, make_console, plan_map, print_plan
    from zenlaunch.up import choose_folders, make_deployment, refuse_what_cannot_run

    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(None, None)
    composed = compose(config, topology, here=here)
    refuse_what_cannot_run(composed)
    console = make_console()
    if dry_run:
        print_plan(composed, console, dict(os.environ))
        return
    folders = choose_folders(name, os.environ)
    deployment = make_deployment(name, composed, folders)
    console.print(*plan_map(topology, composed.plan), sep="\n")
    console.print(f"logs in {folders.logs}")
    with UpScreen(composed.plan, console) as screen:
        outcome = _run_deployment(deployment, composed.plan, screen, ask)
    if outcome.error is not None:
        raise outcome.error
    raise typer.Exit(outcome.exit_code)


def _run_deployment(
    deployment: Deployment, plan: Plan, screen: UpScreen, ask: str | None
) -> Outcome:
    """Run until stopped; once all is ready say where, and put the question of --ask."""
    import asyncio

    from zenlaunch import events, observe, supervisor

    host = f"[{plan.proxy.host}]" if ":" in plan.proxy.host else plan.proxy.host
    host = "127.0.0.1" if host in ("0.0.0.0", "[::]") else host
    url = f"http://{host}:{plan.proxy.port}"
    specs = {spec.name: spec for spec in deployment.instances}
    tasks: set[asyncio.Task[None]] = set()

    async def prove(event: events.BecameReady) -> None:
        spec = specs[event.name]
        proof = await asyncio.to_thread(observe.verify, spec, event.pid, event.log)
        screen.show_proof(event.name, proof, spec.mem_nodes)

    async def announce(seconds: float) -> None:
        await asyncio.gather(*(t for t in tasks if t is not asyncio.current_task()))
        screen.settle()
        screen.say(f"ready after {seconds:.0f} s: {url}/v1   (Ctrl-C stops everything)")
        if ask is not None:
            screen.say(await asyncio.to_thread(_ask, url, ask))

    def go(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_event(event: events.Event) -> None:
        screen.handle(event)
        if isinstance(event, events.BecameReady) and event.name in specs:
            go(prove(event))
        elif isinstance(event, events.AllReady):
            go(announce(event.seconds))

    return asyncio.run(supervisor.run(deployment, on_event=on_event))


def _ask(url: str, question: str) -> str:
    """Put one chat question through the proxy and return the answer, or what went wrong."""
    import httpx

    try:
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            answer = client.post(
                "/v1/chat/completions",
                json={
                    "model": model,
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": 32,
                },
            ).raise_for_status()
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as e:
        return f"no answer to {question!r}: {e}"
    text = answer.json()["choices"][0]["message"]["content"]
    return f"{question!r} -> {answer.headers.get('x-zenlaunch-upstream', '?')}: {text!r}"


@app.command()
def proxy(
    upstream: Annotated[
        list[str], typer.Option("--upstream", help="URL or NAME=URL of an engine; repeat it.")
    ],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT.")] = "127.0.0.1:8000",
    policy: Annotated[
        Policy, typer.Option("--policy", help="How an engine is chosen.")
    ] = Policy.LEAST_INFLIGHT,
    admin_socket: Annotated[
        Path | None,
        typer.Option("--admin-socket", help="A unix socket for drain and resume.",
                     show_default=False),
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", help="How long answers may finish at the end.")
    ] = 120.0,
) -> None:  # fmt: skip
    """Run the proxy alone, before engines that somebody else started."""
    from zenlaunch.notify import listen_fd
    from zenlaunch.proxy.balancer import Policy as BalancerPolicy
    from zenlaunch.proxy.options import ProxyOptions
    from zenlaunch.proxy.server import run as serve

    try:
        host, port = parse_listen(listen)
    except ValueError as e:
        raise ConfigError(f"--listen: {e}") from None
    pairs = []
    for k, text in enumerate(upstream):
        name, sep, url = text.partition("=")
        pairs.append((name, url) if sep and "://" not in name else (f"u{k}", text))
    status = serve(
        ProxyOptions(
            upstreams=tuple(pairs),
            listen_host=host,
            listen_port=port,
            listen_fd=listen_fd(),
            policy=BalancerPolicy(policy.value),
            admin_socket=admin_socket,
            drain_s=drain_s,
        )
    )
    raise typer.Exit(status)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the config file, for editors."""
    from zenlaunch.config import json_schema

    print(json.dumps(json_schema(), indent=1))
