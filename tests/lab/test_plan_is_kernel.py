"""Before a kernel with real nodes: `probe` sees what is there, and what `up` starts is the plan."""

from __future__ import annotations

from typing import Any

import pytest

from lab.image import Image
from lab.vm import Result, boot

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def guest(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = boot(image, tmp_path_factory.mktemp("guest"), "plan_is_kernel.py")
    up_log = result.files.get("up.log", b"").decode(errors="replace")
    assert result.rc == 0, f"{result.log}\n{up_log}"
    return result


def test_probe_sees_the_machine(guest: Result) -> None:
    probe = guest.json("probe.json")
    assert probe["online"] == "0-7"
    assert probe["packages"] == [{"id": 0, "cpus": "0-3"}, {"id": 1, "cpus": "4-7"}]
    nodes = [(n["id"], n["cpus"], n["package"]) for n in probe["nodes"]]
    assert nodes == [(0, "0-1", 0), (1, "2-3", 0), (2, "4-5", 1), (3, "6-7", 1)]
    assert probe["nodes"][1]["distances"] == {"0": 12, "1": 10, "2": 32, "3": 32}
    assert [d["cpus"] for d in probe["l3"]] == ["0-3", "4-7"]
    assert [c["cpus"] for c in probe["cores"]] == [str(n) for n in range(8)]
    # The kernel keeps a part of each node's 512 MiB for itself.
    assert all(400 << 20 < n["memory_bytes"] <= 512 << 20 for n in probe["nodes"])


def test_kernel_does_what_the_plan_says(guest: Result) -> None:
    plan, kernel = guest.json("plan.json"), guest.json("kernel.json")
    assert len(plan["instances"]) == 4
    for instance in plan["instances"]:
        check_instance(instance, kernel[str(instance["port"])])


def check_instance(instance: dict[str, Any], processes: list[dict[str, Any]]) -> None:
    main, worker = processes
    for process in (main, worker):
        assert process["cpus"] == instance["cpus"]
    pins = sorted(mask for mask in worker["threads"].values() if mask != instance["cpus"])
    assert pins == sorted(instance["ranks"][0]["cpus"].split(","))
    node = instance["mem_nodes"]
    assert f"bind:{node}" in worker["policies"]
    total = sum(worker["anon_kb"].values())
    assert total >= 48 * 1024
    assert worker["anon_kb"][node] / total >= 0.99


def test_all_answer_and_nothing_stays(guest: Result) -> None:
    answers = guest.json("answers.json")
    assert [status for status, _ in answers] == [200] * 8
    assert {name for _, name in answers} == {"i0", "i1", "i2", "i3"}
    assert guest.json("end.json")["left"] == {}
