"""The commands `render systemd` and `render shell`: wishes become files.

Owns the options, and what is shown and asked before anything is written. The texts come from
`render`, what is on disk from `installed`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zenlaunch.binding import split_numactl
from zenlaunch.blot import argv_without, secrets_of
from zenlaunch.cli_options import (
    ConfigFile,
    ModelArgument,
    Port,
    SysRoot,
    ZenTorch,
    only_one,
    read_config,
    takes_all_wishes,
)
from zenlaunch.config import PROXY_KEY_FILES, Config
from zenlaunch.errors import RenderError
from zenlaunch.topology import Severity

if TYPE_CHECKING:
    from zenlaunch.compose import Composed
    from zenlaunch.installed import Change
    from zenlaunch.render import RenderedFile, RenderOptions
    from zenlaunch.spec import LaunchSpec

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DIFFERS = 5  # exit status of --diff when something differs

MachineOption = Annotated[
    str | None,
    typer.Option("--machine", show_default=False,
                 help="Render for another machine: a saved probe, or text of lscpu."),
]  # fmt: skip
Program = Annotated[
    str | None,
    typer.Option("--program", show_default=False, help="Path of zenlaunch on that machine."),
]


@app.command()
@takes_all_wishes
def systemd(
    ctx: typer.Context,
    model: ModelArgument = None,
    config_file: ConfigFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", show_default=False, help="Write below this folder."),
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", show_default=False, help="Show the diff, ask, write below /."),
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", show_default=False, help="Compare with what is installed.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", show_default=False, help="Do not ask before --install.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Begins every unit's name.")] = "zenlaunch",
    user: Annotated[
        str | None,
        typer.Option("--user", show_default=False, help="The user that runs it (as --name)."),
    ] = None,
    systemd_version: Annotated[
        int, typer.Option("--systemd-version", min=252, help="254 has better keys for restarts.")
    ] = 252,
    with_numactl: Annotated[
        bool,
        typer.Option("--with-numactl", show_default=False, help="Start through numactl as well."),
    ] = False,
    program: Program = None,
    machine: MachineOption = None,
    sysroot: SysRoot = None,
    port: Port = None,
    zentorch: ZenTorch = None,
    *,
    wishes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Make systemd units of the plan: to the screen, a folder, or installed."""
    from zenlaunch.compose import compose, read_machine
    from zenlaunch.installed import (
        changes,
        diff_text,
        install_files,
        refuse_foreign,
        refuse_foreign_folder,
        refuse_without_systemd,
    )
    from zenlaunch.render import RENDERERS, RenderOptions

    only_one({"--output": output, "--install": install or None, "--diff": diff or None})
    only_one({"--machine": machine, "--sysroot": sysroot})
    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(machine, sysroot)
    composed = compose(config, topology, here=here)
    if install:
        _refuse_unknown_sizes(composed)
    if not here and install:
        _refuse_other_machine(composed)
    options = RenderOptions(
        name=name,
        user=user or name,
        program=_find_program(program, here=here or install),
        remake=_remake(sys.argv, config),
        topology=topology,
        model_folder=_folder_of(composed.config.model),
        systemd_version=systemd_version,
        with_numactl=with_numactl,
        numactl=shutil.which("numactl") or "/usr/bin/numactl",
    )
    specs = tuple(replace(s, argv=_whole_program(s.argv, here=here)) for s in composed.specs)
    if here or install:
        options = replace(options, places=_places(options, specs, composed.config))
    files = RENDERERS["systemd"](composed.plan, specs, composed.config, options)
    _warn_of_what_units_lack(options, specs, composed)
    _warn_of_secrets(composed.config, name)
    if output is not None:
        found = changes(files, output, name=name)
        refuse_foreign_folder(output, name)
        refuse_foreign(found)
        install_files(found, say=_say)
        return
    if not install and not diff:
        _print_files(files)
        return
    found = changes(files, Path("/"), name=name)
    print(diff_text(found) or "what is installed is the same", end="" if found else "\n")
    if diff:
        raise typer.Exit(DIFFERS if found else 0)
    refuse_foreign_folder(Path("/"), name)
    refuse_foreign(found)
    if not found:
        return
    refuse_without_systemd(Path("/"))
    if not yes and not typer.confirm("write this?", default=False, err=True):
        raise RenderError("nothing was written", hint="--yes answers the question")
    _stop_what_goes(found)
    install_files(found, say=_say)
    _tell_systemd(options)


