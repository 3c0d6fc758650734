"""Ask vLLM 0.12 to 0.19 what it would bind: its own two functions, taken out of its wheel.

usage: bind_like_old_vllm.py FOLDER      (the unpacked wheel; standard library only)

Those releases bind in `CPUWorker._get_autobind_cpu_ids`, which cannot be imported without all that
a worker needs; the function itself needs nothing but the list of CPUs. Input and output as in
`bind_like_vllm.py`.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace


@dataclass
class LogicalCPUInfo:
    id: int
    physical_core: int
    numa_node: int

    @staticmethod
    def json_decoder(values: dict) -> object:
        if "cpu" not in values:
            return values
        return LogicalCPUInfo(int(values["cpu"]), int(values["core"]), int(values["node"]))


def function(path: Path, name: str, names: dict) -> Callable:
    """Return a function of a source file, compiled alone with `names` as its globals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            node.returns = None
            for arg in node.args.args:
                arg.annotation = None
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
            return names[name]
    raise AssertionError(f"{path} has no {name}")


def main() -> None:
    vllm = Path(sys.argv[1]) / "vllm"
    situation: dict = {}
    fake_os = SimpleNamespace(
        environ=os.environ, sched_getaffinity=lambda pid: set(situation["mask"])
    )

    def lscpu(*_: object, **__: object) -> str:
        rows = [{"cpu": c, "core": k, "node": n} for c, k, n in situation["cpus"]]
        return json.dumps({"cpus": rows})

    cpu_platform = SimpleNamespace(device_control_env_var="CPU_VISIBLE_MEMORY_NODES")
    allowed = function(
        vllm / "platforms" / "cpu.py",
        "get_allowed_cpu_core_node_list",
        {
            "os": fake_os, "platform": platform, "re": re, "json": json,
            "subprocess": SimpleNamespace(check_output=lscpu), "LogicalCPUInfo": LogicalCPUInfo,
            "CpuPlatform": cpu_platform,
        },
    )  # fmt: skip
    cpu_platform.get_allowed_cpu_core_node_list = lambda: allowed(cpu_platform)
    envs = SimpleNamespace(VLLM_CPU_NUM_OF_RESERVED_CPU=None)
    bind = function(
        vllm / "v1" / "worker" / "cpu_worker.py",
        "_get_autobind_cpu_ids",
        {
            "CpuPlatform": cpu_platform, "envs": envs, "os": os, "LogicalCPUInfo": LogicalCPUInfo,
            "logger": SimpleNamespace(info=lambda *a: None),
        },
    )  # fmt: skip
    worker = SimpleNamespace(
        local_rank=0,
        parallel_config=SimpleNamespace(
            world_size=1, local_world_size=1, data_parallel_size_local=1
        ),
    )
    answers = []
    for case in json.load(sys.stdin):
        situation.clear()
        situation.update(case)
        os.environ.pop("CPU_VISIBLE_MEMORY_NODES", None)
        os.environ.update({k: v for k, v in case["env"].items() if k == "CPU_VISIBLE_MEMORY_NODES"})
        listed = case["env"].get("VLLM_CPU_OMP_THREADS_BIND")
        reserved = case["env"].get("VLLM_CPU_NUM_OF_RESERVED_CPU")
        envs.VLLM_CPU_NUM_OF_RESERVED_CPU = None if reserved is None else int(reserved)
        text = listed or bind(worker, lambda cpus: cpus[-1:])
        answers.append({"engine": [int(c) for c in text.split(",")]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
