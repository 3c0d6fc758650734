"""A real vLLM under real units: does what hardens them leave it what it needs?

The systemd of this machine runs in namespaces (lab.namespace), so that this needs root and takes a
minute, and nothing of it stays. What the kernel gives no cpuset for is bound by CPUAffinity= there;
cpusets themselves are shown in the emulated guest (test_units).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lab.image import Unavailable
from lab.namespace import start
from zenlaunch.places import places_of

pytestmark = [pytest.mark.lab, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(
    vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two instances need two CPUs")
    # Units have a /tmp of their own: a checkout there may link to these, and is not seen.
    model = tiny_model.resolve()
    python = vllm_python.parent.parent.resolve() / "bin" / "python"
    readable = [model, *model.iterdir(), python, *map(Path, places_of(str(python)))]
    folder = tmp_path_factory.mktemp("vllm")
    try:
        running = start(folder, "real_vllm.py", str(model), str(python), readable=readable)
        result = running.result(timeout_s=540)
    except Unavailable as reason:
        pytest.skip(str(reason))
    print(result.log, result.seconds)
    assert result.rc == 0, result.log + result.files["journal"].decode()[-6000:]
    found: dict[str, Any] = result.json("seen.json")
    return found


def test_all_are_ready_and_answer(seen: dict[str, Any]) -> None:
    assert seen["start"]["rc"] == 0
    assert set(seen["states"].values()) == {"active"}
    assert {status for status, _ in seen["answers"]} == {200}
    assert {name for _, name in seen["answers"]} == {"i0", "i1"}
