"""The command line: options become a Config, commands call the rooms below and print the result.

The only place that prints, exits or writes files. What a command needs is imported inside it, so
that `zenlaunch --help` and `zenlaunch plan` start at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zenlaunch import __version__, cli_render, cli_run
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
from zenlaunch.stdout import write_line

app = typer.Typer(
    name="zenlaunch",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config", help="About the config file.")
app.add_typer(cli_render.app, name="render", help="Make units or a script of the plan.")


def run(argv: Sequence[str]) -> int:
    """Run one command; what follows `--` goes to the engine. Returns the exit status."""
    args = list(argv)
    engine_args: tuple[str, ...] = ()
    if "--" in args:
        at = args.index("--")
        args, engine_args = args[:at], tuple(args[at + 1 :])
    try:
        status = app(args=args, prog_name="zenlaunch", obj=engine_args, standalone_mode=False)
    except Exception as e:
        # A mistake in the options: typer's own exceptions show themselves (and are of a class that
        # moved between its versions).
        if type(e).__name__ == "Abort":  # Ctrl-C
            return 130
        if not (hasattr(e, "show") and hasattr(e, "exit_code")):
            raise
        e.show()
        return int(e.exit_code)
    return status if isinstance(status, int) else 0


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
    """Show what this machine is.

    Sockets, NUMA nodes, L3 domains, cores.
    """
    only_one({"--from": source, "--sysroot": sysroot})
    only_one({"--from": source, "--save": save})
    if save is not None:
        from zenlaunch.probe.dump import save_dump

        print(save_dump(sysroot or Path("/"), save))
        print(
            "nothing private is in it; attach it to an issue, with what is wrong", file=sys.stderr
        )
        return
    from zenlaunch.compose import read_machine

    topology, _ = read_machine(source, sysroot)
    if as_json:
        write_line(json.dumps(topology.to_dict(), indent=1))
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
    """Show how it would be split.

    And the commands that do it. What follows `--` goes to the engine:
    zenlaunch plan MODEL -- --max-model-len 8192
    """
    from zenlaunch.compose import compose, read_machine

    only_one({"--machine": machine, "--sysroot": sysroot})
    only_one({"--json": as_json or None, "--explain": explain or None})
    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(machine, sysroot)
    composed = compose(config, topology, here=here)
    if as_json:
        write_line(json.dumps(composed.to_dict(), indent=1))
        return
    from zenlaunch.output import make_console, print_plan, print_steps

    console = make_console()
    if explain:
        print_steps(composed.plan, console)
        return
    print_plan(composed, console, dict(os.environ))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the config file, for editors."""
    from zenlaunch.config import json_schema

    write_line(json.dumps(json_schema(), indent=1))


for _command in (
    cli_run.up, cli_run.status, cli_run.verify, cli_run.logs, cli_run.restart, cli_run.down,
    cli_run.proxy,
):  # fmt: skip
    app.command()(_command)
