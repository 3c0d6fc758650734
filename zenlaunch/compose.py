"""Compose: from a wish to a plan with its launch specs.

The one place that joins reading (probe), deciding (plan) and spelling (engines), for every command
that needs a plan. Knows no options and prints nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zenlaunch.binding import split_numactl
from zenlaunch.config import PROXY_FILES, Config
from zenlaunch.engines import ENGINES, EngineChoice, EngineFacts
from zenlaunch.errors import ConfigError, PlanError, TopologyError
from zenlaunch.memory import ModelSizes
from zenlaunch.named_file import read_named_file
from zenlaunch.plan import Plan, make_plan
from zenlaunch.probe.host import find_engine
from zenlaunch.probe.model import find_model, read_sizes
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.spec import LaunchSpec
from zenlaunch.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A plan, how each of its instances is launched, and what it was made of."""

    topology: Topology
    config: Config
    sizes: ModelSizes
    facts: EngineFacts
    choice: EngineChoice
    plan: Plan
    specs: tuple[LaunchSpec, ...]
    model_folder: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zenlaunch plan --json`."""
        data = self.plan.to_dict()
        for instance, spec in zip(data["instances"], self.specs, strict=True):
            instance["argv"] = list(spec.argv)
            instance["env"] = dict(spec.env)
            instance["unset"] = list(spec.unset)
            instance["shell"] = shell_line(spec)
        return data


def read_machine(machine: str | None, sysroot: Path | None) -> tuple[Topology, bool]:
    """Read a machine: a saved text or probe, a filesystem root, or (neither) this one.

    Returns the topology and whether it is this machine. Raises TopologyError.
    """
    if machine == "":
        raise ConfigError("the name of the machine's file is empty")
    if machine is not None:
        from zenlaunch.probe.read import read_source

        return read_source(
            _read_text(machine), source="standard input" if machine == "-" else machine
        ), False
    if sysroot is not None:
        if not sysroot.is_dir():
            raise TopologyError(
                f"{sysroot} is not a folder", hint="--sysroot DIR reads DIR/sys and DIR/proc"
            )
        return read_sysfs(sysroot, live=False), False
    return read_sysfs(Path("/"), live=True), True


def compose(config: Config, topology: Topology, *, here: bool) -> Composed:
    """Make the plan and the launch specs; `here` says whether it is for this machine.

    Raises ConfigError, PlanError.
    """
    engine = ENGINES.get(config.engine.name)
    if engine is None:
        raise ConfigError(
            f"engine.name: unknown engine {config.engine.name!r}",
            hint=f"one of {', '.join(sorted(ENGINES))}",
        )
    if config.model is None and config.engine.name == "vllm":
        raise ConfigError(
            "no model is named", hint="zenlaunch plan MODEL (a hub name or a folder), or `model:`"
        )
    folder = find_model(config.model, os.environ) if config.model is not None else None
    if config.model is not None and Path(config.model).expanduser().is_dir():
        # A pasted command, a unit and a detached run start in other folders.
        config = replace(config, model=_whole(config.model))
    if here:
        files: dict[str, Any] = {k: _whole(getattr(config.proxy, k)) for k in PROXY_FILES}
        config = replace(config, proxy=replace(config.proxy, **files))
    if here and folder is None and (config.model or "").startswith(("/", "./", "../", "~")):
        raise PlanError(f"the model folder {config.model} does not exist", hint="check the path")
    sizes = ModelSizes() if folder is None else read_sizes(folder, config.engine.args)
    facts = find_engine(config.engine, topology.machine, here=here, environ=os.environ)
    choice = engine.choose(config, facts)
    plan = make_plan(topology, config, sizes=sizes, engine=choice.label)
    plan = replace(plan, notes=(*plan.notes, *choice.notes))
    specs = tuple(engine.launch(i, config, facts, choice, sizes) for i in plan.instances)
    return Composed(
        topology=topology,
        config=config,
        sizes=sizes,
        facts=facts,
        choice=choice,
        plan=plan,
        specs=specs,
        model_folder=folder,
    )


def _whole(path: str | None) -> str | None:
    """Return a path from the root on; None, and "-" for a stream, stay as they are."""
    return path if path in (None, "-") else str(Path(path).expanduser().absolute())


def shell_words(spec: LaunchSpec) -> list[list[str]]:
    """Return the command in groups of words: variables taken out, variables set, program parts."""
    words = [["env", *(w for name in spec.unset for w in ("-u", name))]]
    words.append([f"{name}={value}" for name, value in spec.env.items()])
    words += [list(part) for part in split_numactl(spec.argv)]
    return [group for group in words if group]


def shell_line(spec: LaunchSpec) -> str:
    """Return one line for a shell that gives exactly the environment that `up` gives."""
    return shlex.join(word for group in shell_words(spec) for word in group)


def inherited(spec: LaunchSpec, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that are set here and that the instance starts without."""
    return tuple(name for name in spec.unset if name in environ)


def _read_text(name: str) -> str:
    try:
        return read_named_file(name)
    except OSError as e:
        raise TopologyError(
            f"{name}: {e.strerror}",
            hint="a saved probe, the text of lscpu or numactl -H, or - for stdin",
        ) from None
