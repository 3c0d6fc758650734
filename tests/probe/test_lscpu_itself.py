"""lscpu of this machine reads our trees as we do: they are like a kernel's, and the reading holds.

Left out are the trees that lscpu cannot read: cut ones, and those without /proc/cpuinfo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from machines.build import build, load, names

from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs

CUT = {"lists", "no-cpuinfo", "no-present", "no-online", "empty-online", "no-topology"}
WHOLE = [
    name
    for name in names()
    if not CUT & set(load(name).facts.get("quirks", ()))
    and not name.startswith(("contradicting", "online-names", "node-list-only", "epyc-"))
]
LSCPU = shutil.which("lscpu")


@pytest.mark.skipif(LSCPU is None, reason="lscpu is not installed")
@pytest.mark.parametrize("name", [*WHOLE, "epyc-9755-2s-smt", "epyc-7763-1s-l3-as-numa"])
def test_lscpu_agrees(name: str, tree: Path) -> None:
    t = read_sysfs(build(name, tree, full=True), live=False)
    for option in ([], ["-J"], ["-e"], ["-p"]):
        done = subprocess.run(
            [str(LSCPU), "--sysroot", str(tree), *option],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
        if done.returncode:
            pytest.skip(f"this lscpu cannot read the tree: {done.stderr.strip()[:80]}")
        seen = read_source(done.stdout, source="lscpu")
        assert seen.online == t.online
        assert seen.offline in (None, t.offline)
        nodes = {n.id: n.cpus for n in t.nodes}
        assert {n.id: n.cpus for n in seen.nodes}.items() <= nodes.items()
        assert len(seen.packages) in (0, len(t.packages))
        assert {c.cpus for c in seen.cores} in (set(), {c.cpus for c in t.cores})
        assert {d.cpus for d in seen.l3} in (set(), {d.cpus for d in t.l3})
        assert seen.threads_per_core in (None, t.threads_per_core)
