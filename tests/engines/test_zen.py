"""ZenTorch is chosen for real: vLLM asked in a mount namespace whose /proc/cpuinfo is ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result

NO_ZENTORCH = Path(__file__).parents[2] / "zenlaunch" / "engines" / "no_zentorch"
# vLLM 0.32 chooses before its own logging is set up: without this the line is lost.
ASK = """
import logging
logging.basicConfig(level="INFO")
import vllm.platforms
print("PLATFORM", type(vllm.platforms.current_platform).__name__)
"""


def platform_of(python: Path, cpuinfo: Path, env: dict[str, str]) -> str:
    """Return what vLLM prints while it chooses its platform on a machine with this cpuinfo."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c",
         'mount --bind "$1" /proc/cpuinfo && exec "$2" -c "$3"', "sh", cpuinfo, python, ASK],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | env,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr:
        pytest.skip("mount namespaces are not permitted here")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def cpuinfo(folder: Path, vendor: str, flags: str) -> Path:
    block = "processor\t: {}\nvendor_id\t: {}\nflags\t\t: fpu sse2 avx avx2 fma {}\n\n"
    path = folder / "cpuinfo"
    path.write_text("".join(block.format(n, vendor, flags) for n in range(2)))
    return path


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("vendor", "flags", "hidden", "platform"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", False, "ZenCpuPlatform"),
        ("AuthenticAMD", "avx512f avx512_bf16", True, "CpuPlatform"),
        ("AuthenticAMD", "", False, "CpuPlatform"),
        ("GenuineIntel", "avx512f", False, "CpuPlatform"),
    ],
)
def test_platform(
    vllm_python: Path, tmp_path: Path, vendor: str, flags: str, hidden: bool, platform: str
) -> None:
    env = {"PYTHONPATH": str(NO_ZENTORCH)} if hidden else {}
    said = platform_of(vllm_python, cpuinfo(tmp_path, vendor, flags), env)
    assert f"PLATFORM {platform}" in said
    if platform == "ZenCpuPlatform":
        assert "using ZenCpuPlatform" in said


@pytest.mark.vllm
def test_the_plan_agrees_with_vllm(
    zenlaunch: Callable[..., Result], vllm_python: Path, tiny_model: Path
) -> None:
    """What `auto` decides for this machine is what vLLM then does."""
    result = zenlaunch(
        "plan", str(tiny_model), "--json", "--python", str(vllm_python), "--kv-cache", "100M",
        "--overhead", "0", "--", "--max-model-len", "64",
    )  # fmt: skip
    assert result.status == 0, result.err
    planned = '"engine": "vllm-zentorch"' in result.out
    said = platform_of(vllm_python, Path("/proc/cpuinfo"), {})
    assert ("PLATFORM ZenCpuPlatform" in said) == planned
