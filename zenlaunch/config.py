"""Config: what the user wants, as one frozen value.

Owns the schema (defaults, units, what each key accepts), the reading of a YAML file with all its
problems at once, and the laying of command-line options over it. Does not look at the machine.
Pydantic is imported by `load` and `json_schema` only, so that a plan made of flags starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import ConfigError

GIB = 1 << 30

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?)[bB]?\s*$", re.ASCII)
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$", re.ASCII)


class Layout(StrEnum):
    """How a node's cores are dealt to its instances."""

    INTERLEAVE = "interleave"
    CONTIGUOUS = "contiguous"
    L3 = "l3"


class Policy(StrEnum):
    """How the proxy chooses an instance."""

    LEAST_INFLIGHT = "least-inflight"
    ROUND_ROBIN = "round-robin"


class HalfClose(StrEnum):
    """What a client's FIN means while its answer is pending."""

    CANCEL = "cancel"
    ANSWER = "answer"


class Switch(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Recipe(StrEnum):
    """A published split, reproduced exactly."""

    AMD_ZENDNN_5_2 = "amd-zendnn-5.2"


# Pydantic reads these from `__pydantic_config__` of a plain dataclass: no key that is not ours.
_STRICT: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which engine runs, and where.

    `python` is the interpreter of the engine's environment (None: found on this machine);
    `version` names a version for a machine you are not on. `args` go to the engine as they are,
    `env` is set for each instance. `command` is the program of the `command` engine.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    name: str = "vllm"
    python: str | None = None
    version: str | None = None
    zentorch: Switch = Switch.AUTO
    freezing: Switch = Switch.AUTO
    explicit_cpu_list: bool = False
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 1800.0
    drain_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """How the machine is cut. None stands for the planner's default, which it explains."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    recipe: Recipe | None = None
    layout: Layout = Layout.INTERLEAVE
    instances: int | None = None
    instances_per_node: int | None = None
    cores_per_instance: int | None = None
    nodes: str | None = None
    cpus: str | None = None
    threads_per_core: int = 1
    reserve_per_instance: int | None = None
    reserve_proxy: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Sizes: "40G" (GiB), bytes, or "auto"/None. `margin` is a share of a node's total memory."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    kv_cache: str | int = "auto"
    weights: str | int | None = None
    overhead: str | int | None = None
    margin: str = "8%"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The front door's own keys; None stands for the proxy's default (README, "The proxy").

    Times are seconds, sizes as everywhere. `api_keys_file` holds a `name: key` a line;
    `trusted_peers` are networks whose X-Forwarded-* are believed; `access_log` "-" is stderr.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    listen: str = "127.0.0.1:8000"
    policy: Policy = Policy.LEAST_INFLIGHT
    half_close: HalfClose | None = None
    connect_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None
    gap_timeout_s: float | None = None
    keep_alive_s: float | None = None
    queue_timeout_s: float | None = None
    sse_keepalive_s: float | None = None
    max_body_bytes: str | int | None = None
    body_budget_bytes: str | int | None = None
    max_in_flight: int | None = None
    max_in_flight_per_upstream: int | None = None
    max_queued: int | None = None
    api_keys_file: str | None = None
    trusted_peers: tuple[str, ...] = ()
    access_log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole wish. `model` is a hub name or a path; None where a command does not need one."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    model: str | None = None
    base_port: int = 8001
    engine: EngineConfig = field(default_factory=EngineConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    proxy: ProxySettings = field(default_factory=ProxySettings)


def parse_size(value: str | int) -> int:
    """Return bytes for "40G", "1.5GiB", "512MiB" or a plain number of bytes.

    K, M, G and T are powers of 1,024, as vLLM and the kernel use them. Raises ValueError.
    """
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative")
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 40G, 512MiB or 1073741824")
    number, unit = float(match[1]), match[2].upper()
    return int(number * 1024 ** ("KMGT".index(unit) + 1)) if unit else int(number)


def parse_percent(value: str) -> float:
    """Return the fraction for "8%". Raises ValueError unless it is within 0 % and 90 %."""
    match = _PERCENT.match(value)
    if match is None or float(match[1]) > 90:
        raise ValueError(f"{value!r} is not a percentage from 0% to 90%")
    return float(match[1]) / 100


def parse_listen(value: str) -> tuple[str, int]:
    """Return (host, port) for "127.0.0.1:8000", "[::1]:8000" or ":8000". Raises ValueError."""
    host, sep, port_text = value.rpartition(":")
    if not sep or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{value!r} is not HOST:PORT")
    port = int(port_text)
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port} is outside 1-65535")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if ":" in host and not value.startswith("["):
        raise ValueError(f"{value!r}: write an IPv6 address in brackets, [::1]:8000")
    return host or "127.0.0.1", port


def find_problems(config: Config) -> list[str]:
    """Return every problem that can be seen without the machine, each with its dotted path."""
    found: list[str] = []

    def check(path: str, problem: str | None) -> None:
        if problem:
            found.append(f"{path}: {problem}")

    split, memory, engine = config.split, config.memory, config.engine
    check("base_port", None if 1 <= config.base_port <= 65535 else "must be within 1-65535")
    check("proxy.listen", _problem(parse_listen, config.proxy.listen))
    for name in ("instances", "instances_per_node", "cores_per_instance"):
        value = getattr(split, name)
        check(f"split.{name}", "must be at least 1" if value is not None and value < 1 else None)
    for name in ("reserve_per_instance", "reserve_proxy"):
        value = getattr(split, name)
        check(f"split.{name}", "must be at least 0" if value is not None and value < 0 else None)
    if split.instances is not None and split.instances_per_node is not None:
        check("split.instances", "cannot be combined with split.instances_per_node")
    if split.threads_per_core not in (1, 2):
        check("split.threads_per_core", f"must be 1 or 2, not {split.threads_per_core}")
    for name in ("nodes", "cpus"):
        value = getattr(split, name)
        if value is not None:
            check(f"split.{name}", _problem(CpuSet.parse, value) or _empty(value))
    if split.recipe is not None:
        clashing = [
            name
            for name in (
                "instances", "instances_per_node", "cores_per_instance",
                "reserve_per_instance", "reserve_proxy",
            )
            if getattr(split, name) is not None
        ]  # fmt: skip
        if split.layout is not Layout.INTERLEAVE:
            clashing.append("layout")
        if split.threads_per_core != 1:
            clashing.append("threads_per_core")
        for name in clashing:
            check(f"split.{name}", f"cannot be combined with split.recipe {split.recipe.value}")
    if memory.kv_cache != "auto":
        check("memory.kv_cache", _problem(parse_size, memory.kv_cache))
    for name in ("weights", "overhead"):
        value = getattr(memory, name)
        if value is not None:
            check(f"memory.{name}", _problem(parse_size, value))
    check("memory.margin", _problem(parse_percent, memory.margin))
    proxy = config.proxy
    for name in ("max_body_bytes", "body_budget_bytes"):
        value = getattr(proxy, name)
        if value is not None:
            check(f"proxy.{name}", _problem(parse_size, value))
    for field_ in fields(proxy):
        value = getattr(proxy, field_.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            least = "at least 0" if field_.name == "max_queued" else "above 0"
            if field_.name != "max_queued" or value < 0:
                check(f"proxy.{field_.name}", f"must be {least}")
    for name in ("start_timeout_s", "drain_s"):
        check(f"engine.{name}", "must be above 0" if getattr(engine, name) <= 0 else None)
    for key in engine.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            check(f"engine.env.{key}", "is not the name of an environment variable")
    for key, value in engine.env.items():
        check(f"engine.env.{key}", "holds a NUL or a newline" if _unprintable(value) else None)
    for i, arg in enumerate(engine.args):
        check(f"engine.args.{i}", "holds a NUL or a newline" if _unprintable(arg) else None)
    if config.model is not None and (not config.model.strip() or _unprintable(config.model)):
        check("model", "is empty or holds a newline")
    return found


def validated(config: Config, *, source: str = "command line") -> Config:
    """Return the config unchanged; raises ConfigError that lists all its problems."""
    problems = find_problems(config)
    if problems:
        raise _config_error(source, problems)
    return config


def override(config: Config, options: Mapping[str, Any]) -> Config:
    """Lay command-line options over a config: {"split.layout": "l3", "base_port": 9001}.

    An option that is None was not given and changes nothing.
    """
    sections: dict[str, dict[str, Any]] = {}
    for path, value in options.items():
        if value is not None:
            section, _, name = path.rpartition(".")
            sections.setdefault(section, {})[name] = value
    top: dict[str, Any] = sections.pop("", {})
    for section, changes in sections.items():
        top[section] = replace(getattr(config, section), **changes)
    return replace(config, **top)


def load(text: str, *, source: str) -> Config:
    """Read a config file (YAML); `source` is its name, for messages.

    Raises ConfigError that lists every problem with its dotted path and, for an unknown key, the
    nearest known one. Limits are checked by `validated`, after the command line was laid over it.
    """
    from pydantic import TypeAdapter, ValidationError
    from yaml import YAMLError

    try:
        data = _read_yaml(text)
    except YAMLError as e:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(e).split())}") from None
    if data is None:
        return Config()
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}: a config is a mapping of keys, this is a {type(data).__name__}",
            hint="see configs/ for examples, `zenlaunch config schema` for every key",
        )
    try:
        return TypeAdapter(Config).validate_python(data)
    except ValidationError as e:
        raise _config_error(source, [_describe(error) for error in e.errors()]) from None


def given_to_proxy(settings: ProxySettings) -> list[tuple[str, Any]]:
    """Return the proxy's keys, but for address and policy, that are not at their defaults."""
    values = [(f.name, getattr(settings, f.name)) for f in fields(settings)]
    apart = ("listen", "policy")
    return [(name, v) for name, v in values if name not in apart and v not in (None, ())]


def proxy_words(settings: ProxySettings) -> list[str]:
    """Return these keys as options of `zenlaunch proxy`."""
    words: list[str] = []
    for name, value in given_to_proxy(settings):
        for item in value if isinstance(value, tuple) else (value,):
            text = item.value if isinstance(item, StrEnum) else str(item)
            words += [f"--{name.replace('_', '-')}", text]
    return words


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file, for editors."""
    from pydantic import TypeAdapter

    return TypeAdapter(Config).json_schema()


def to_dict(value: Any) -> Any:
    """Return a config as plain data that `load` reads back."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _read_yaml(text: str) -> Any:
    """Read YAML with every scalar as text (null excepted); the schema gives it its type.

    So `freezing: on` is "on" and not True, `version: 0.20` is not 0.2, and a key given twice is an
    error instead of a silent choice.
    """
    import yaml

    class TextLoader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own hook, read once, never changed
            first: [r for r in resolvers if r[0] == "tag:yaml.org,2002:null"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is not text", key_node.start_mark
                    )
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader=TextLoader)


