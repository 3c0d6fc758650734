"""What the machines of tests/machines cannot show: this very machine, refusals, cgroups, speed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from machines.build import build, files_of, load, write

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.probe.cgroup import read_allowed
from zenlaunch.probe.conflicts import conflicts
from zenlaunch.probe.sysfs import _no_cpus, read_sysfs, read_tree
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import contradictions

SMALL = "hbm-flat"
CPU = "sys/devices/system/cpu"


def test_this_machine() -> None:
    t = read_sysfs(Path("/"), live=True)
    assert t.origin == "live"
    assert t.machine.arch == os.uname().machine
    assert t.allowed_cpus is not None
    assert t.allowed_cpus <= CpuSet(os.sched_getaffinity(0))
    assert t.allowed_cpus
    assert contradictions(t) == []
    for node in t.nodes:
        assert node.free_bytes is None or 0 < node.free_bytes <= (node.memory_bytes or 0)


def test_free_memory_only_live(tree: Path) -> None:
    build(SMALL, tree)
    node0 = tree / "sys/devices/system/node/node0/meminfo"
    node0.write_text(
        "Node 0 MemTotal:       1000 kB\nNode 0 MemFree:         100 kB\n"
        "Node 0 Active(file):     10 kB\nNode 0 Inactive(file):   20 kB\n"
        "Node 0 SReclaimable:      3 kB\nNode 0 Active(anon):    500 kB\n"
    )
    assert read_sysfs(tree, live=False).nodes[0].free_bytes is None
    live = read_tree(Tree(tree), affinity=CpuSet([1]), live=True)
    assert live.nodes[0].free_bytes == 133 * 1024
    assert live.nodes[0].memory_bytes == 1000 * 1024
    assert live.allowed_cpus == CpuSet([1])


def test_affinity_and_cgroup_are_both_kept(tree: Path) -> None:
    build("cgroup2-job", tree)
    allowed = read_allowed(Tree(tree), affinity=CpuSet.parse("4-40"))
    assert (str(allowed.cpus), str(allowed.mems)) == ("4-5", "0-5")
    wide = read_allowed(Tree(tree), affinity=CpuSet.parse("0-1919"))
    assert str(wide.cpus) == "0-5"


def test_an_affinity_past_1024_cpus(tree: Path) -> None:
    build("past-1024-cpus", tree)
    t = read_tree(Tree(tree), affinity=CpuSet.parse("1500-1999"), live=True)
    assert str(t.usable_cpus) == "1500-1919"


MOUNTINFO = "30 23 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        # A blank in the mount point is printed in octal.
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "proc/self/mountinfo": MOUNTINFO.format(root="/", point="/mnt/c\\040g"),
                "mnt/c g/a/cpuset.cpus.effective": "0-1\n",
            },
            "0-1",
        ),
        # A path outside the namespace: the mount's own top is the nearest group in sight.
        (
            {
                "proc/self/cgroup": "0::/../other\n",
                "proc/self/mountinfo": MOUNTINFO.format(root="/docker/x", point="/cg"),
                "cg/cpuset.cpus.effective": "2\n",
                "other/cpuset.cpus.effective": "3\n",
            },
            "2",
        ),
        # A container's name that another one's name begins with.
        (
            {
                "proc/self/cgroup": "0::/docker/abcdef\n",
                "proc/self/mountinfo": MOUNTINFO.format(root="/docker/abc", point="/cg"),
                "cg/cpuset.cpus.effective": "1\n",
                "cg/def/cpuset.cpus.effective": "3\n",
            },
            "1",
        ),
        # v1 and v2 side by side: the cpuset controller lives in v1.
        (
            {
                "proc/self/cgroup": "5:cpuset,cpu:/job\n0::/slice\n",
                "proc/mounts": "cgroup2 /u cgroup2 rw 0 0\ncgroup /v1 cgroup rw,cpu,cpuset 0 0\n",
                "v1/job/cpuset.effective_cpus": "1-2\n",
                "v1/job/cpuset.cpus": "0-3\n",
                "u/slice/cpuset.cpus.effective": "3\n",
            },
            "1-2",
        ),
        # An empty set is that of a group which was never given one.
        (
            {
                "proc/self/cgroup": "4:cpuset:/job\n",
                "proc/self/mounts": "cgroup /v1 cgroup rw,cpuset 0 0\n",
                "v1/job/cpuset.cpus": "\n",
                "v1/cpuset.cpus": "0-2\n",
            },
            "0-2",
        ),
        # Mounted without the controller, or not at all: nothing is known.
        (
            {"proc/self/cgroup": "0::/a\n", "proc/mounts": "cgroup2 /cg cgroup2 rw 0 0\nshort\n"},
            None,
        ),
        ({"proc/self/cgroup": "garbage\n3:cpuset:no-slash\n", "proc/self/cpuset": "x\n"}, None),
        ({"proc/self/status": "Cpus_allowed_list:\t0,2\nMems_allowed_list:\t0\n"}, "0,2"),
    ],
)
def test_where_the_cpuset_is_found(tree: Path, files: dict[str, str], want: str | None) -> None:
    allowed = read_allowed(Tree(write(files, tree)), affinity=None)
    assert (None if allowed.cpus is None else str(allowed.cpus)) == want


@pytest.mark.parametrize(
    ("rel", "content", "message"),
    [
        (f"{CPU}/online", "0-x\n", "cpu/online: '0-x' is not a CPU list"),
        (f"{CPU}/cpu1/topology/physical_package_id", "one\n", "'one' is not a number"),
        (f"{CPU}/cpu1/topology/physical_package_id", "9" * 40, "is not a number"),
        (f"{CPU}/cpu2/topology/thread_siblings_list", "\0x", "is not a CPU list"),
        ("sys/devices/system/node/node1/cpumap", "zz", "node1/cpumap: 'zz' is not a CPU mask"),
        ("sys/devices/system/node/node1/distance", "10 far\n", "is not a row of distances"),
        ("proc/self/status", "Mems_allowed_list:\tall\n", "status: 'Mems_allowed_list"),
    ],
)
def test_a_damaged_file_is_named(tree: Path, rel: str, content: str, message: str) -> None:
    build(SMALL, tree)
    write({rel: content}, tree)
    with pytest.raises(TopologyError) as caught:
        read_sysfs(tree, live=False)
    assert message in caught.value.message
    assert str(tree) in caught.value.message
    assert "--save" in (caught.value.hint or "")


def test_damage_on_a_live_machine_asks_for_a_dump() -> None:
    error = Tree(Path("/")).damaged("sys/x", "y" * 100, "is odd")
    assert error.message == "/sys/x: '" + "y" * 57 + "...' is odd"
    assert "send a dump" in (error.hint or "")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"sys/devices/system/cpu/online": ""},
        {"proc/cpuinfo": "processor : x\n"},
        {"proc/self/cpuset": "/job\n", "dev/cpuset/job/cpus": "1-6\n",
         "proc/mounts": "none /dev/cpuset cpuset rw 0 0\n"},
    ],
)  # fmt: skip
def test_no_cpus_at_all(tree: Path, files: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match="no CPU information below") as caught:
        read_sysfs(write(files, tree), live=False)
    assert caught.value.hint == "--sysroot takes the folder that holds sys/ and proc/"
    assert caught.value.exit_code == 3


def test_one_folder_too_deep(tree: Path) -> None:
    with pytest.raises(TopologyError) as caught:
        read_sysfs(build(SMALL, tree) / "sys", live=False)
    assert caught.value.hint == f"this is a sys folder itself: --sysroot {tree}"


def test_no_cpus_on_a_live_machine(tree: Path) -> None:
    nothing = Tree(tree)
    nothing.root = ""
    assert "is /sys mounted?" in (_no_cpus(nothing).hint or "")


def test_cpuinfo_alone_is_enough_for_cores(tree: Path) -> None:
    blocks = [f"processor\t: {n}\nphysical id\t: {n % 2}\ncore id\t: {n // 2 % 2}\n"
              for n in range(8)]  # fmt: skip
    t = read_sysfs(write({"proc/cpuinfo": "\n".join(blocks)}, tree), live=False)
    assert str(t.online) == "0-7"
    assert [str(c.cpus) for c in t.cores] == ["0,4", "1,5", "2,6", "3,7"]
    assert {p.id: str(p.cpus) for p in t.packages} == {0: "0,2,4,6", 1: "1,3,5,7"}


def test_folders_pipes_and_links_instead_of_files(tree: Path) -> None:
    build(SMALL, tree)
    package = tree / CPU / "cpu1/topology/core_id"
    package.unlink()
    os.mkfifo(package)
    shared = tree / CPU / "cpu0/cache/index3/size"
    shared.unlink()
    shared.mkdir()
    isolated = tree / CPU / "isolated"
    isolated.unlink()
    isolated.symlink_to("isolated")
    t = read_sysfs(tree, live=False)
    assert len(t.cores) == 8
    assert t.l3[0].size_bytes is None


def test_a_file_that_may_not_be_read_is_noted(tree: Path) -> None:
    t = read_sysfs(build(SMALL, tree), live=False)
    files = Tree(tree)
    assert conflicts(files, t) == []
    files.denied += [f"proc/{n}" for n in range(6)]  # as root reads everything, tests as root too
    (note,) = conflicts(files, t)
    assert note.code == "permission-denied"
    assert note.text.endswith("proc/3; and 2 more; read as if they were absent")


def test_512_cpus_are_read_at_once(tree: Path) -> None:
    write(files_of(load("epyc-9755-2s-smt")), tree)
    best = 60.0
    for _ in range(5):
        start = time.perf_counter()
        read_tree(Tree(tree), affinity=None, live=True)
        best = min(best, time.perf_counter() - start)
    # 25 ms on an idle machine; `zenlaunch plan` as a whole has 400.
    assert best < 0.3
