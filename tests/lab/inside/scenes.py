"""In the guest: scenes for verify; `scenes.py SCENE...` starts processes and looks at them.

Writes result.json: scene -> {"ok", "detail", "seconds"}. A scene is a function here.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from inside.kernel import save

from zenlaunch import events, observe, procfs
from zenlaunch.child import tree
from zenlaunch.compose import Composed, compose
from zenlaunch.config import Config, EngineConfig, SplitConfig
from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.spec import Evidence, LaunchSpec
from zenlaunch.supervisor import Deployment, Supervisor, run

HERE = Path(__file__).parent
CORES = Evidence(cores_pattern=r"core ids=\[([\d, ]*)\]")
Scene = Callable[[Supervisor, dict[str, tuple[str, ...]]], Awaitable[None]]


def composed(*flags: str) -> Composed:
    """Plan this machine with the lab's engine; instances of one node each."""
    engine = (
        sys.executable,
        str(HERE / "straying.py"),
        "--port",
        "{port}",
        "--cpus",
        "{cpus}",
        *flags,
    )
    config = Config(
        engine=EngineConfig(name="command", args=engine, start_timeout_s=120.0, drain_s=1.0),
        split=SplitConfig(reserve_per_instance=0, reserve_proxy=0),
    )
    return compose(config, read_sysfs(Path("/"), live=True), here=True)


def specs_of(plan: Composed) -> tuple[LaunchSpec, ...]:
    return tuple(replace(s, evidence=CORES) for s in plan.specs)


async def up(specs: tuple[LaunchSpec, ...], scene: Scene | None) -> events.Outcome:
    """Run the specs; when all are ready play the scene, then stop."""
    logs: dict[str, tuple[str, ...]] = {}
    held: list[Supervisor] = []
    ready = asyncio.Event()

    def see(event: events.Event) -> None:
        if isinstance(event, events.BecameReady):
            logs[event.name] = event.log
        if isinstance(event, events.AllReady):
            ready.set()
        if not isinstance(event, events.LogLines):
            print(event, flush=True)

    work = Path("/tmp/work")
    deployment = Deployment(name="lab", instances=specs, log_dir=work, cache_dir=work)
    task = asyncio.create_task(run(deployment, on_event=see, on_start=held.append))
    waiter = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if not task.done():
        try:
            if scene is not None:
                await scene(held[0], logs)
        finally:
            held[0].stop()
    return await task


def pid_of(supervisor: Supervisor, name: str) -> int:
    pid = next(m.pid for m in supervisor.status() if m.name == name)
    assert pid is not None
    return pid


async def verified(specs: tuple[LaunchSpec, ...]) -> list[observe.Verification]:
    """Bring the specs up and return what `verify` says of each."""
    found: list[observe.Verification] = []

    async def scene(supervisor: Supervisor, logs: dict[str, tuple[str, ...]]) -> None:
        for spec in specs:
            one = observe.verify(spec, pid_of(supervisor, spec.name), logs[spec.name])
            print(spec.name, json.dumps(one.to_dict()), flush=True)
            found.append(one)

    outcome = await up(specs, scene)
    assert outcome.error is None, outcome.error
    return found


def all_ok(specs: tuple[LaunchSpec, ...], found: list[observe.Verification]) -> str:
    assert len(found) == len(specs) > 0
    for spec, one in zip(specs, found, strict=True):
        assert one.problems == (), (spec.name, one.problems)
        assert one.local_ratio is not None
        assert one.local_ratio >= 0.99
        assert one.cores_logged == spec.engine_cpus
        assert all(n >= 1 for n in one.engine_threads.values())
    cpus = [s.cpus for s in specs]
    assert sum(len(c) for c in cpus) == len({i for c in cpus for i in c}), "masks overlap"
    local = ", ".join(f"{100 * (one.local_ratio or 0):.2f} %" for one in found)
    return f"{len(specs)} instances, {local} local"


async def plan_is_kernel() -> str:
    specs = specs_of(composed())
    assert all(s.argv[0] == "numactl" for s in specs)
    return all_ok(specs, await verified(specs))


async def without_numactl() -> str:
    def bare(spec: LaunchSpec) -> LaunchSpec:
        first = next(i for i, word in enumerate(spec.argv) if i and not word.startswith("--"))
        return replace(spec, argv=spec.argv[first:], self_bind=True)

    specs = tuple(bare(s) for s in specs_of(composed()))
    return all_ok(specs, await verified(specs))


async def escape() -> str:
    specs = specs_of(composed("--escape"))[:1]
    (found,) = await verified(specs)
    assert any("may run on CPUs" in p and "outside" in p for p in found.problems), found.problems
    return found.problems[0]


async def wrong_node() -> str:
    specs = specs_of(composed("--node", "1"))[:1]
    (found,) = await verified(specs)
    (problem,) = found.problems
    assert "is not on node 0" in problem, problem
    assert "the engine bound memory to node 1 by itself" in problem, problem
    return problem


async def migrated() -> str:
    specs = specs_of(composed())[1:2]
    words: list[str | None] = []

    async def scene(supervisor: Supervisor, logs: dict[str, tuple[str, ...]]) -> None:
        pid = pid_of(supervisor, specs[0].name)
        before = observe.look(specs[0], pid)
        subprocess.run(["migratepages", str(pid), "1", "2"], check=True)
        after = observe.look(specs[0], pid)
        print(before, after, flush=True)
        words.append(observe.drift(None, before))
        words.append(observe.drift(before, after))

    await up(specs, scene)
    assert words[0] is None
    assert words[1] is not None
    assert "of the pages are on other nodes" in words[1]
    return words[1]


