"""Engines: how an instance of the plan becomes a process.

A dict of pure functions, one pair per engine. To add one: a module with `choose` and `launch`, and
a line in ENGINES (README, "How to add an engine").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zenlaunch.config import Config
from zenlaunch.engines import command, vllm
from zenlaunch.engines.facts import EngineChoice, EngineFacts, VersionSource
from zenlaunch.memory import ModelSizes
from zenlaunch.plan import PlannedInstance
from zenlaunch.spec import LaunchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """`choose` decides once for all instances or refuses; `launch` spells one instance."""

    choose: Callable[[Config, EngineFacts], EngineChoice]
    launch: Callable[[PlannedInstance, Config, EngineFacts, EngineChoice, ModelSizes], LaunchSpec]


ENGINES: dict[str, Engine] = {
    "vllm": Engine(choose=vllm.choose, launch=vllm.launch),
    "command": Engine(choose=command.choose, launch=command.launch),
}

__all__ = ["ENGINES", "Engine", "EngineChoice", "EngineFacts", "VersionSource"]
