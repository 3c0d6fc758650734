"""Config: sizes, addresses, files with every kind of mistake, flags laid over files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from zenlaunch import config as c
from zenlaunch.errors import ConfigError
from zenlaunch.values import host_port, shown
from zenlaunch.yaml_text import read_yaml

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40G", 40 << 30), ("40GiB", 40 << 30), ("40 gb", 40 << 30), ("1.5G", 3 << 29),
        ("512M", 512 << 20), ("2T", 2 << 40), ("7k", 7 << 10), ("123", 123), (5, 5), ("0", 0),
        ("1048576T", 1 << 60), ("1152921504606846975", (1 << 60) - 1), (1 << 60, 1 << 60),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert c.parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "G", "-1G", "1e9", "40Gi B", "forty", "1.2.3G", -1, "１G", "9" * 5000, "9" * 400 + "T",
     "1048577T", "1048576.5T", (1 << 60) + 1, 10**4000, -(10**4000), "1." + "0" * 5000 + "G",
     "nan", "infG", "x" * 5000, "\x1b[2J", "\ud800"],
)  # fmt: skip
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ValueError, match="size") as caught:
        c.parse_size(text)
    assert_readable(str(caught.value))


def assert_readable(message: str) -> None:
    assert len(message) < 250
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        (":80", ("127.0.0.1", 80)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("host.example:9", ("host.example", 9)),
        ("my_host-2.:9", ("my_host-2.", 9)),
        ("[fe80::1%eth0]:9", ("fe80::1%eth0", 9)),
        ("[::ffff:1.2.3.4]:9", ("::ffff:1.2.3.4", 9)),
    ],
)
def test_addresses(text: str, pair: tuple[str, int]) -> None:
    assert c.parse_listen(text) == pair
    assert c.parse_listen(host_port(*pair)) == pair


@pytest.mark.parametrize(
    "text",
    ["8000", "a:", "a:x", "a:0", "a:65536", "::1:80", "", "a:²", "[::1", "[::1:80", "::1]:80",
     "[]:80", "[a]:80", "[1.2.3.4]:80", "[::1]x:80", "[[::1]]:80", "[::1%]:80", "[::1%a b]:80",
     "[fe80::1%\n]:80", "a/b:80", "a b:80", "http://a:80", "user@a:80", "*:80", "a\n:80", "a:80\n",
     "a\0:80", "1.2.3:80", "256.1.1.1:80", "1.2.3.4.5:80", "1:80", "-a:80", "a..b:80", ".:80",
     "a" * 64 + ":80", "a." * 130 + "a:80", "a:" + "9" * 5000, "ä:80", "\ud800:80"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port|brackets") as caught:
        c.parse_listen(text)
    assert_readable(str(caught.value))


def test_percentages() -> None:
    assert c.parse_percent("8%") == pytest.approx(0.08)
    assert c.parse_percent(" 0 %") == 0
    for text in (
        "8",
        "91%",
        "-1%",
        "%",
        "9" * 5000 + "%",
        "nan%",
        "8%\n8%",
        "0." + "0" * 5000 + "%",
    ):
        with pytest.raises(ValueError, match="percentage") as caught:
            c.parse_percent(text)
        assert_readable(str(caught.value))


def test_values_are_shown_short_and_plain() -> None:
    assert shown("a\x1b'\ud800") == '"a\\x1b\'\\ud800"'
    assert shown("x" * 80) == f"'{'x' * 80}'"
    assert shown("x" * 81) == f"'{'x' * 77}'..."
    assert shown(10**5000) == "a number of about 5001 digits"
    assert [shown(v) for v in (None, [], (), {}, 1.5, -7)] == [
        "null", "a list", "a list", "a mapping", "1.5", "-7",
    ]  # fmt: skip


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
    "section that is text": ("split: l3", "split: input should be a mapping, not 'l3'"),
    "text for a list": ("engine: {args: x}", "engine.args: input should be a list, not 'x'"),
    "text for a mapping": ("engine: {env: x}", "engine.env: input should be a mapping, not 'x'"),
    "list for a text": ("model: [x]", "model: input should be a valid string, not a list"),
    "empty key": ('"": x', "f.yaml: '': unknown key"),
    "key like a type": ("str: 1", "f.yaml: str: unknown key"),
    "key of a section like a type": ("split: {int: 1}", "f.yaml: split.int: unknown key"),
    "neither text nor number": ("memory: {kv_cache: [x]}", "memory.kv_cache: input should be a"),
    "key with a hidden mark": ("model\u200b: x", "f.yaml: 'model\\u200b': unknown key; did you"),
    "key with an escape": ('"\\e[2J": x', "f.yaml: '\\x1b[2J': unknown key"),
    "key without end": ("a: b\n" + "x" * 5000 + ": 1", "not YAML: line 2, column "),
    "long key": ("? " + "x" * 5000 + "\n: y", f"f.yaml: '{'x' * 77}'...: unknown key"),
    "long value": ("base_port: " + "x" * 5000, f"not '{'x' * 77}'..."),
    "many digits": ("base_port: " + "9" * 5000, "base_port: "),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_with_mistakes(name: str) -> None:
    text, message = FILES[name]
    with pytest.raises(ConfigError) as caught:
        c.load(text, source="f.yaml")
    assert message in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("tag", ["int", "bool", "float", "timestamp", "binary", "set", "omap"])
@pytest.mark.parametrize("value", ['""', '"q"', '"2020-13-45"', "{a}", "[a: b]"])
def test_tags_are_refused_by_their_line(tag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: line 2, column 8: a config has no .*!!{tag}"):
        c.load(f"\nmodel: !!{tag} {value}", source="f")
    with pytest.raises(ConfigError, match=f"^f: line 1, column 1: a config has no .*!!{tag}"):
        c.load(f"!!{tag} {value}", source="f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !own b", "line 1, column 4: a config has no scalar with the tag '!own'"),
        ("a: !<tag:yaml.org,2002:python/name:os.system> b", "a config has no scalar with the tag"),
        ("!!merge x: {a: b}", "line 1, column 1: a config has no scalar with the tag '!!merge'"),
        ("a: !!map [b]", "line 1, column 4: a config has no sequence with the tag '!!map'"),
        ("a: !!str {b: c}", "line 1, column 4: a config has no mapping with the tag '!!str'"),
        ("a: !!null x", "line 1, column 4: 'x' is tagged as null and is not"),
        ("a: &x [*x]", "line 1, column 4: holds itself by its alias"),
        ('a: "\\ud800"', "line 1, column 4: '\\ud800' holds half a surrogate pair"),
        ('a: "\\UFFFFFFFF"', "not YAML: an escape or a number is out of range"),
        ('a: "\\U00FFFFFF"', "not YAML: an escape or a number is out of range"),
        (f"%YAML {'9' * 5000}.1\n---\na: b", "not YAML: an escape or a number is out of range"),
        ("a: b\nc: \0", "not YAML: line 2, column 4: the character '\\x00' is not allowed"),
        ("a: [\nb: c\n", "line 3, column 1: expected ',' or ']', but got '<stream end>' (while "),
        ("a: b\n---\nc: d", "line 2, column 1: expected a single document in the stream but found"),
        ("a: *nope", "not YAML: line 1, column 4: found undefined alias 'nope'"),
        ("#" * (1 << 21), "2048 KiB of text are no config"),
    ],
)  # fmt: skip
def test_yaml_that_is_no_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        c.load(text, source="f.yaml")
    assert message in caught.value.message
    assert "<unicode string>" not in caught.value.message
    assert_readable(caught.value.message)


@pytest.mark.parametrize("depth", [33, 3000, 5000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[? "])
def test_nesting_has_an_end(opening: str, depth: int) -> None:
    with pytest.raises(ConfigError, match=r"^f: line 1, column \d+: nested deeper than 32 levels"):
        c.load(opening * depth, source="f")


def test_a_recursion_that_is_too_deep_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenlaunch.yaml_text._DEEPEST", 1 << 20)
    with pytest.raises(ConfigError, match=r"^f: not YAML: nested too deep"):
        c.load("[" * 5000, source="f")


def test_plain_yaml() -> None:
    text = "a: ! 12\nb: !!str null\nc: &x [on, 0.20, !!null '', 2020-01-01]\nd: *x\n<<: {e: ~}"
    row = ["on", "0.20", None, "2020-01-01"]
    plain = {"a": "12", "b": "null", "c": row, "d": row, "<<": {"e": None}}
    assert read_yaml(text, source="f") == plain
    assert read_yaml("# nothing", source="f") is None


def test_aliases_do_not_multiply() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 64))]
    with pytest.raises(ConfigError) as caught:
        c.load("\n".join([*lines, "model: *a63"]), source="f")
    assert "65 problems" in caught.value.message
    assert caught.value.message.endswith("and 45 more")
    assert len(caught.value.message) < 2000


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
    "engine.look_every_s": 0.0,
    "engine.env": {"1A": "x", "B": "a\nb"},
    "engine.args": ("a\0b",),
    "model": " ",
    "engine.name": "",
    "engine.version": "",
    "engine.python": "/x\0y",
    "proxy.max_body_bytes": "0",
    "proxy.body_budget_bytes": "0K",
    "proxy.api_keys_file": "",
    "proxy.access_log": "a\x1b[2J",
    "proxy.trusted_peers": ("10.0.0.0/8", ""),
    "proxy.max_in_flight": 10**4000,
}


@pytest.mark.parametrize("path", BAD)
def test_bad_values_are_named(path: str) -> None:
    config = c.override(c.Config(), {path: BAD[path]})
    with pytest.raises(ConfigError) as caught:
        c.validated(config, source="f.yaml")
    assert f"{path}" in caught.value.message


@pytest.mark.parametrize("name", ["kv_cache", "weights", "overhead"])
def test_bare_numbers_that_meant_gib_are_refused(name: str) -> None:
    for value in (40, "40", " 4 "):
        found = c.find_problems(c.override(c.Config(), {f"memory.{name}": value}))
        assert len(found) == 1
        assert found[0].startswith(f"memory.{name}: ")
    (problem,) = c.find_problems(c.override(c.Config(), {f"memory.{name}": "40"}))
    assert problem == f"memory.{name}: 40 is 40 bytes; write 40G for GiB"
    for value in (1 << 30, "512K", "40G", "1073741824"):
        assert not c.find_problems(c.override(c.Config(), {f"memory.{name}": value}))


TEXTS = ["model", "engine.name", "engine.python", "engine.version", "split.nodes", "split.cpus",
         "memory.kv_cache", "memory.weights", "memory.overhead", "memory.margin", "proxy.listen",
         "proxy.api_keys_file", "proxy.admin_keys_file", "proxy.access_log"]  # fmt: skip


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize(
    "text", ["", " ", "\0", "a\0b", "a\nb", "a\x1b[2J", "a\x7f", "\x9b", "\ud800"]
)
def test_every_text_is_a_text(path: str, text: str) -> None:
    (problem,) = c.find_problems(c.override(c.Config(), {path: text}))
    assert problem.startswith(f"{path}: ")
    assert_readable(problem)


@pytest.mark.parametrize("text", ["\0", "a\nb", "\x1b[2J", "\ud800"])
def test_texts_in_lists_and_mappings(text: str) -> None:
    config = c.override(c.Config(), {
        "engine.args": ("", text), "engine.env": {"A": "", "B": text, text: "x"},
        "proxy.trusted_peers": (text,),
    })  # fmt: skip
    found = c.find_problems(config)
    assert [p.partition(":")[0] for p in found][:2] == ["engine.args.1", "engine.env.B"]
    assert len(found) == 4
    for problem in found:
        assert_readable(problem)


TIMES = ["engine.start_timeout_s", "engine.drain_s", "engine.look_every_s",
         "proxy.connect_timeout_s", "proxy.first_byte_timeout_s", "proxy.gap_timeout_s",
         "proxy.keep_alive_s", "proxy.queue_timeout_s", "proxy.sse_keepalive_s",
         "proxy.hang_s"]  # fmt: skip


@pytest.mark.parametrize("path", TIMES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e308", "2592001", "0", "-1"])
def test_times_have_an_end(path: str, value: str) -> None:
    section, _, name = path.partition(".")
    from_file = c.load(f"{section}: {{{name}: {value}}}", source="f")
    for config in (from_file, c.override(c.Config(), {path: float(value)})):
        (problem,) = c.find_problems(config)
        assert problem.startswith(f"{path}: must be ")
    assert not c.find_problems(c.override(c.Config(), {path: 2592000.0}))


def test_every_field_is_looked_at() -> None:
    floats = {path for path, value in c._leaves(c.Config()) if isinstance(value, float)}
    assert floats <= set(TIMES)
    sections = {"": c.Config, "engine.": c.EngineConfig, "split.": c.SplitConfig,
                "memory.": c.MemoryConfig, "proxy.": c.ProxySettings}  # fmt: skip
    for prefix, section in sections.items():
        for field in fields(section):
            kind = str(field.type)
            assert ("float" in kind) == (f"{prefix}{field.name}" in TIMES), field
            assert (
                kind.startswith("str") == (f"{prefix}{field.name}" in TEXTS)
                or "bytes" in field.name
            )


def test_no_kv_cache_is_0() -> None:
    for value in (0, "0", "0G", "0.0T"):
        (problem,) = c.find_problems(c.override(c.Config(), {"memory.kv_cache": value}))
        assert problem == "memory.kv_cache: must be above 0"


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