@app.command()
@takes_all_wishes
def shell(
    ctx: typer.Context,
    model: ModelArgument = None,
    config_file: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option("--output", show_default=False, help="Write to this file.")
    ] = None,
    program: Program = None,
    machine: MachineOption = None,
    sysroot: SysRoot = None,
    port: Port = None,
    zentorch: ZenTorch = None,
    *,
    wishes: Mapping[str, Any],
) -> None:
    """Make one bash script of the plan."""
    from zenlaunch.compose import compose, read_machine
    from zenlaunch.installed import changes, install_files, refuse_foreign
    from zenlaunch.render import RENDERERS, RenderOptions
    from zenlaunch.render.files import secret_names

    only_one({"--machine": machine, "--sysroot": sysroot})
    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(machine, sysroot)
    composed = compose(config, topology, here=here)
    for note in composed.plan.notes:
        if note.severity is not Severity.INFO:
            _say(f"{note.severity.value}  {note.text}")
    options = RenderOptions(
        program=_find_program(program, here=here),
        remake=_remake(sys.argv, config),
        topology=topology,
    )
    if secrets := secret_names(composed.config):
        _say(f"warning  {', '.join(secrets)} stands in this script as it is: keep it to yourself")
    (file,) = RENDERERS["shell"](composed.plan, composed.specs, composed.config, options)
    if output is None:
        sys.stdout.write(file.text)
        return
    here_file = replace(file, path=output.name)
    written = changes([here_file], output.absolute().parent, name=options.name)
    refuse_foreign(written)
    install_files(written, say=_say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_files(files: Sequence[RenderedFile]) -> None:
    for k, file in enumerate(files):
        print(f"{chr(10) if k else ''}==> {file.path} (mode {file.mode:04o})")
        sys.stdout.write(file.text)


def _warn_of_secrets(config: Config, name: str) -> None:
    """Say which secrets of a config the units hold, and where they would be better."""
    from zenlaunch.render.files import secret_names

    better = f"better in /etc/{name}/secrets.env, which zenlaunch never writes"
    for secret in secret_names(config):
        if secret.startswith("-"):
            _say(f"warning  {secret} stands in units that everybody reads: {better} (VLLM_API_KEY)")
        else:
            _say(f"warning  {secret} stands in the instances' environment files (0600): {better}")


def _folder_of(model: str | None) -> str | None:
    return model if model is not None and model.startswith("/") else None


def _whole_program(argv: tuple[str, ...], *, here: bool) -> tuple[str, ...]:
    """Give the program of a command its whole path, where this is the machine that runs it."""
    numactl, program = split_numactl(argv)
    found = shutil.which(program[0]) if here else None
    return (*numactl, str(Path(found).absolute()), *program[1:]) if found else argv


def _find_program(wish: str | None, *, here: bool) -> tuple[str, ...]:
    if wish is not None:
        return (wish,)
    if not here:
        return ("/usr/local/bin/zenlaunch",)
    beside = Path(sys.executable).with_name("zenlaunch")
    found = str(beside) if beside.is_file() else shutil.which("zenlaunch")
    return (found,) if found else (sys.executable, "-m", "zenlaunch")


def _remake(argv: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return the command without what says where to, which is no part of the files, nor secrets."""
    words, kept = iter(argv[1:]), ["zenlaunch"]
    for word in words:
        if word == "--":
            kept += ["--", *words]
        elif word == "--output":
            next(words, None)
        elif word not in ("--install", "--diff", "--yes") and not word.startswith("--output="):
            kept.append(word)
    engine = config.engine
    return tuple(argv_without(kept, secrets_of(engine.env, engine.args)))


def _read_by_units(options: RenderOptions, specs: Sequence[LaunchSpec], config: Config) -> set[str]:
    """Return the paths that the units name: programs, the model, what else is absolute."""
    words = {*options.program}
    words.update(getattr(config.proxy, key) or "" for key in PROXY_KEY_FILES)
    if options.model_folder is not None:
        words.add(options.model_folder)
        with contextlib.suppress(OSError):
            words.update(str(path) for path in Path(options.model_folder).iterdir())
    for spec in specs:
        words.update(split_numactl(spec.argv)[1])
    return {word for word in words if word.startswith("/")}


def _places(
    options: RenderOptions, specs: Sequence[LaunchSpec], config: Config
) -> dict[str, tuple[str, ...]]:
    from zenlaunch.places import places_of

    return {path: places_of(path) for path in _read_by_units(options, specs, config)}


def _warn_of_what_units_lack(
    options: RenderOptions, specs: Sequence[LaunchSpec], composed: Composed
) -> None:
    """Say what works in this shell and will not in a unit: another user, folder and cache."""
    from zenlaunch.places import closed_to

    paths = sorted(_read_by_units(options, specs, composed.config))
    if not options.places:  # for a machine that is not here
        for path in (p for p in paths if p.startswith("/root/")):
            _say(f"warning: the user {options.user} cannot read {path}: /root is for root alone")
        return
    warned = set()
    for path in paths:
        if path.startswith(("/tmp/", "/var/tmp/")):
            _say(f"warning: the units have a /tmp of their own and will not see {path}")
        for place in (path, *options.places[path]):
            closed = closed_to(options.user, place)
            if closed is None or closed in warned:
                continue
            warned.add(closed)
            what = f"read {closed}" if closed == place else f"enter {closed}, where {place} is"
            _say(
                f"warning: the user {options.user} may not {what}: mend that (chmod, chown), or "
                "choose another --user"
            )
    for word in {word for spec in specs for word in split_numactl(spec.argv)[1]}:
        if not word.startswith("/") and Path(word).is_file():
            _say(f"warning: the units run in another folder: write {Path(word).absolute()}")
    if composed.model_folder is not None and options.model_folder is None:
        _say(
            f"note  {composed.plan.model} is at {composed.model_folder}; the units have a cache of "
            f"their own, /var/cache/{options.name}, and download it there: name the folder to use "
            "this copy"
        )


def _refuse_unknown_sizes(composed: Composed) -> None:
    if any(i.memory.kv_bytes is None for i in composed.plan.instances):
        raise RenderError(
            "the size of the KV cache is not known, so nothing is installed",
            hint="download the model first, or give --weights SIZE or --kv-cache SIZE",
        )


def _refuse_other_machine(composed: Composed) -> None:
    from zenlaunch.compose import read_machine
    from zenlaunch.cpuset import union
    from zenlaunch.same_machine import differences

    here, _ = read_machine(None, None)
    cpus = union(i.cpus for i in composed.plan.instances)
    found = differences(composed.topology, here, cpus=cpus)
    if found:
        raise RenderError(
            "this is not the machine of the plan, so nothing is installed:\n  "
            + "\n  ".join(found),
            hint="leave --machine out to plan for this machine, or use --output",
        )


def _stop_what_goes(found: Sequence[Change]) -> None:
    """Stop instances that the new plan has no more, while their units still say how."""
    import subprocess

    for unit in (c.path.name for c in found if c.new is None and c.path.suffix == ".service"):
        _say(f"stopping {unit}, which the new plan does not have")
        done = subprocess.run(["systemctl", "stop", unit], check=False)
        if done.returncode:
            raise RenderError(f"systemctl stop {unit} ended with {done.returncode}")


def _tell_systemd(options: RenderOptions) -> None:
    """Make the user and the folders, and let systemd read the units."""
    import subprocess

    from zenlaunch.units import DEFAULT_NAME

    for command in (
        ["systemd-sysusers", f"/etc/sysusers.d/{options.name}.conf"],
        ["systemd-tmpfiles", "--create", f"/etc/tmpfiles.d/{options.name}.conf"],
        ["systemctl", "daemon-reload"],
    ):
        try:
            done = subprocess.run(command, check=False)
        except OSError as e:
            raise RenderError(
                f"{command[0]}: {e.strerror}", hint="is this machine run by systemd?"
            ) from e
        if done.returncode:
            raise RenderError(f"{' '.join(command)} ended with {done.returncode}")
    target = f"{options.name}.target"
    running = subprocess.run(["systemctl", "--quiet", "is-active", target], check=False)
    if running.returncode:
        _say(f"installed; start it now and at every boot: systemctl enable --now {target}")
        return
    which = "" if options.name == DEFAULT_NAME else f" --name {options.name}"
    _say(
        f"installed; what runs goes on as it was, until: systemctl start {target}; zenlaunch "
        f"restart --rolling{which}; systemctl restart {options.name}-proxy.service"
    )
