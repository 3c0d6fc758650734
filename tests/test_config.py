"""Config: sizes, addresses, files with every kind of mistake, flags laid over files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zenlaunch import config as c
from zenlaunch.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40G", 40 << 30), ("40GiB", 40 << 30), ("40 gb", 40 << 30), ("1.5G", 3 << 29),
        ("512M", 512 << 20), ("2T", 2 << 40), ("7k", 7 << 10), ("123", 123), (5, 5), ("0", 0),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert c.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "40Gi B", "forty", "1.2.3G", -1, "１G"])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size|negative"):
        c.parse_size(text)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        (":80", ("127.0.0.1", 80)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("host.example:9", ("host.example", 9)),
    ],
)
def test_addresses(text: str, pair: tuple[str, int]) -> None:
    assert c.parse_listen(text) == pair


@pytest.mark.parametrize("text", ["8000", "a:", "a:x", "a:0", "a:65536", "::1:80", "", "a:²"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port|brackets"):
        c.parse_listen(text)


def test_percentages() -> None:
    assert c.parse_percent("8%") == pytest.approx(0.08)
    assert c.parse_percent(" 0 %") == 0
    for text in ("8", "91%", "-1%", "%"):
        with pytest.raises(ValueError, match="percentage"):
            c.parse_percent(text)


FILES: dict[str, tuple[str, str]] = {
    "unknown key": ("engin: {}", "f.yaml: engin: unknown key; did you mean engine?"),
    "key of a section": ("layout: l3", "f.yaml: layout: unknown key; did you mean split.layout?"),
    "unknown without a neighbour": ("zzz: 1", "f.yaml: zzz: unknown key"),
    "unknown in a section": (
        "split: {instance: 1}", "split.instance: unknown key; did you mean split.instances?",
    ),
    "wrong type": ("split: {instances: three}", "split.instances: input should be a valid integer"),
    "wrong word": ("split: {layout: foo}", "split.layout: input should be 'interleave'"),
    "a list": ("[]", "a config is a mapping of keys, this is a list"),
    "not yaml": ("a: [", "not YAML"),
    "twice": ("model: a\nmodel: b", "given twice"),
    "number as key": ("1: a\n? [x]\n: y", "is not text"),
    "section that is text": ("split: l3", "split: input should be"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_with_mistakes(name: str) -> None:
    text, message = FILES[name]
    with pytest.raises(ConfigError) as caught:
        c.load(text, source="f.yaml")
    assert message in caught.value.message
    assert caught.value.exit_code == 2


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        c.load("split: {layout: foo, cpu: 1}\nmodel: [x]", source="f.yaml")
    assert "3 problems" in caught.value.message


def test_values_keep_their_text() -> None:
    text = """
model: m
engine: {version: 0.20, freezing: on, args: [--max-model-len, 8192], env: {A: 1, B: no}}
split: {nodes: 0, cpus: 0-7, instances_per_node: 2, layout: contiguous}
memory: {kv_cache: 1.5G, margin: 5%}
proxy: {listen: ":9000", policy: round-robin}
"""
    config = c.load(text, source="f.yaml")
    assert config.engine.version == "0.20"
    assert config.engine.freezing is c.Switch.ON
    assert config.engine.args == ("--max-model-len", "8192")
    assert config.engine.env == {"A": "1", "B": "no"}
    assert config.split.nodes == "0"
    assert config.split.instances_per_node == 2
    assert config.proxy.policy is c.Policy.ROUND_ROBIN
    assert c.validated(config) is config
    assert c.load("", source="f.yaml") == c.Config()
    assert c.load("split: {instances: ~}", source="f.yaml") == c.Config()


BAD: dict[str, Any] = {
    "base_port": 0,
    "proxy.listen": "x",
    "split.instances": 0,
    "split.instances_per_node": -1,
    "split.cores_per_instance": 0,
    "split.reserve_per_instance": -1,
    "split.reserve_proxy": -1,
    "split.threads_per_core": 3,
    "split.nodes": "a",
    "split.cpus": " ",
    "memory.kv_cache": "lots",
    "memory.weights": "x",
    "memory.overhead": "x",
    "memory.margin": "8",
    "engine.start_timeout_s": 0.0,
    "engine.drain_s": -1.0,
    "engine.env": {"1A": "x", "B": "a\nb"},
    "engine.args": ("a\0b",),
    "model": " ",
}


@pytest.mark.parametrize("path", BAD)
def test_bad_values_are_named(path: str) -> None:
    config = c.override(c.Config(), {path: BAD[path]})
    with pytest.raises(ConfigError) as caught:
        c.validated(config, source="f.yaml")
    assert f"{path}" in caught.value.message


def test_what_cannot_be_combined() -> None:
    both = c.override(c.Config(), {"split.instances": 2, "split.instances_per_node": 2})
    assert c.find_problems(both) == [
        "split.instances: cannot be combined with split.instances_per_node"
    ]
    recipe = c.override(
        c.Config(),
        {
            "split.recipe": c.Recipe.AMD_ZENDNN_5_2,
            "split.layout": c.Layout.L3,
            "split.threads_per_core": 2,
            "split.reserve_proxy": 1,
        },
    )
    assert len(c.find_problems(recipe)) == 3


def test_flags_win_over_the_file() -> None:
    file = c.load("model: a\nbase_port: 9001\nsplit: {instances: 2}", source="f.yaml")
    config = c.override(file, {"split.instances": 4, "base_port": None, "model": "b"})
    assert (config.model, config.base_port, config.split.instances) == ("b", 9001, 4)


def test_round_trip_and_schema() -> None:
    import yaml

    config = c.override(
        c.Config(model="m"), {"split.layout": c.Layout.L3, "engine.args": ("--x", "1")}
    )
    assert c.load(yaml.safe_dump(c.to_dict(config)), source="f") == config
    schema = c.json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"model", "base_port", "engine", "split", "memory", "proxy"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert c.validated(c.load(path.read_text(), source=path.name)).model