def _config_error(source: str, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    return ConfigError(
        f"{source}: {len(problems)} problems\n" + "\n".join(f"  {p}" for p in problems)
    )


def _describe(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    # A union reports once per branch, with the branch's type as last part: not a key of the user's.
    while location and location[-1] in {"str", "int", "float", "bool"}:
        location.pop()
    path = ".".join(location)
    if error["type"] != "unexpected_keyword_argument":
        shown = error.get("input")
        return f"{path}: {_lower(error['msg'])}, not {shown!r}"
    near = _nearest(location)
    return f"{path}: unknown key" + (f"; did you mean {near}?" if near else "")


def _nearest(location: Sequence[str]) -> str | None:
    from difflib import get_close_matches

    known = [f.name for f in fields(Config)]
    sections = {
        f.name: [g.name for g in fields(getattr(Config(), f.name))]
        for f in fields(Config)
        if is_dataclass(getattr(Config(), f.name))
    }
    name = location[-1]
    if len(location) > 1 and location[0] in sections:
        known = [f"{location[0]}.{k}" for k in sections[location[0]]]
        name = f"{location[0]}.{name}"
    elif not get_close_matches(name, known, n=1):
        # A key of a section written at the top level: name the section it belongs to.
        everywhere = {k: f"{s}.{k}" for s, keys in sections.items() for k in keys}
        match = get_close_matches(name, everywhere, n=1)
        return everywhere[match[0]] if match else None
    match = get_close_matches(name, known, n=1)
    return match[0] if match else None


def _problem(parse: Any, value: Any) -> str | None:
    try:
        parse(value)
    except ValueError as e:
        return str(e)
    return None


def _empty(value: str) -> str | None:
    return None if value.strip() else "is empty"


def _unprintable(text: str) -> bool:
    return "\n" in text or "\0" in text or "\r" in text


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
