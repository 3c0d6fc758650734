"""verify before kernels with real nodes: what is not as planned is named with its cause.

One boot a machine; each scene of inside/scenes.py is a test here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.image import Image
from lab.vm import Machine, boot

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

MACHINES = {
    "four-nodes": Machine(),
    "smt": Machine(
        smp="8,sockets=2,cores=2,threads=2",
        nodes=(("0-3", 640), ("4-7", 640)),
        nodes_per_socket=1,
    ),
    "memory-only": Machine(
        smp="4,sockets=2,cores=2,threads=1",
        nodes=(("0-1", 512), ("2-3", 512), ("", 256)),
        nodes_per_socket=1,
    ),
}
SCENES = {
    "four-nodes": (
        "plan_is_kernel", "without_numactl", "escape", "wrong_node", "migrated",
        "migrated_in_its_cgroup", "offlined", "cpuset_around", "cpuset_refuses", "cpuset_changed",
    ),
    "smt": ("smt",),
    "memory-only": ("memory_only_node",),
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Machine -> scene -> result, filled when the first scene of a machine is asked for."""
    return {}


@pytest.mark.parametrize(
    ("machine", "scene"), [(m, scene) for m, scenes in SCENES.items() for scene in scenes]
)
def test_scene(
    image: Image, results: dict[str, dict[str, Any]], tmp_path: Path, machine: str, scene: str
) -> None:
    if machine not in results:
        work = " ".join(("scenes.py", *SCENES[machine]))
        guest = boot(image, tmp_path, work, machine=MACHINES[machine], timeout_s=400)
        results[machine] = guest.json("result.json")
    found = results[machine][scene]
    print(f"{found['seconds']} s: {found['detail']}")
    assert found["ok"], found["detail"]