async def migrated_in_its_cgroup() -> str:
    """The same where the instance has a cgroup to itself, which the kernel adds up."""
    group = make_group("own", "0-7", "0-3", controllers="+cpuset +memory")
    spec = specs_of(composed())[1]
    words = f"echo $$ > {group}/cgroup.procs; exec {shlex.join(spec.argv)}"
    spec = replace(spec, argv=("/bin/sh", "-c", words))
    said: list[str | None] = []

    async def scene(supervisor: Supervisor, logs: dict[str, tuple[str, ...]]) -> None:
        pid = pid_of(supervisor, spec.name)
        before = procfs.group_pages(tree(pid))
        walked = procfs.pages_of(tree(pid))
        print(before, walked, flush=True)
        assert before is not None
        # The kernel's sums are brought up to date every other second, and count the page cache.
        assert abs(sum(before.own.values()) / sum(walked.own.values()) - 1) < 0.1
        looks = [observe.look(spec, pid)]
        subprocess.run(["migratepages", str(pid), "1", "2"], check=True)
        await asyncio.sleep(2.5)
        looks.append(observe.look(spec, pid))
        print(looks, flush=True)
        said.extend((observe.drift(None, looks[0]), observe.drift(looks[0], looks[1])))

    await up((spec,), scene)
    assert said[0] is None
    assert "of the pages are on other nodes" in (said[1] or "")
    return said[1] or ""


async def offlined() -> str:
    specs = specs_of(composed())[2:3]
    cpu = specs[0].engine_cpus.last
    switch = Path(f"/sys/devices/system/cpu/cpu{cpu}/online")
    seen: list[observe.Verification] = []

    async def scene(supervisor: Supervisor, logs: dict[str, tuple[str, ...]]) -> None:
        switch.write_text("0")
        name = specs[0].name
        seen.append(observe.verify(specs[0], pid_of(supervisor, name), logs[name]))

    try:
        await up(specs, scene)
        outcome = await up(specs, None)
    finally:
        switch.write_text("1")
    assert f"CPUs {cpu} of the plan are offline" in seen[0].problems[0], seen
    assert outcome.error is not None
    assert f"i2 was not started: CPUs {cpu} of the plan are not online" in outcome.error.message
    return f"{seen[0].problems[0]} | {outcome.error.message}"


async def cpuset_changed() -> str:
    """A cpuset that is narrowed under running threads."""
    specs = specs_of(composed())[1:2]
    wide, narrow = specs[0].cpus, CpuSet([specs[0].cpus.first])
    group = make_group("changed", str(wide), "0-3")
    seen: list[observe.Verification] = []

    async def scene(supervisor: Supervisor, logs: dict[str, tuple[str, ...]]) -> None:
        name = specs[0].name
        pid = pid_of(supervisor, name)
        (group / "cgroup.procs").write_text(str(pid))
        (group / "cpuset.cpus").write_text(str(narrow))
        seen.append(observe.verify(specs[0], pid, logs[name]))

    await up(specs, scene)
    assert any("cpuset" in p for p in seen[0].problems), seen[0].problems
    return seen[0].problems[0]


def make_group(name: str, cpus: str, mems: str, *, controllers: str = "+cpuset") -> Path:
    root = Path("/sys/fs/cgroup")
    (root / "cgroup.subtree_control").write_text(controllers)
    group = root / name
    group.mkdir(exist_ok=True)
    (group / "cpuset.cpus").write_text(cpus)
    (group / "cpuset.mems").write_text(mems)
    return group


def inside_group(name: str, cpus: str, mems: str, scene: str) -> str:
    """Run a scene in a process of its own, in a cpuset."""
    group = make_group(name, cpus, mems)
    code = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} {__file__} --inside {scene}"
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout.strip().splitlines()[-1]


async def cpuset_around() -> str:
    """A plan made inside a cpuset keeps to it."""
    return inside_group("around", "2-5", "1-2", "plan_is_kernel")


async def cpuset_refuses() -> str:
    """A plan made outside, started inside: named before the engine begins."""
    return inside_group("refuses", "2-3", "1", "started_outside_its_cpuset")


async def started_outside_its_cpuset() -> str:
    spec = specs_of(composed())[0]
    cpus = CpuSet.parse("6-7")
    argv = ("numactl", "--physcpubind=6-7", *spec.argv[3:])
    outcome = await up((replace(spec, argv=argv, cpus=cpus),), None)
    assert outcome.error is not None
    assert "a cpuset leaves it out" in outcome.error.message, outcome.error.message
    return outcome.error.message


async def smt() -> str:
    plan = composed()
    assert plan.topology.threads_per_core == 2
    specs = specs_of(plan)
    siblings = [core.cpus for core in plan.topology.cores]
    for spec in specs:
        assert all(len(spec.engine_cpus & pair) <= 1 for pair in siblings), "two of one core"
    return all_ok(specs, await verified(specs))


async def memory_only_node() -> str:
    specs = specs_of(composed())
    assert [str(s.mem_nodes) for s in specs] == ["0", "1"]
    return all_ok(specs, await verified(specs))


def play(name: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        detail, ok = asyncio.run(globals()[name]()), True
    except Exception:
        detail, ok = traceback.format_exc(), False
    return {"ok": ok, "detail": detail, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    if sys.argv[1] == "--inside":
        result = play(sys.argv[2])
        print(result["detail"], file=sys.stdout if result["ok"] else sys.stderr)
        sys.exit(0 if result["ok"] else 1)
    results = {}
    for name in sys.argv[1:]:
        print(f"=== {name}", flush=True)
        results[name] = play(name)
        print(results[name], flush=True)
        save("result.json", results)


if __name__ == "__main__":
    main()
