"""Plan: cut a machine into equal instances, each on whole cores of one NUMA node.

Owns the one numbered algorithm (`make_plan`; `split` is its first half) and its result as a value.
the same topology, config and sizes give the same plan, to the byte. Does not know how an engine is
told (that is `engines`), nor what is free just now (that is `up`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zenlaunch.binding import Binding
from zenlaunch.config import Config, Layout, SplitConfig, parse_listen
from zenlaunch.cpuset import EMPTY, CpuSet, union
from zenlaunch.errors import PlanError
from zenlaunch.homes import Share, find_remedy, home_notes, memory_home, memory_only_notes
from zenlaunch.memory import (
    InstanceMemory,
    ModelSizes,
    NodeLedger,
    ledger,
    size_instances,
)
from zenlaunch.pools import Pool, Step, note, usable_pools
from zenlaunch.split import Split, apply_recipe, deal, decide_split, own_cores
from zenlaunch.topology import Note, Severity, Topology

SCHEMA = 1
# Notes of the probe that a plan repeats though they are no warnings, and those that it answers with
# what it did about them.
_TOLD = {"virtual-machine"}
_SAID_BY_PLAN = {"memoryless-node", "allowed-mems-remote"}
_ORDINALS = {2: "second", 3: "third", 4: "fourth"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInstance:
    """One server: `cpus` is its whole mask, `reserved_cpus` the part kept free of engine threads.

    `node` is where its CPUs are, `mem_nodes` where its memory comes from: the same node unless that
    one has no memory; both are empty on a machine that shows no NUMA nodes.
    """

    name: str
    port: int
    cpus: CpuSet
    reserved_cpus: CpuSet
    node: int | None
    mem_nodes: CpuSet
    memory: InstanceMemory
    reason: str

    @property
    def engine_cpus(self) -> CpuSet:
        return self.cpus - self.reserved_cpus

    @property
    def binding(self) -> Binding:
        return Binding(cpus=self.cpus, mem_nodes=self.mem_nodes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "port": self.port,
            "cpus": str(self.cpus),
            "reserved_cpus": str(self.reserved_cpus),
            "mem_nodes": str(self.mem_nodes),
            "node": self.node,
            "ranks": [{"cpus": str(self.engine_cpus), "node": self.node}],
            "reason": self.reason,
            "memory": self.memory.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProxy:
    """The front door; empty `cpus` means that it is not pinned."""

    host: str
    port: int
    policy: str
    cpus: CpuSet

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "port": self.port,
            "policy": self.policy,
            "cpus": str(self.cpus),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided and why. `steps` is for `--explain` and is not part of the JSON."""

    machine: str | None
    topology_digest: str
    model: str | None
    engine: str
    layout: Layout
    threads_per_core: int
    instances: tuple[PlannedInstance, ...]
    proxy: PlannedProxy
    memory: tuple[NodeLedger, ...]
    spare_cpus: CpuSet
    notes: tuple[Note, ...] = ()
    steps: tuple[Step, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zenlaunch plan --json` less what the engine adds to each instance."""
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "topology_digest": self.topology_digest,
            "model": self.model,
            "engine": self.engine,
            "layout": self.layout.value,
            "threads_per_core": self.threads_per_core,
            "instances": [i.to_dict() for i in self.instances],
            "proxy": self.proxy.to_dict(),
            "memory": [row.to_dict() for row in self.memory],
            "spare_cpus": str(self.spare_cpus),
            "notes": [note.to_dict() for note in self.notes],
        }


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Read the JSON of `zenlaunch plan --json`; raises PlanError that names the missing key."""
    try:
        if data["schema"] != SCHEMA:
            raise PlanError(f"plan schema {data['schema']!r}, this zenlaunch reads {SCHEMA}")
        return Plan(
            machine=data["machine"],
            topology_digest=data["topology_digest"],
            model=data["model"],
            engine=data["engine"],
            layout=Layout(data["layout"]),
            threads_per_core=data["threads_per_core"],
            instances=tuple(
                PlannedInstance(
                    name=i["name"],
                    port=i["port"],
                    cpus=CpuSet.parse(i["cpus"]),
                    reserved_cpus=CpuSet.parse(i["reserved_cpus"]),
                    node=i["node"],
                    mem_nodes=CpuSet.parse(i["mem_nodes"]),
                    memory=InstanceMemory(
                        weights_bytes=i["memory"]["weights_bytes"],
                        kv_bytes=i["memory"]["kv_bytes"],
                        overhead_bytes=i["memory"]["overhead_bytes"],
                    ),
                    reason=i["reason"],
                )
                for i in data["instances"]
            ),
            proxy=PlannedProxy(
                host=data["proxy"]["host"],
                port=data["proxy"]["port"],
                policy=data["proxy"]["policy"],
                cpus=CpuSet.parse(data["proxy"]["cpus"]),
            ),
            memory=tuple(NodeLedger(**row) for row in data["memory"]),
            spare_cpus=CpuSet.parse(data["spare_cpus"]),
            notes=tuple(
                Note(code=n["code"], severity=Severity(n["severity"]), text=n["text"])
                for n in data["notes"]
            ),
        )
    except KeyError as e:
        raise PlanError(f"the saved plan lacks the key {e.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError) as e:
        raise PlanError(f"the saved plan has a value that cannot be read: {e}") from None


def make_plan(topology: Topology, config: Config, *, sizes: ModelSizes, engine: str) -> Plan:
    """Cut a machine into instances.

    Raises PlanError (exit 4) when the wish does not fit the machine's cores or memory.
    """
    split = apply_recipe(topology, config.split)
    pools, notes, steps = usable_pools(topology, split)
    decided, decision_notes = decide_split(topology, split, pools)
    homes = [memory_home(topology, pool) for pool in pools]
    dealt = [
        Share(pool=pool, home=home, cores=cores, count=count)
        for pool, home, own, count in zip(
            pools, homes, own_cores(pools, decided), decided.counts, strict=True
        )
        for cores in deal(own, count, decided.size, split.layout)
    ]
    instances = _make_instances(topology, config, split, sizes, dealt, decided)
    proxy_cpus, proxy_notes = _place_proxy(topology, split, pools[0], instances, decided)
    used = union(i.cpus for i in instances) | proxy_cpus
    spare = union(pool.all_cpus for pool in pools) - used
    host, port = parse_listen(config.proxy.listen)
    _check_ports(instances, port)
    return Plan(
        machine=topology.machine.model,
        topology_digest=topology.digest,
        model=config.model,
        engine=engine,
        layout=split.layout,
        threads_per_core=split.threads_per_core,
        instances=instances,
        proxy=PlannedProxy(host=host, port=port, policy=config.proxy.policy.value, cpus=proxy_cpus),
        memory=ledger(
            topology.nodes,
            [(i.mem_nodes.first, i.memory) for i in instances if i.mem_nodes],
            config.memory.margin,
        ),
        spare_cpus=spare,
        notes=(
            *(
                n
                for n in topology.notes
                if (n.severity is not Severity.INFO or n.code in _TOLD)
                and n.code not in _SAID_BY_PLAN
            ),
            *notes,
            *memory_only_notes(topology),
            *decision_notes,
            *home_notes(dealt),
            *proxy_notes,
            *_spare_notes(pools, spare),
            *sizes.notes,
            *_size_notes(instances),
        ),
        steps=(
            *steps,
            Step(
                text=f"deal each node's cores, L3 by L3, to its instances ({split.layout.value}), "
                f"{decided.size} cores each",
                sets=tuple((i.name, i.cpus) for i in instances),
            ),
            Step(
                text=f"keep the {decided.reserve} highest core(s) of each instance free of engine "
                "threads, for its API server and engine core",
                sets=tuple((i.name, i.reserved_cpus) for i in instances),
            ),
            Step(text="place the proxy", sets=(("proxy", proxy_cpus),)),
            Step(text="name what is over", sets=(("spare", spare),)),
        ),
    )


def _make_instances(
    topology: Topology,
    config: Config,
    split: SplitConfig,
    sizes: ModelSizes,
    dealt: Sequence[Share],
    decided: Split,
) -> tuple[PlannedInstance, ...]:
    homes = [share.home for share in dealt]
    instances = []
    for k, share in enumerate(dealt):
        pool, home = share.pool, share.home
        # vLLM cuts its reserve from the end of the CPU numbers, so the plan does the same.
        by_number = sorted(share.cores, key=lambda core: pool.cpus[core.id].first)
        reserved = pool.of(by_number[len(by_number) - decided.reserve :])
        instances.append(
            PlannedInstance(
                name=f"i{k}",
                port=config.base_port + k,
                cpus=pool.of(share.cores),
                reserved_cpus=reserved,
                node=None if pool.node is None else pool.node.id,
                mem_nodes=EMPTY if home is None else CpuSet([home.id]),
                memory=size_instances(
                    home,
                    homes.count(home),
                    config.memory,
                    sizes,
                    find_remedy(topology, config, dealt, -1 if home is None else home.id),
                ),
                reason=_reason(split, share, reserved),
            )
        )
    return tuple(instances)


def _reason(split: SplitConfig, share: Share, reserved: CpuSet) -> str:
    pool, cores = share.pool, share.cores
    domains = len({core.l3 for core in cores if core.l3 is not None})
    how = f"{len(cores)} of {pool.name}'s {len(pool.cores)} core{'s' * (len(pool.cores) != 1)}"
    if share.count > 1 and len(cores) > 1:
        if split.layout is Layout.L3:
            how += f", {domains} L3 domain{'s' * (domains != 1)} of its own"
        elif split.layout is Layout.CONTIGUOUS:
            how += ", next to each other"
        else:
            how += f", every {_ordinal(share.count)} one"
            if domains > 1:
                how += f", so that it draws on {domains} L3 domains"
    threads = len(pool.of(cores) - reserved)
    kept = f", CPU {reserved} for its API server and engine core" if reserved else ""
    bound = f"memory bound to node {share.home.id}" if share.home else "memory not bound (no nodes)"
    return f"{how} ({threads} engine thread{'s' * (threads != 1)}{kept}); {bound}"


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return _ORDINALS.get(n, f"{n}{ending}")


def _place_proxy(
    topology: Topology,
    split: SplitConfig,
    first: Pool,
    instances: Sequence[PlannedInstance],
    decided: Split,
) -> tuple[CpuSet, list[Note]]:
    """Return the proxy's CPUs: cores of its own, idle SMT siblings, or shared reserved cores."""
    if decided.proxy_cores:
        return first.of(first.cores[len(first.cores) - decided.proxy_cores :]), []
    if split.reserve_proxy == 0:
        return EMPTY, []
    here = [i for i in instances if first.node is None or i.node == first.node.id]
    reserved = union(i.reserved_cpus for i in here)
    if split.threads_per_core == 1 and split.cpus is None:
        siblings = union(core.cpus for core in first.cores if not core.cpus.isdisjoint(reserved))
        idle = (siblings & topology.usable_cpus) - union(i.cpus for i in instances)
        if idle:
            return CpuSet(list(idle)[: split.reserve_proxy or 1]), []
    shared = reserved or union(i.cpus for i in here)
    text = f"too few cores to give the proxy one of its own: it shares CPU {shared}."
    return shared, [note("proxy-shares", text)]


def _spare_notes(pools: Sequence[Pool], spare: CpuSet) -> list[Note]:
    parts = [
        f"{here}" + (f" (node {pool.node.id})" if pool.node is not None else "")
        for pool in pools
        if (here := pool.all_cpus & spare)
    ]
    if not parts:
        return []
    return [
        note(
            "spare-cpus",
            f"CPUs {', '.join(parts)} are spare: instances are equal and stay inside a node.",
        )
    ]


def _size_notes(instances: Sequence[PlannedInstance]) -> list[Note]:
    memory = instances[0].memory
    if all(i.memory.kv_bytes is not None for i in instances):
        return []
    if memory.weights_bytes is None:
        text = (
            "the size of the weights is not known (no model files on this machine), so the KV "
            "cache is not planned: give --weights SIZE, or --kv-cache SIZE."
        )
    else:
        text = (
            "the memory of the nodes is not known from this source, so the KV cache is not "
            "planned: give --kv-cache SIZE."
        )
    return [note("unknown-sizes", text, Severity.WARNING)]


def _check_ports(instances: Sequence[PlannedInstance], proxy_port: int) -> None:
    for instance in instances:
        if instance.port == proxy_port:
            raise PlanError(
                f"{instance.name} and the proxy would both have port {proxy_port}",
                hint="choose another --base-port or --port",
            )
        if instance.port > 65535:
            raise PlanError(
                f"{instance.name} would have port {instance.port}, beyond 65535",
                hint="choose a lower --base-port",
            )
