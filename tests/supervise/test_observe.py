"""observe: readings of real processes, and each mismatch named with its cause."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zenlaunch import observe, procfs
from zenlaunch.cpuset import CpuSet
from zenlaunch.observe import Look, drift, verify
from zenlaunch.procfs import Pages, Thread, parse_numa_maps
from zenlaunch.spec import Evidence, LaunchSpec

PROGRAM = Path(__file__).with_name("pinned.py")
MASK = CpuSet(os.sched_getaffinity(0))
CPU = MASK.first
CORES = r"core ids=\[([\d, -]*)\]"


class Pinned:
    def __init__(self, mib: int, *places: str, mask: set[int] | None = None) -> None:
        argv = [sys.executable, str(PROGRAM), str(mib), *places]
        if mask is not None:
            argv = ["taskset", "-c", ",".join(map(str, mask)), *argv]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.log: list[str] = []
        for line in self.process.stdout:
            self.log.append(line.rstrip())
            if line == "pinned\n":
                break

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture
def run() -> Iterator[Callable[..., Pinned]]:
    started: list[Pinned] = []

    def start(*args: Any, **kwargs: Any) -> Pinned:
        started.append(Pinned(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout
        one.process.stdout.close()


def spec(**fields: Any) -> LaunchSpec:
    return LaunchSpec(name="i0", argv=("x",), port=1, **fields)


def test_threads_and_their_masks_are_read(run: Callable[..., Pinned]) -> None:
    one = run(1, str(CPU), mask=set(MASK))
    threads = procfs.threads_of(one.pid)
    assert [t.cpus for t in threads] == [MASK, CpuSet([CPU])]
    assert threads[1].last_cpu == CPU
    assert threads[0].cpu_s > 0
    assert procfs.threads_of(0x7FFFFFFF) == []


def test_a_tree_that_is_as_planned_is_ok(run: Callable[..., Pinned]) -> None:
    one = run(32, str(CPU), mask={CPU})
    cpus = CpuSet([CPU])
    wanted = spec(
        cpus=cpus, engine_cpus=cpus, mem_nodes=CpuSet.parse("0"),
        evidence=Evidence(libraries=("libc.so",), lines=("pinned",), cores_pattern=CORES),
    )  # fmt: skip
    found = verify(wanted, one.pid, one.log)
    assert found.problems == ()
    assert found.ok
    assert found.local_ratio == 1.0
    assert found.pages.own[0] > 32 << 20
    assert found.pages.file[0] > 0
    data = found.to_dict()
    assert data["omp_cores_logged"] == str(CPU)
    assert data["engine_threads"] == {str(CPU): 2}
    assert set(data) >= {"threads", "threads_off_plan", "pages", "local_ratio", "libraries", "ok"}
    assert data["libraries"]["tcmalloc"] is None


@pytest.mark.skipif(len(MASK) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("places", "mask", "engine", "cpus", "says"),
    [
        (["0-1"], {0, 1}, "0", "0", "threads may run on CPUs 1, outside 0: the binding was not"),
        (["0", "0-1"], {0}, "0", "0", "1 of 3 threads may run on CPUs 1, outside 0: the engine"),
        (["0"], {0}, "0-1", "0-1", "no thread may run on CPUs 1 of the plan: a cpuset"),
        (["0-1", "0-1"], {0, 1}, "0-1", "0-1", "no engine thread is pinned to one CPU: no OpenMP"),
        (["0"], {0, 1}, "0-1", "0-1", "uses CPUs 0; the plan says 0-1: it keeps"),
        (["0"], {0, 1}, "1", "0-1", "uses CPUs 0; the plan says 1: its automatic"),
        (["0"], {0, 1}, "0-1", "0-1", "no engine thread is pinned to CPUs 1 (planned: one on each"),
    ],
)  # fmt: skip
def test_mismatched_threads_are_named(
    run: Callable[..., Pinned],
    places: list[str],
    mask: set[int],
    engine: str,
    cpus: str,
    says: str,
) -> None:
    one = run(1, *places, mask=mask)
    wanted = spec(
        cpus=CpuSet.parse(cpus),
        engine_cpus=CpuSet.parse(engine),
        evidence=Evidence(cores_pattern=CORES),
    )
    found = verify(wanted, one.pid, one.log)
    assert not found.ok
    assert any(says in p for p in found.problems), found.problems


def test_an_empty_core_list_is_the_memory_node(run: Callable[..., Pinned]) -> None:
    one = run(1, str(CPU))
    cpus = CpuSet([CPU])
    wanted = spec(cpus=MASK, engine_cpus=cpus, evidence=Evidence(cores_pattern=CORES))
    found = verify(wanted, one.pid, ["local_rank=0, core ids=[]"])
    assert "the engine says it uses CPUs none" in found.problems[0]
    assert "CPU_VISIBLE_MEMORY_NODES" in found.problems[0]


AWAY = Pages(own={0: 900 << 20, 1: 100 << 20})


@pytest.mark.parametrize(
    ("node", "log", "says"),
    [
        ("0", ["set_mempolicy: Operation not permitted"], "--cap-add SYS_NICE"),
        ("0", [], "no memory policy is set"),
        ("1", [], "a cpuset allows memory of node 0 only"),
    ],
)
def test_remote_pages_are_named(
    run: Callable[..., Pinned], node: str, log: list[str], says: str
) -> None:
    one = run(1, str(CPU))
    found = verify(spec(mem_nodes=CpuSet.parse(node)), one.pid, log, found=AWAY)
    (problem,) = found.problems
    assert says in problem
    assert problem.startswith("10.0 %" if node == "0" else "90.0 %")
    assert "100 MiB on node 1" in problem or "900 MiB on node 0" in problem


def test_missing_libraries_and_lines_are_named(run: Callable[..., Pinned]) -> None:
    one = run(1, str(CPU))
    wanted = spec(
        env={"LD_PRELOAD": "/no/such/libiomp5.so"},
        evidence=Evidence(libraries=("libzentorch",), lines=("using ZenCpuPlatform",)),
    )
    assert verify(wanted, one.pid, one.log).problems == (
        "/no/such/libiomp5.so is to be preloaded and is not mapped: it does not exist or does not "
        "fit",
        "no library libzentorch is mapped",
        "its log does not say 'using ZenCpuPlatform'",
    )


def test_an_instance_that_has_ended_is_a_problem() -> None:
    assert verify(spec(), 0x7FFFFFFF, []).problems == (
        "no process 2147483647: the instance has ended",
    )


NUMA_MAPS = """\
00400000 default file=/usr/bin/python3.11 mapped=100 N0=100 kernelpagesize_kB=4
00a00000 bind:1 heap anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4
7f0000000000 bind:1 anon=3 dirty=3 N1=3 kernelpagesize_kB=2048
7f1000000000 default file=/usr/lib/libc.so.6 anon=2 dirty=2 mapped=4 N1=4 kernelpagesize_kB=4
7f2000000000 default file=/dev/shm/psm_1\\040(deleted) dirty=10 mapmax=2 N1=10 kernelpagesize_kB=4
7f3000000000 default
7ffc00000000 default stack anon=5 dirty=5 N1=5 kernelpagesize_kB=4
"""


def test_whether_a_process_may_be_read_is_asked_of_the_kernel(run: Callable[..., Pinned]) -> None:
    pid = run(1).pid
    assert procfs.may_read(pid)
    assert procfs.may_read(2**22 + 1)  # there is none: it is gone, not hidden
    if os.geteuid() != 0:
        assert not procfs.may_read(1)
        return
    os.seteuid(65534)
    try:
        assert not procfs.may_read(pid)
    finally:
        os.seteuid(0)


def test_numa_maps_are_counted_by_page_size_files_apart_shared_once() -> None:
    shared: dict[str, dict[int, int]] = {}
    for _ in range(2):
        pages = parse_numa_maps(NUMA_MAPS, shared)
    assert pages.own == {0: 100 * 4096, 1: 200 * 4096 + 3 * (2 << 20) + 2 * 4096 + 5 * 4096}
    assert pages.file == {0: 100 * 4096, 1: 2 * 4096}
    assert shared == {"/dev/shm/psm_1\\040(deleted)": {1: 10 * 4096}}
    assert pages.local_ratio(CpuSet.parse("1")) == pytest.approx(0.9457, abs=1e-3)
    assert Pages().local_ratio(CpuSet.parse("1")) is None


NUMA_STAT = """\
anon N0=1048576 N1=3145728
file N0=8388608 N1=2097152
kernel_stack N0=16384 N1=16384
shmem N0=0 N1=1048576
file_mapped N0=1048576 N1=0
anon_thp N0=0 N1=2097152
"""


def group(root: Path, procs: str, *, path: str = "zen.slice/i0.service") -> Path:
    for pid in (10, 11):
        (root / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
        (root / f"proc/{pid}/cgroup").write_text(f"4:memory:/other\n0::/{path}\n")
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(procs)
    (folder / "memory.numa_stat").write_text(NUMA_STAT)
    return folder


def test_the_pages_of_a_cgroup_are_those_of_the_tree_in_it(tmp_path: Path) -> None:
    folder = group(tmp_path, "11\n10\n")
    assert procfs.group_pages([10, 11], tmp_path) == Pages(
        own={0: 1 << 20, 1: 4 << 20}, file={0: 8 << 20, 1: 1 << 20}
    )
    assert procfs.group_pages([10], tmp_path) is None  # somebody else is in it
    (folder / "cgroup.procs").write_text("10\n")
    assert procfs.group_pages([10, 11], tmp_path) is None  # or it does not hold all
    assert procfs.group_pages([10], tmp_path) is not None
    (folder / "below").mkdir()
    assert procfs.group_pages([10], tmp_path) is None


def test_without_a_cgroup_of_its_own_a_tree_has_no_such_pages(tmp_path: Path) -> None:
    assert procfs.group_pages([], tmp_path) is None
    assert procfs.group_pages([10], tmp_path) is None
    (group(tmp_path, "10\n") / "memory.numa_stat").unlink()  # no memory controller
    assert procfs.group_pages([10], tmp_path) is None
    (tmp_path / "proc/10/cgroup").write_text("4:memory:/only/version/1\n")
    assert procfs.group_pages([10], tmp_path) is None


def test_a_sample_of_pages_says_where_they_are(run: Callable[..., Pinned]) -> None:
    one = run(64, str(CPU))
    sample = procfs.sample_pages(one.pid, 512, chance=random.Random(1))
    assert set(sample.own) == {0}
    assert procfs.sample_pages(0x7FFFFFFF) == Pages()


def test_cpus_on_which_nothing_ran_are_found() -> None:
    def thread(tid: int, cpu: int, cpu_s: float) -> Thread:
        return Thread(pid=1, tid=tid, name="w", cpus=CpuSet([cpu]), last_cpu=cpu, cpu_s=cpu_s)

    wanted = spec(engine_cpus=CpuSet.parse("0-2"))
    before = [thread(1, 0, 5.0), thread(2, 1, 0.1)]
    after = [thread(1, 0, 6.0), thread(2, 1, 0.1), thread(3, 2, 0.2)]
    assert observe.idle_cpus(wanted, before, after) == CpuSet.parse("1")


def test_a_look_is_cheap_and_sees_threads_and_a_sample(run: Callable[..., Pinned]) -> None:
    one = run(64, str(CPU), mask={CPU})
    cpus = CpuSet([CPU])
    seen = observe.look(spec(cpus=cpus, mem_nodes=CpuSet.parse("0")), one.pid, samples=256)
    assert seen == Look(threads=2, threads_off_plan=0, remote_page_ratio=0.0)
    elsewhere = spec(cpus=CpuSet.parse("900"), mem_nodes=CpuSet.parse("1"))
    seen = observe.look(elsewhere, one.pid, samples=256)
    assert seen == Look(threads=2, threads_off_plan=2, remote_page_ratio=1.0)
    gone = observe.look(elsewhere, 0x7FFFFFFF)
    assert gone == Look(threads=0, threads_off_plan=0, remote_page_ratio=None)


def test_drift_is_told_once() -> None:
    good = Look(threads=9, threads_off_plan=0, remote_page_ratio=0.001)
    bad = Look(threads=9, threads_off_plan=2, remote_page_ratio=0.2)
    assert drift(None, good) is None
    assert drift(good, good) is None
    words = drift(good, bad) or ""
    assert "2 of 9 threads may run off the plan (before: 0)" in words
    assert "20.0 % of the pages are on other nodes" in words
    assert drift(bad, bad) is None
    assert drift(bad, Look(threads=10, threads_off_plan=3, remote_page_ratio=0.3)) is None
    assert drift(bad, Look(threads=10, threads_off_plan=9, remote_page_ratio=0.2)) is not None
    assert drift(bad, good) is None
