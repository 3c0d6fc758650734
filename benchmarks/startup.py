"""How long the command line takes, whole processes, beside lscpu on the same tree.

usage: .venv/bin/python benchmarks/startup.py [ROUNDS]

Builds the 512-CPU machine of the tests (2 x EPYC 9755, SMT on), runs each command ROUNDS times in
turn, and prints the median and the fastest of each, and ratios to lscpu.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from machines.build import build  # noqa: E402 - after the path

from zenlaunch.cpuset import CpuSet  # noqa: E402


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    program = str(ROOT / ".venv" / "bin" / "zenlaunch")
    with tempfile.TemporaryDirectory() as folder:
        tree = str(build("epyc-9755-2s-smt", Path(folder) / "tree"))
        add_masks(Path(tree))
        commands = {
            "lscpu": ["lscpu", "--sysroot", tree],
            "zenlaunch --version": [program, "--version"],
            "zenlaunch --help": [program, "--help"],
            "zenlaunch probe": [program, "probe", "--sysroot", tree],
            "zenlaunch plan": [program, "plan", "m", "--weights", "15G", "--sysroot", tree],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        # Byte code is written once and found by every later run, as for any installed program.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        for number in range(rounds + 1):
            for name, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environ)
                if number:
                    seconds[name].append(time.perf_counter() - begin)
    base = statistics.median(seconds["lscpu"])
    print(f"{cpu_model()}, {os.cpu_count()} CPUs, {date.today()}, {rounds} rounds, 512-CPU tree")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:<20} {middle * 1e3:6.0f} ms median  {min(times) * 1e3:6.0f} ms fastest  "
              f"{middle / base:5.1f} x lscpu")  # fmt: skip


def add_masks(tree: Path) -> None:
    """Write the hex masks beside the lists: lscpu reads those, and real kernels have both."""
    cpu = tree / "sys/devices/system/cpu"
    (cpu / "kernel_max").write_text("8191\n")
    names = {
        "thread_siblings_list": "thread_siblings",
        "core_siblings_list": "core_siblings",
        "shared_cpu_list": "shared_cpu_map",
        "cpulist": "cpumap",
    }
    for path in (tree / "sys").rglob("*"):
        if path.name in names:
            bits = CpuSet.parse(path.read_text()).bits
            words = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(480, -1, -32)]
            path.with_name(names[path.name]).write_text(",".join(words) + "\n")


def cpu_model() -> str:
    """Return the CPU's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


if __name__ == "__main__":
    main()
