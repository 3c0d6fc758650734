"""Any server program as an engine: bound and supervised like vLLM, told nothing of its own.

`engine.args` is the whole command; `{port}`, `{host}`, `{name}`, `{model}`, `{cpus}`, `{threads}`
in it are filled in. For engines that zenlaunch does not know, and for tests with real processes.
"""

from __future__ import annotations

from zenlaunch.binding import numactl_argv
from zenlaunch.config import Config
from zenlaunch.engines.facts import EngineChoice, EngineFacts
from zenlaunch.errors import ConfigError
from zenlaunch.memory import ModelSizes
from zenlaunch.plan import PlannedInstance
from zenlaunch.spec import HealthCheck, LaunchSpec


def choose(config: Config, facts: EngineFacts) -> EngineChoice:
    """Check that there is a command; raises ConfigError."""
    if not config.engine.args:
        raise ConfigError(
            "the engine `command` needs engine.args, the command of one instance",
            hint="for example: zenlaunch plan --engine command -- my-server --port {port}",
        )
    if config.engine.args[0].startswith("-"):
        raise ConfigError(
            f"the engine `command` begins with a program, not with {config.engine.args[0]!r}"
        )
    if "{port}" not in " ".join(config.engine.args):
        raise ConfigError(
            "the engine `command` needs {port} in engine.args: each instance has its own port"
        )
    return EngineChoice(label="command", title=f"command {config.engine.args[0]}")


def launch(
    instance: PlannedInstance,
    config: Config,
    facts: EngineFacts,
    choice: EngineChoice,
    sizes: ModelSizes,
) -> LaunchSpec:
    """Return how one instance is started."""
    values = {
        "{port}": str(instance.port),
        "{host}": "127.0.0.1",
        "{name}": instance.name,
        "{model}": config.model or "",
        "{cpus}": instance.engine_cpus.to_commas(),
        "{threads}": str(len(instance.engine_cpus)),
    }
    return LaunchSpec(
        name=instance.name,
        argv=(*numactl_argv(instance.binding), *(_fill(arg, values) for arg in config.engine.args)),
        env=dict(config.engine.env),
        port=instance.port,
        cpus=instance.cpus,
        engine_cpus=instance.engine_cpus,
        mem_nodes=instance.mem_nodes,
        memory_bytes=instance.memory.total_bytes,
        health=HealthCheck(start_timeout_s=config.engine.start_timeout_s),
        drain_s=config.engine.drain_s,
    )


def _fill(arg: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        arg = arg.replace(name, value)
    return arg
