"""Memory: how large an instance is, and whether a node can hold its instances.

Owns the sizes (weights + KV cache + overhead), the rule for KV `auto`, the ledger per node. Pure:
sizes of a model come in as ModelSizes, of a node as its total memory. What is free just now is
checked by `up`, so that the same machine gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zenlaunch.config import GIB, MemoryConfig, parse_percent, parse_size
from zenlaunch.errors import PlanError
from zenlaunch.topology import Note, NumaNode
from zenlaunch.values import in_gib

# What an instance needs beside weights and KV cache. Seen on vLLM 0.32: 1.7 GiB for its three
# processes with a 3 MB model, 0.4 GiB of /dev/shm, and activations and the prepacked copy of a
# layer on top.
DEFAULT_OVERHEAD_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What is known of a model; None where it is not. Made by `probe.model` or from `--weights`.

    `weights_bytes` is one copy as the engine holds it; `kv_bytes_per_token` is for all layers;
    `max_model_len` is the longest sequence in tokens that the engine will accept.
    """

    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    digest: str | None = None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMemory:
    """Bytes of one instance; None where unknown."""

    weights_bytes: int | None
    kv_bytes: int | None
    overhead_bytes: int

    @property
    def total_bytes(self) -> int | None:
        if self.weights_bytes is None or self.kv_bytes is None:
            return None
        return self.weights_bytes + self.kv_bytes + self.overhead_bytes

    def to_dict(self) -> dict[str, int | None]:
        return {
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
            "overhead_bytes": self.overhead_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """One memory node: total, what the margin leaves for engines, what is planned."""

    node: int
    total_bytes: int | None
    available_bytes: int | None
    planned_bytes: int | None

    def to_dict(self) -> dict[str, int | None]:
        return {
            "node": self.node,
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "planned_bytes": self.planned_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to type when a node cannot hold its instances.

    `fewer` turns the number that would fit into an option, None where no number would help.
    `larger_node` says how a node gets more memory, None where it cannot.
    """

    fewer: Callable[[int], str | None] = lambda k: f"--instances-per-node {k}"
    larger_node: str | None = "fewer NUMA nodes per socket (BIOS: NPS1)"


def gib(n: int) -> str:
    """Print bytes as MiB, GiB or TiB, as large as they are."""
    if n < GIB // 10:
        return f"{n / (1 << 20):.0f} MiB"
    return in_gib(n) if n < 1024 * GIB else f"{n / GIB / 1024:.1f} TiB"


def available_bytes(node: NumaNode, margin: str) -> int | None:
    """Return what engines may take of a node: its total less the margin."""
    if node.memory_bytes is None:
        return None
    return int(node.memory_bytes * (1 - parse_percent(margin)))


def size_instances(
    node: NumaNode | None,
    count: int,
    wish: MemoryConfig,
    model: ModelSizes,
    remedy: Remedy = Remedy(),
) -> InstanceMemory:
    """Return the memory of each of `count` equal instances on a node (None: a machine without).

    KV `auto` = (total - margin - count x (weights + overhead)) / count, rounded down to whole GiB.
    Raises PlanError when the node cannot hold them, or the KV cache not even one sequence.
    """
    weights = parse_size(wish.weights) if wish.weights is not None else model.weights_bytes
    overhead = parse_size(wish.overhead) if wish.overhead is not None else DEFAULT_OVERHEAD_BYTES
    room = available_bytes(node, wish.margin) if node is not None else None
    if node is not None and room is not None and weights is not None and weights + overhead > room:
        raise _too_large(node, room, weights, overhead, remedy)
    kv: int | None
    if wish.kv_cache != "auto":
        kv = parse_size(wish.kv_cache)
    elif room is None or weights is None:
        kv = None
    else:
        assert node is not None
        kv = (room - count * (weights + overhead)) // count // GIB * GIB
        if kv < GIB:
            raise _no_room_for_kv(node, room, count, weights, overhead, remedy)
    memory = InstanceMemory(weights_bytes=weights, kv_bytes=kv, overhead_bytes=overhead)
    if node is not None and room is not None and memory.total_bytes is not None:
        _check_fits(node, room, count, memory, wish.margin, remedy)
    _check_one_sequence(memory, model)
    return memory


def ledger(
    nodes: Sequence[NumaNode], placed: Sequence[tuple[int, InstanceMemory]], margin: str
) -> tuple[NodeLedger, ...]:
    """Add up the instances per memory node; `placed` holds (node id, memory) pairs."""
    rows = []
    for node in nodes:
        totals = [memory.total_bytes for node_id, memory in placed if node_id == node.id]
        if totals:
            known = [t for t in totals if t is not None]
            rows.append(
                NodeLedger(
                    node=node.id,
                    total_bytes=node.memory_bytes,
                    available_bytes=available_bytes(node, margin),
                    planned_bytes=sum(known) if len(known) == len(totals) else None,
                )
            )
    return tuple(rows)


def _source(node: NumaNode) -> str:
    return f"(sys/devices/system/node/node{node.id}/meminfo)"


def _too_large(node: NumaNode, room: int, weights: int, overhead: int, remedy: Remedy) -> PlanError:
    assert node.memory_bytes is not None
    return PlanError(
        f"one copy of the model does not fit node {node.id}: {gib(weights)} weights + "
        f"{gib(overhead)} overhead;\n  it has {gib(node.memory_bytes)}, {gib(room)} of it for "
        f"engines ({gib(weights + overhead - room)} too little)",
        hint="an instance never spans NUMA nodes: "
        + (f"{remedy.larger_node} makes each larger; or " if remedy.larger_node else "")
        + f"a smaller or quantized model   {_source(node)}",
    )


def _no_room_for_kv(
    node: NumaNode, room: int, count: int, weights: int, overhead: int, remedy: Remedy
) -> PlanError:
    assert node.memory_bytes is not None
    fewer = min(count - 1, room // (weights + overhead + GIB))
    option = remedy.fewer(fewer) if fewer >= 1 else None
    advice = [f"fewer: {option}"] if option else []
    advice.append("smaller: a quantized model, or a lower --overhead if you know that it is enough")
    return PlanError(
        f"node {node.id} has no room for a KV cache: {count} x ({gib(weights)} weights + "
        f"{gib(overhead)}) = {gib(count * (weights + overhead))};\n  it has "
        f"{gib(node.memory_bytes)}, {gib(room)} of it for engines",
        hint=f"{'; '.join(advice)}   {_source(node)}",
    )


def _check_fits(
    node: NumaNode, room: int, count: int, memory: InstanceMemory, margin: str, remedy: Remedy
) -> None:
    each = memory.total_bytes
    assert each is not None
    assert memory.weights_bytes is not None
    assert memory.kv_bytes is not None
    assert node.memory_bytes is not None
    planned = count * each
    if planned <= room:
        return
    advice = []
    if count > 1 and room // each >= 1 and (option := remedy.fewer(room // each)):
        advice.append(f"fewer: {option}")
    smaller = (room // count - memory.weights_bytes - memory.overhead_bytes) // GIB
    if smaller >= 1:
        advice.append(f"smaller: --kv-cache {smaller}G")
    percent = int((1 - planned / node.memory_bytes) * 100)
    if 1 <= percent < parse_percent(margin) * 100:
        advice.append(f"more: --memory-margin {percent}%")
    if not advice:
        advice = ["a smaller model" + (f", or {remedy.larger_node}" if remedy.larger_node else "")]
    raise PlanError(
        f"node {node.id} cannot hold this: {count} x ({gib(memory.weights_bytes)} weights + "
        f"{gib(memory.kv_bytes)} KV + {gib(memory.overhead_bytes)}) = {gib(planned)};\n  it has "
        f"{gib(node.memory_bytes)}, {gib(room)} of it for engines "
        f"({gib(planned - room)} too little)",
        hint=f"{'; '.join(advice)}   {_source(node)}",
    )


def _check_one_sequence(memory: InstanceMemory, model: ModelSizes) -> None:
    if memory.kv_bytes is None or not model.kv_bytes_per_token or model.max_model_len is None:
        return
    needed = model.kv_bytes_per_token * model.max_model_len
    if memory.kv_bytes >= needed:
        return
    fits = memory.kv_bytes // model.kv_bytes_per_token
    raise PlanError(
        f"a KV cache of {gib(memory.kv_bytes)} cannot hold one sequence of {model.max_model_len} "
        f"tokens: it needs {gib(needed)} ({model.kv_bytes_per_token} bytes a token)",
        hint=(f"shorter: -- --max-model-len {fits}; " if fits else "")
        + f"larger: --kv-cache {-(-needed // GIB)}G; or fewer instances per node",
    )
