"""Config: what the user wants, as one frozen value.

Owns the schema (defaults, units, what each key accepts), the reading of a config file with all its
problems at once, and the laying of command-line options over it. Does not look at the machine.
Pydantic is imported by `load` and `json_schema` only, so that a plan made of flags starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import ConfigError
from zenlaunch.values import GIB as GIB
from zenlaunch.values import MIB, shown, unprintable
from zenlaunch.values import parse_listen as parse_listen
from zenlaunch.values import parse_percent as parse_percent
from zenlaunch.values import parse_size as parse_size
from zenlaunch.yaml_text import read_yaml

_LONGEST_S = 30 * 86400.0
_MOST = 1_000_000_000  # of anything that is counted
_MOST_PROBLEMS = 20
_SIZES = ("memory.", "proxy.max_body_bytes", "proxy.body_budget_bytes")


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
    `env` is set for each instance. For the engine `command`, `args` are the whole command.
    `look_every_s` is how often a running instance's threads and pages are looked at.
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
    look_every_s: float = 60.0


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


# Keys of ProxySettings that name files: what the proxy reads, and what it writes ("-" is stderr).
PROXY_KEY_FILES = ("api_keys_file", "admin_keys_file")
PROXY_FILES = (*PROXY_KEY_FILES, "access_log")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The front door's own keys; None stands for the proxy's default (README, "The proxy").

    Times are seconds, sizes as everywhere. `api_keys_file` holds a `name: key` a line, and so does
    `admin_keys_file` for who may drain and resume without the admin socket;
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
    hang_s: float | None = None
    max_body_bytes: str | int | None = None
    body_budget_bytes: str | int | None = None
    max_in_flight: int | None = None
    max_in_flight_per_upstream: int | None = None
    max_queued: int | None = None
    api_keys_file: str | None = None
    admin_keys_file: str | None = None
    trusted_peers: tuple[str, ...] = ()
    access_log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A deployment. `model` is a hub name or a folder; `base_port` is the first instance's."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    model: str | None = None
    base_port: int = 8001
    engine: EngineConfig = field(default_factory=EngineConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    proxy: ProxySettings = field(default_factory=ProxySettings)


def find_problems(config: Config) -> list[str]:
    """Return every problem that can be seen without the machine, each with its dotted path."""
    found: list[str] = []
    plain: set[str] = set()  # paths whose text or number is wrong in itself: one problem is enough

    def check(path: str, problem: str | None) -> None:
        if problem and path not in plain:
            found.append(f"{path}: {problem}")

    for path, value in _leaves(config):
        problem = _plainly_wrong(path, value)
        check(path, problem)
        plain |= {path} if problem else set()
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
            check(f"split.{name}", _problem(CpuSet.parse, value))
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
        check(
            "memory.kv_cache",
            _problem(_size_above_0, memory.kv_cache) or _problem(_size_meant, memory.kv_cache),
        )
    for name in ("weights", "overhead"):
        value = getattr(memory, name)
        if value is not None:
            check(f"memory.{name}", _problem(_size_meant, value))
    check("memory.margin", _problem(parse_percent, memory.margin))
    proxy = config.proxy
    for name in ("max_body_bytes", "body_budget_bytes"):
        value = getattr(proxy, name)
        if value is not None:
            check(f"proxy.{name}", _problem(_size_above_0, value))
    for field_ in fields(proxy):
        value = getattr(proxy, field_.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            least = "at least 0" if field_.name == "max_queued" else "above 0"
            if field_.name != "max_queued" or value < 0:
                check(f"proxy.{field_.name}", f"must be {least}")
    for name in ("start_timeout_s", "drain_s", "look_every_s"):
        check(f"engine.{name}", "must be above 0" if getattr(engine, name) <= 0 else None)
    for key in engine.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            check(f"engine.env.{_part(key)}", "is not the name of an environment variable")
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

    data = read_yaml(text, source=source)
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


def _config_error(source: str, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    lines = [f"  {p}" for p in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"  and {len(problems) - _MOST_PROBLEMS} more")
    return ConfigError(f"{source}: {len(problems)} problems\n" + "\n".join(lines))


def _describe(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    unknown = error["type"] == "unexpected_keyword_argument"
    # A union reports once per branch, with the branch's type as last part: not a key of the user's.
    while not unknown and len(location) > 1 and location[-1] in {"str", "int", "float", "bool"}:
        location.pop()
    path = ".".join(map(_part, location))
    if not unknown:
        # Pydantic speaks of Python's types, the user wrote YAML.
        kind = {"tuple_type": "a list", "dict_type": "a mapping", "dataclass_type": "a mapping"}
        known = kind.get(error["type"])
        message = f"input should be {known}" if known else _lower(error["msg"])
        return f"{path}: {message}, not {shown(error.get('input'))}"
    near = _nearest(location)
    return f"{path}: unknown key" + (f"; did you mean {near}?" if near else "")


def _nearest(location: Sequence[str]) -> str | None:
    from difflib import get_close_matches

    if len(location[-1]) > 80:
        return None
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


def _size_above_0(value: str | int) -> None:
    if parse_size(value) == 0:
        raise ValueError("must be above 0")


def _size_meant(value: str | int) -> None:
    """Refuse a bare number so small that GiB was meant; raises ValueError."""
    size = parse_size(value)
    if 0 < size < MIB and str(value).strip().isdigit():
        raise ValueError(f"{value} is {size} bytes; write {value}G for GiB")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give each text and number of a config with its dotted path, down into lists and mappings."""
    if is_dataclass(value):
        items = [(f.name, getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, Mapping):
        items = [(_part(key), item) for key, item in value.items()]
    elif isinstance(value, tuple):
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        yield path, value
        return
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}" if path else name)


def _plainly_wrong(path: str, value: Any) -> str | None:
    """Say what no text, time or count may be, whatever its key."""
    if isinstance(value, str):
        # What goes to the engine as it is may be empty.
        if not value.strip() and not path.startswith(("engine.args.", "engine.env.")):
            return "is empty: give it a value or leave it out"
        return "holds a NUL, a newline or another control character" if unprintable(value) else None
    if isinstance(value, float) and not -_LONGEST_S <= value <= _LONGEST_S:
        return f"must be a time of at most {_LONGEST_S:.0f} s (30 days), not {value:g}"
    if type(value) is int and abs(value) > _MOST and not path.startswith(_SIZES):
        return f"must be at most {_MOST}, not {shown(value)}"
    return None


def _part(key: str) -> str:
    """Return a key as part of a path; one that would not show is quoted."""
    return key if key.strip() and len(key) <= 80 and key.isprintable() else shown(key)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
