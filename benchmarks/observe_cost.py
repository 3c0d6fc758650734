"""What it costs to look at a big process: `verify` (all page tables) and the periodic `look`.

    python benchmarks/observe_cost.py [MIB]

Starts a process with MIB (8300) of touched pages and prints medians of five, wall and CPU time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zenlaunch import checks, observe
from zenlaunch.cpuset import CpuSet
from zenlaunch.spec import LaunchSpec

PROGRAM = Path(__file__).parent.parent / "tests" / "supervise" / "pinned.py"


def measure(what: str, act: Callable[[], object]) -> None:
    walls, cpus = [], []
    for _ in range(5):
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    wall_ms, cpu_ms = (1000 * statistics.median(times) for times in (walls, cpus))
    print(f"{what:7} {wall_ms:7.1f} ms, {cpu_ms:6.1f} ms of CPU")


def main() -> None:
    mib = sys.argv[1] if len(sys.argv) > 1 else "8300"
    argv = [sys.executable, str(PROGRAM), mib, "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as big:
        try:
            assert big.stdout
            while big.stdout.readline() not in ("pinned\n", ""):
                pass
            spec = LaunchSpec(
                name="i0", argv=("x",), port=1, cpus=CpuSet([0]), mem_nodes=CpuSet([0])
            )
            print(f"{checks.resident_bytes([big.pid]) / (1 << 30):.1f} GiB resident")
            measure("verify", lambda: observe.verify(spec, big.pid, []))
            measure("look", lambda: observe.look(spec, big.pid))
        finally:
            big.kill()


if __name__ == "__main__":
    main()
