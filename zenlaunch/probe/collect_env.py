"""vLLM's (and PyTorch's) collect_env report becomes a Topology: it embeds the output of lscpu.

Owns finding that part. Does not read the rest: versions and environment belong to other machines'
software, and a plan is made for what is installed where it runs.
Follows vllm/collect_env.py and torch/utils/collect_env.py (get_cpu_info).
"""

from __future__ import annotations

import re

from zenlaunch.probe.lscpu import LINES, fields_of, from_fields
from zenlaunch.probe.source import Source
from zenlaunch.topology import Topology

MARKS = re.compile(
    r"^\s*(Collecting environment information|PyTorch version\s*:|Is debug build\s*:"
    r"|(vLLM|ROCM|CUDA) (Version|used to build PyTorch)\s*:)",
    re.MULTILINE,
)


def read_collect_env(source: Source) -> Topology:
    """Read the CPU block of the report; raises TopologyError with the line that is wrong."""
    lines = source.lines
    first = next((i for i, line in enumerate(lines) if LINES.match(line)), None)
    if first is None:
        raise source.wrong(
            len(lines),
            "the report has no CPU block",
            hint="collect_env runs lscpu for it; give the output of lscpu itself",
        )
    # The block ends with a blank line; a heading follows it.
    last = next((i for i in range(first, len(lines)) if not lines[i].strip()), len(lines))
    fields = list(fields_of(lines[first:last], first=first + 1))
    return from_fields(source, fields, origin="collect-env")
