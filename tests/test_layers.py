"""The import direction of the design holds: pure rooms stay pure, no room imports one above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zenlaunch"

# Bottom to top; a module may import from lower rows only (and from its own room, row 0 excepted).
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "cpuset", "__init__"),
    ("values", "blot"),
    ("saved", "yaml_text"),
    ("topology", "config", "binding"),
    ("same_machine",),
    ("memory", "pools", "spec"),
    ("split", "homes"),
    (
        "plan", "lifecycle", "proxy.answers", "proxy.balancer", "proxy.chunks", "proxy.http1",
        "proxy.progress", "proxy.retry", "proxy.routes", "proxy.sse",
    ),
    ("engines", "proxy_command"),
    ("render",),
    ("sockdiag",),
    (
        "named_file", "places", "stdout", "events", "checks", "compiled", "logs", "child", "notify",
        "installed",
    ),
    ("watch", "crash", "procfs"),
    ("runs",),
    ("probe", "observe", "shim", "supervisor", "deployments", "control", "proxy"),
    ("compose", "commands", "detach", "front"),
    ("output", "up", "guard"),
    ("placement",),
    ("screens", "units"),
    ("session",),
    ("cli_options",),
    ("cli_run", "cli_render", "cli_guard"),
    ("cli",),
    ("__main__",),
)  # fmt: skip
PURE = {
    "errors", "cpuset", "values", "saved", "topology", "binding", "memory", "pools", "split",
    "plan", "spec", "lifecycle", "same_machine", "proxy_command", "blot",
    "engines", "render", "proxy.answers", "proxy.balancer", "proxy.chunks", "proxy.http1",
    "proxy.progress", "proxy.retry", "proxy.routes", "proxy.sse",
}  # fmt: skip
IMPURE = {
    "os", "subprocess", "asyncio", "socket", "time", "logging", "pathlib", "shutil", "tempfile",
    "threading", "random", "httpx", "psutil", "typer", "rich", "yaml", "pydantic",
}  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def layer_of(module: str) -> int:
    """Return the row of the longest known prefix of the module's name."""
    for prefix in (module, module.split(".")[0]):
        for row, names in enumerate(LAYERS):
            if prefix in names:
                return row
    raise AssertionError(f"zenlaunch/{module} has no row in LAYERS: give it one")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))
KNOWN = {name_of(p) for p in MODULES}


def own_imports(path: Path) -> set[str]:
    own = {i.removeprefix("zenlaunch.") for i in imports_of(path) if i.startswith("zenlaunch.")}
    return {i if i in KNOWN else i.rpartition(".")[0] or "__init__" for i in own}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    module = name_of(path)
    for imported in own_imports(path):
        same_room = imported.split(".")[0] == module.split(".")[0]
        below = layer_of(imported) < layer_of(module)
        assert same_room or below or module == "__main__", f"{module} must not import {imported}"


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).split(".")[0] in PURE
                                  or name_of(p) in PURE], ids=name_of)  # fmt: skip
def test_pure_modules_touch_nothing(path: Path) -> None:
    touched = {i.split(".")[0] for i in imports_of(path)} & IMPURE
    assert not touched, f"{name_of(path)} is pure and must not import {sorted(touched)}"
