"""Memory: KV auto, the ledger, and each way not to fit."""

from __future__ import annotations

import pytest

from zenlaunch.config import GIB, MemoryConfig
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import PlanError
from zenlaunch.memory import (
    DEFAULT_OVERHEAD_BYTES,
    InstanceMemory,
    ModelSizes,
    Remedy,
    gib,
    ledger,
    size_instances,
)
from zenlaunch.topology import NumaNode

NODE = NumaNode(id=3, cpus=CpuSet([0]), memory_bytes=768 * GIB)
LLAMA_8B = ModelSizes(weights_bytes=15 * GIB, kv_bytes_per_token=128 << 10, max_model_len=131072)


def test_kv_auto_is_the_rule_of_the_design() -> None:
    memory = size_instances(NODE, 2, MemoryConfig(), LLAMA_8B)
    room = int(768 * GIB * (1 - 0.08))
    by_hand = (room - 2 * (15 + 4) * GIB) / 2
    assert memory.kv_bytes == int(by_hand // GIB) * GIB == 334 * GIB
    assert memory.overhead_bytes == DEFAULT_OVERHEAD_BYTES
    assert memory.total_bytes == (15 + 334 + 4) * GIB


def test_what_is_given_counts() -> None:
    wish = MemoryConfig(kv_cache="40G", weights="20G", overhead="1G")
    memory = size_instances(NODE, 2, wish, LLAMA_8B)
    assert memory.total_bytes == 61 * GIB


@pytest.mark.parametrize("node", [None, NumaNode(id=0, cpus=CpuSet([0]))])
def test_unknown_memory_gives_no_kv(node: NumaNode | None) -> None:
    memory = size_instances(node, 2, MemoryConfig(), LLAMA_8B)
    assert memory.kv_bytes is None
    assert memory.total_bytes is None


def test_unknown_weights_give_no_kv() -> None:
    assert size_instances(NODE, 2, MemoryConfig(), ModelSizes()).kv_bytes is None
    given = size_instances(NODE, 2, MemoryConfig(kv_cache="40G"), ModelSizes())
    assert (given.kv_bytes, given.total_bytes) == (40 * GIB, None)


def refusal(count: int, wish: MemoryConfig, sizes: ModelSizes) -> PlanError:
    with pytest.raises(PlanError) as caught:
        size_instances(NODE, count, wish, sizes)
    return caught.value


def test_overbooked_says_what_would_change_it() -> None:
    error = refusal(4, MemoryConfig(kv_cache="44G"), ModelSizes(weights_bytes=int(131.4 * GIB)))
    assert "node 3 cannot hold this: 4 x (131.4 GiB weights + 44.0 GiB KV" in error.message
    assert "11.0 GiB too little" in error.message
    assert error.hint
    for advice in ("--instances-per-node 3", "--kv-cache 41G", "--memory-margin 6%", "node3"):
        assert advice in error.hint
    # The advice is true.
    weights = ModelSizes(weights_bytes=int(131.4 * GIB))
    size_instances(NODE, 3, MemoryConfig(kv_cache="44G"), weights)
    size_instances(NODE, 4, MemoryConfig(kv_cache="41G"), weights)
    size_instances(NODE, 4, MemoryConfig(kv_cache="44G", margin="6%"), weights)


def test_overbooked_beyond_advice() -> None:
    error = refusal(1, MemoryConfig(kv_cache="760G"), ModelSizes(weights_bytes=706 * GIB - 4 * GIB))
    assert error.hint
    assert "smaller model" in error.hint


def test_weights_larger_than_a_node() -> None:
    error = refusal(1, MemoryConfig(), ModelSizes(weights_bytes=900 * GIB))
    assert "does not fit node 3" in error.message
    assert error.hint
    assert "NPS1" in error.hint


def test_no_room_for_kv() -> None:
    error = refusal(4, MemoryConfig(), ModelSizes(weights_bytes=173 * GIB))
    assert "no room for a KV cache" in error.message
    assert error.hint
    assert "--instances-per-node 3" in error.hint


def test_kv_smaller_than_one_sequence() -> None:
    error = refusal(2, MemoryConfig(kv_cache="1G"), LLAMA_8B)
    assert "cannot hold one sequence of 131072 tokens" in error.message
    assert error.hint
    assert "--max-model-len 8192" in error.hint
    assert "--kv-cache 16G" in error.hint


def test_ledger_adds_up() -> None:
    memory = InstanceMemory(weights_bytes=1, kv_bytes=2, overhead_bytes=3)
    unknown = InstanceMemory(weights_bytes=None, kv_bytes=2, overhead_bytes=3)
    other = NumaNode(id=4, cpus=CpuSet([1]), memory_bytes=100)
    rows = ledger([NODE, other], [(3, memory), (3, memory)], "8%")
    assert [(r.node, r.planned_bytes) for r in rows] == [(3, 12)]
    assert ledger([NODE], [(3, unknown)], "8%")[0].planned_bytes is None
    assert gib(GIB) == "1.0 GiB"
    assert gib(1536 * GIB) == "1.5 TiB"


def test_advice_is_of_the_option_that_was_typed() -> None:
    """--instances gets --instances; memory that other nodes use too gets no number."""
    for remedy, text in (
        (Remedy(fewer=lambda k: f"--instances {2 * k}"), "fewer: --instances 6"),
        (Remedy(fewer=lambda k: None), "smaller: --kv-cache 41G"),
    ):
        with pytest.raises(PlanError) as caught:
            size_instances(
                NODE,
                4,
                MemoryConfig(kv_cache="44G"),
                ModelSizes(weights_bytes=int(131.4 * GIB)),
                remedy,
            )
        assert caught.value.hint
        assert caught.value.hint.startswith(text)
    with pytest.raises(PlanError) as caught:
        size_instances(
            NODE, 1, MemoryConfig(), ModelSizes(weights_bytes=900 * GIB), Remedy(larger_node=None)
        )
    assert "NPS" not in (caught.value.hint or "")
