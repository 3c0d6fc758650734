"""YAML in which every scalar is text: `freezing: on` is "on", `version: 0.20` is not 0.2.

Owns the reading of a config file down to plain str, list, dict and None, and what is wrong with it
as YAML, by line and column. Does not know the keys; the schema gives each text its type.
Follows YAML 1.1 as PyYAML composes it; of the tags only str, seq, map and null are known.
"""

from __future__ import annotations

from typing import Any

from zenlaunch.errors import ConfigError
from zenlaunch.values import printable, shown

_LONGEST = 1 << 20  # characters; a config of a page is large
_DEEPEST = 32  # levels; the schema has three
_TAG = "tag:yaml.org,2002:"
_KINDS = {"scalar": ("str", "null"), "sequence": ("seq",), "mapping": ("map",)}
_HINT = "see configs/ for examples, `zenlaunch config schema` for every key"


def read_yaml(text: str, *, source: str) -> Any:
    """Return the one document of a text as str, list, dict and None; `source` is for messages.

    A key given twice is an error instead of a silent choice. Raises ConfigError.
    """
    import yaml

    if len(text) > _LONGEST:
        raise ConfigError(f"{source}: {len(text) >> 10} KiB of text are no config", hint=_HINT)

    class TextLoader(yaml.SafeLoader):
        depth = 0
        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own hook, read once, never changed
            first: [r for r in resolvers if r[0] == f"{_TAG}null"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > _DEEPEST:
                loader: Any = self  # PyYAML's own methods have no types
                raise _wrong(loader.peek_event(), f"nested deeper than {_DEEPEST} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        node = yaml.compose(text, Loader=TextLoader)
        return None if node is None else _Plain().value_of(node)
    except yaml.MarkedYAMLError as e:
        raise ConfigError(f"{source}: not YAML: {_describe(e)}", hint=_HINT) from None
    except yaml.reader.ReaderError as e:
        before = text[: e.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            f"{source}: not YAML: line {line}, column {column}: "
            f"the character {shown(text[e.position : e.position + 1])} is not allowed"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: not YAML: nested too deep", hint=_HINT) from None
    except _Refused as e:
        raise ConfigError(f"{source}: {e}", hint=_HINT) from None
    except (ValueError, OverflowError) as e:  # an escape or a number beyond PyYAML
        raise ConfigError(
            f"{source}: not YAML: an escape or a number is out of range: {shown(str(e))}",
            hint=_HINT,
        ) from None


class _Refused(Exception):
    """What is YAML and not for a config; the text has line and column."""


def _wrong(at: Any, why: str) -> _Refused:
    return _Refused(f"line {at.start_mark.line + 1}, column {at.start_mark.column + 1}: {why}")


class _Plain:
    """Nodes to plain values; a node that an alias names again is the same value again."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.open: set[int] = set()

    def value_of(self, node: Any) -> Any:
        if id(node) in self.open:
            raise _wrong(node, "holds itself by its alias")
        if id(node) not in self.done:
            self.open.add(id(node))
            self.done[id(node)] = self._made(node)
            self.open.remove(id(node))
        return self.done[id(node)]

    def _made(self, node: Any) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind not in _KINDS[node.id] or not node.tag.startswith(_TAG):
            tag = shown(node.tag.replace(_TAG, "!!"))
            raise _wrong(node, f"a config has no {node.id} with the tag {tag}: leave the tag out")
        if node.id == "sequence":
            return [self.value_of(item) for item in node.value]
        if node.id == "mapping":
            return self._mapping(node)
        if kind == "null":
            if node.value not in ("", "~", "null", "Null", "NULL"):
                raise _wrong(node, f"{shown(node.value)} is tagged as null and is not")
            return None
        if any("\ud800" <= c <= "\udfff" for c in node.value):
            raise _wrong(node, f"{shown(node.value)} holds half a surrogate pair, which is no text")
        return node.value

    def _mapping(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.value_of(key_node)
            if not isinstance(key, str):
                raise _wrong(key_node, f"the key {_name(key)} is not text")
            if key in found:
                raise _wrong(key_node, f"the key {shown(key)} is given twice")
            found[key] = self.value_of(value_node)
        return found


def _name(key: Any) -> str:
    return "null" if key is None else shown(key)


def _describe(error: Any) -> str:
    """Say where and what, without the name that PyYAML gives to a text."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    parts = [error.problem or ""]
    if not error.problem or str(error.context).startswith("expected"):
        parts.insert(0, error.context or "")  # the first half of one sentence
    what = " ".join(" ".join(parts).split())
    what = what if len(what) <= 160 else what[:157] + "..."
    begun = error.context_mark
    if error.problem and error.context and begun is not None and begun.line != mark.line:
        what += f" ({' '.join(error.context.split())[:80]} that begins in line {begun.line + 1})"
    return where + printable(what)
