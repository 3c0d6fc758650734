"""What each vLLM release on CPU needs to be told, as data.

One row per release from which something changed, oldest first; a version uses the last row that is
not newer than it. Sources: [wheel] the Python sources inside that release's CPU wheel, [run] a run
of that release, [pr N] a pull request of vllm-project/vllm, [amd] AMD's ZenDNN 5.2 article and the
ZenDNN plugin's README.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from zenlaunch.errors import PlanError

Version = tuple[int, int]


class Zen(StrEnum):
    """How ZenTorch gets into this release."""

    PLUGIN = "plugin"  # the ZenDNN plugin, an out-of-tree package
    NONE = "none"
    IN_TREE = "in-tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The facts from release `since` on.

    `kv_flag`: `--kv-cache-memory-bytes` is honoured on CPU (before: VLLM_CPU_KVCACHE_SPACE, whole
    GiB). `visible_nodes`: `auto` binding looks at memory nodes, so that CPU_VISIBLE_MEMORY_NODES
    must name the instance's. `freezing_alone`: TORCHINDUCTOR_FREEZING=1 works without switching AOT
    compile off. `aot_cache`: compiled code is kept on disk and found again. `zentorch` is the
    release that the `zen` extra pins, None for any.
    """

    since: Version
    torch: str
    kv_flag: bool
    visible_nodes: bool
    freezing_alone: bool
    aot_cache: bool
    shutdown_timeout: bool
    bind_log: bool
    zen: Zen
    zentorch: str | None = None
    warning: str | None = None


# fmt: off
ROWS: tuple[Row, ...] = (
    # 0.12: AOT compile off on CPU; CPU_VISIBLE_MEMORY_NODES compares nodes with CPU ids [wheel]
    Row(since=(0, 12), torch="2.9.1", kv_flag=False, visible_nodes=False, freezing_alone=True,
        aot_cache=False, shutdown_timeout=False, bind_log=False, zen=Zen.PLUGIN),
    # 0.13: more than 16 OpenMP threads fail (reported in vllm#32651)
    Row(since=(0, 13), torch="2.9.1", kv_flag=False, visible_nodes=False, freezing_alone=True,
        aot_cache=False, shutdown_timeout=False, bind_log=False, zen=Zen.PLUGIN,
        warning="vLLM 0.13 is reported to fail with more than 16 engine threads"),
    Row(since=(0, 14), torch="2.9.1", kv_flag=False, visible_nodes=False, freezing_alone=True,
        aot_cache=False, shutdown_timeout=False, bind_log=False, zen=Zen.PLUGIN),
    # 0.15: the release of AMD's article; nodes come from the CPU affinity [wheel] [amd]
    Row(since=(0, 15), torch="2.10.0", kv_flag=False, visible_nodes=False, freezing_alone=True,
        aot_cache=False, shutdown_timeout=False, bind_log=False, zen=Zen.PLUGIN),
    # 0.16: treated as 0.17. AOT compile on by default on CPU from 0.17 [wheel]
    Row(since=(0, 16), torch="2.10.0", kv_flag=False, visible_nodes=False, freezing_alone=False,
        aot_cache=True, shutdown_timeout=False, bind_log=False, zen=Zen.NONE),
    # 0.18: zen platform in tree [pr 35970]; --shutdown-timeout [pr 34730]
    Row(since=(0, 18), torch="2.10.0", kv_flag=False, visible_nodes=False, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=False, zen=Zen.IN_TREE),
    # 0.20: OMPProcessManager: nodes of Mems_allowed, one memory node per worker [wheel]
    Row(since=(0, 20), torch="2.11.0", kv_flag=True, visible_nodes=True, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=False, zen=Zen.IN_TREE,
        zentorch="5.2.1.dev20260408"),
    # 0.21: the binding is logged rank by rank [wheel]
    Row(since=(0, 21), torch="2.11.0", kv_flag=True, visible_nodes=True, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=True, zen=Zen.IN_TREE,
        zentorch="5.2.1.dev20260408"),
    Row(since=(0, 22), torch="2.11.0", kv_flag=True, visible_nodes=True, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=True, zen=Zen.IN_TREE,
        zentorch="2.11.0.0"),
    Row(since=(0, 28), torch="2.13.0", kv_flag=True, visible_nodes=True, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=True, zen=Zen.IN_TREE,
        zentorch="2.13.0.0"),
    # 0.31: a zentorch for another torch is caught and plain CPU is used [wheel]
    Row(since=(0, 31), torch="2.13.0", kv_flag=True, visible_nodes=True, freezing_alone=False,
        aot_cache=True, shutdown_timeout=True, bind_log=True, zen=Zen.IN_TREE,
        zentorch="2.13.0.1"),
)
# fmt: on

OLDEST: Version = ROWS[0].since
NEWEST: Version = (0, 33)  # the newest release that these rows were checked against
DEFAULT = "0.32.0"  # planned for when nothing is installed and none is named


def parse_version(text: str) -> Version:
    """Return (major, minor) of "0.32.0+cpu"; raises PlanError."""
    match = re.match(r"v?(\d+)\.(\d+)(?:[.\-+a-z].*)?$", text.strip())
    if match is None:
        raise PlanError(
            f"{text!r} is not a vLLM version",
            hint="give one such as --vllm-version 0.32.0",
        )
    return int(match[1]), int(match[2])


def row_for(text: str) -> Row:
    """Return the facts of a version; raises PlanError below the oldest that is known."""
    version = parse_version(text)
    if version < OLDEST:
        raise PlanError(
            f"vLLM {text} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that zenlaunch can "
            "bind and size",
            hint='install a newer vLLM (README, "Install vLLM")',
        )
    return [row for row in ROWS if row.since <= version][-1]
