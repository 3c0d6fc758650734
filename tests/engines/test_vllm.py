"""vLLM's choices: versions, ZenTorch with every reason against it, freezing, what the plan owns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zenlaunch.config import Config, Switch, override
from zenlaunch.cpuset import CpuSet
from zenlaunch.engines import vllm
from zenlaunch.engines.facts import EngineFacts, VersionSource
from zenlaunch.engines.vllm_versions import NEWEST, ROWS, parse_version, row_for
from zenlaunch.errors import ConfigError, PlanError
from zenlaunch.memory import InstanceMemory, ModelSizes
from zenlaunch.plan import PlannedInstance

GENOA = EngineFacts(
    version="0.32.0",
    version_source=VersionSource.INSTALLED,
    python="/opt/vllm/bin/python",
    command="/opt/vllm/bin/vllm",
    torch_version="2.13.0+cpu",
    zentorch_version="2.13.0.1",
    tcmalloc="/lib/libtcmalloc_minimal.so.4",
    openmp="/opt/vllm/lib/libiomp5.so",
    hide_zentorch="/opt/zenlaunch/no_zentorch",
    amd=True,
    avx512=True,
)
I1 = PlannedInstance(
    name="i1",
    port=8002,
    cpus=CpuSet.parse("64-67"),
    reserved_cpus=CpuSet([67]),
    node=1,
    mem_nodes=CpuSet([1]),
    memory=InstanceMemory(weights_bytes=1, kv_bytes=2 << 30, overhead_bytes=3),
    reason="",
)


def config(**options: Any) -> Config:
    return override(Config(model="m"), {k.replace("__", "."): v for k, v in options.items()})


def launch(wish: Config, facts: EngineFacts = GENOA) -> Any:
    choice = vllm.choose(wish, facts)
    return vllm.launch(I1, wish, facts, choice, ModelSizes())


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.32.0", (0, 32)), ("0.32.0+cpu", (0, 32)), ("v0.15.1", (0, 15)), ("1.0.0rc1", (1, 0)),
     ("0.12", (0, 12))],
)  # fmt: skip
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "latest", "0", "x.1", "0.32 cpu"])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(PlanError):
        parse_version(text)


def test_rows_are_in_order_and_cover_everything() -> None:
    assert [r.since for r in ROWS] == sorted({r.since for r in ROWS})
    for minor in range(12, NEWEST[1] + 1):
        row = row_for(f"0.{minor}.0")
        assert row.since <= (0, minor)
    assert row_for("0.99.0") is ROWS[-1]
    assert row_for("0.16.0").aot_cache == row_for("0.17.0").aot_cache
    with pytest.raises(PlanError, match=r"older than 0\.12"):
        row_for("0.11.9")


def test_a_whole_instance() -> None:
    spec = launch(config())
    assert spec.argv == (
        "numactl", "--physcpubind=64-67", "--membind=1", "/opt/vllm/bin/vllm", "serve", "m",
        "--host", "127.0.0.1", "--port", "8002", "--kv-cache-memory-bytes", "2G",
        "--shutdown-timeout", "120",
    )  # fmt: skip
    assert spec.env == {
        "LD_PRELOAD": "/lib/libtcmalloc_minimal.so.4:/opt/vllm/lib/libiomp5.so",
        "CPU_VISIBLE_MEMORY_NODES": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    }
    assert {"KMP_AFFINITY", "VLLM_PORT", "OMP_NUM_THREADS"} <= set(spec.unset)
    assert not set(spec.unset) & set(spec.env)
    assert spec.engine_cpus == CpuSet.parse("64-66")
    assert spec.evidence.libraries == ("libtcmalloc", "libiomp5", "libzentorch")


def test_the_repack_has_no_program() -> None:
    spec = launch(config(), replace(GENOA, command=None))
    assert spec.argv[3:8] == (
        "/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m",
    )  # fmt: skip


def test_zentorch_auto() -> None:
    assert vllm.choose(config(), GENOA).label == "vllm-zentorch"
    off = vllm.choose(config(engine__zentorch=Switch.OFF), GENOA)
    assert (off.label, off.notes[-1].code) == ("vllm", "freezing-off")
    spec = launch(config(engine__zentorch=Switch.OFF))
    assert spec.env["PYTHONPATH"] == "/opt/zenlaunch/no_zentorch"
    assert "PYTHONPATH" not in launch(config()).env


@pytest.mark.parametrize(
    ("change", "reason", "fix"),
    [
        ({"amd": False}, "for AMD CPUs", ""),
        ({"avx512": False}, "no AVX-512", ""),
        ({"zentorch_version": None}, "not installed", "pip install 'zentorch==2.13.0.1'"),
        (
            {"zentorch_version": "2.11.0.2"},
            "zentorch 2.11.0.2 is built for torch 2.11.0, not 2.13.0",
            "pip install 'zentorch==2.13.0.1'",
        ),
        ({"version": "0.17.1"}, "vLLM 0.17.1 has no zen platform", "0.18 or later"),
    ],
)
def test_zentorch_where_it_cannot_work(change: dict[str, Any], reason: str, fix: str) -> None:
    facts = replace(GENOA, **change)
    with pytest.raises(PlanError) as caught:
        vllm.choose(config(engine__zentorch=Switch.ON), facts)
    assert reason in caught.value.message
    assert fix in (caught.value.hint or "")
    choice = vllm.choose(config(), facts)
    assert choice.label == "vllm"
    assert not choice.zentorch


def test_a_mismatched_zentorch_is_hidden_from_vllm() -> None:
    """0.18 to 0.30 stop with "Failed to infer device type" when it cannot be imported."""
    facts = replace(GENOA, zentorch_version="2.11.0.2")
    assert launch(config(), facts).env["PYTHONPATH"] == "/opt/zenlaunch/no_zentorch"
    assert any(n.code == "zentorch-off" for n in vllm.choose(config(), facts).notes)


def test_weekly_zentorch_names_no_torch() -> None:
    facts = replace(
        GENOA, version="0.20.0", torch_version="2.11.0+cpu", zentorch_version="5.2.1.dev20260408"
    )
    assert vllm.choose(config(engine__zentorch=Switch.ON), facts).zentorch


def test_freezing() -> None:
    assert vllm.choose(config(), replace(GENOA, version="0.15.1")).freezing
    assert not vllm.choose(config(), GENOA).freezing
    assert not vllm.choose(
        config(engine__freezing=Switch.OFF), replace(GENOA, version="0.15.1")
    ).freezing
    spec = launch(config(engine__freezing=Switch.ON))
    assert spec.env["TORCHINDUCTOR_FREEZING"] == "1"
    assert spec.env["VLLM_USE_AOT_COMPILE"] == "0"
    assert spec.compile_cache is None  # nothing is kept that a second instance could use
    wish = config(engine__freezing=Switch.ON, engine__env={"VLLM_USE_AOT_COMPILE": "1"})
    with pytest.raises(PlanError, match="freezing: on and VLLM_USE_AOT_COMPILE=1"):
        vllm.choose(wish, GENOA)
    old = launch(config(engine__freezing=Switch.ON), replace(GENOA, version="0.15.1"))
    assert "VLLM_USE_AOT_COMPILE" not in old.env


@pytest.mark.parametrize(
    "args",
    [("--port", "1"), ("--port=1",), ("--host", "0.0.0.0"), ("--model", "x"),
     ("--kv-cache-memory-bytes", "1G"), ("--api-key", "secret"), ("--shutdown-timeout", "1"),
     ("--numa-bind",)],
)  # fmt: skip
def test_arguments_that_the_plan_owns(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm.choose(config(engine__args=args), GENOA)
    assert args[0].partition("=")[0] in caught.value.message
    assert "secret" not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize("args", [("-tp", "2"), ("--pipeline-parallel-size=2",), ("-dp",)])
def test_one_instance_is_one_rank(args: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="one engine of one rank"):
        vllm.choose(config(engine__args=args), GENOA)
    vllm.choose(config(engine__args=("--tensor-parallel-size", "1")), GENOA)


@pytest.mark.parametrize(
    "name", ["VLLM_PORT", "LD_PRELOAD", "CPU_VISIBLE_MEMORY_NODES", "TORCHINDUCTOR_FREEZING"]
)
def test_variables_that_the_plan_owns(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        vllm.choose(config(engine__env={name: "1"}), GENOA)


def test_variables_of_the_user_are_kept() -> None:
    spec = launch(config(engine__env={"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}))
    assert spec.env["HF_HUB_OFFLINE"] == "1"
    assert spec.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in spec.unset


def test_instances_share_one_compile_key() -> None:
    wish = config()
    choice = vllm.choose(wish, GENOA)
    i0 = replace(I1, name="i0", port=8001, node=0, mem_nodes=CpuSet([0]), cpus=CpuSet([0, 1]))
    keys = {
        vllm.launch(i, wish, GENOA, choice, ModelSizes()).compile_cache.key  # type: ignore[union-attr]
        for i in (i0, I1)
    }
    assert len(keys) == 1
    other = launch(config(engine__args=("--max-model-len", "1")))
    assert other.compile_cache.key not in keys
    assert launch(config(engine__args=("--enforce-eager",))).compile_cache is None
    assert launch(config(), replace(GENOA, version="0.15.1")).compile_cache is None


def test_what_is_missing_is_noted() -> None:
    bare = replace(GENOA, tcmalloc=None, openmp=None, torch_cuda=True, torchvision_version="0.29.1")
    codes = {n.code for n in vllm.choose(config(), bare).notes}
    assert {"no-tcmalloc", "no-iomp", "torch-cuda", "torchvision"} <= codes
    assert launch(config(), bare).env.keys().isdisjoint({"LD_PRELOAD"})
