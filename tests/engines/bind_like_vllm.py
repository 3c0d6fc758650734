"""Ask the installed vLLM what it would bind. Runs in vLLM's environment.

Reads situations as JSON from standard input, each a list of CPUs (id, core, node), a mask, memory
nodes and an environment; calls vLLM's own OMPProcessManager on each; prints the CPUs of the engine
threads and the reserved ones. Only the three functions that look at the machine are replaced.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import vllm.utils.cpu_resource_utils as resources
import vllm.utils.ompmultiprocessing as omp

NAMES = (
    "CPU_VISIBLE_MEMORY_NODES",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "LD_PRELOAD",
)


def bind(situation: dict) -> dict:
    """Return what vLLM binds in one situation."""
    cpus = [
        resources.LogicalCPUInfo(id=cpu, physical_core=core, numa_node=node)
        for cpu, core, node in situation["cpus"]
    ]
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update({k: v for k, v in situation["env"].items() if k in NAMES})
    os.environ["LD_PRELOAD"] = "/lib/libiomp5.so"
    resources._get_cpu_list = lambda: cpus
    resources.get_memory_affinity = lambda pid=0: situation["mems"]
    os.sched_getaffinity = lambda pid=0: set(situation["mask"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            local_world_size=1, data_parallel_rank_local=None, _api_process_count=1
        ),
        kv_transfer_config=None,
    )
    manager = omp.OMPProcessManager(config)
    with manager.configure_omp_envs(0, 0):
        threads = os.environ["OMP_NUM_THREADS"]
        affinity = os.environ["KMP_AFFINITY"]
    return {
        "engine": manager.cpu_lists[0],
        "reserved": manager.reserved_cpu_list,
        "threads": int(threads),
        "affinity": affinity,
    }


json.dump([bind(s) for s in json.load(sys.stdin)], sys.stdout)
