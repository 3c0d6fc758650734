"""The texts of other programs: what is taken from them, what is left unknown, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from machines.build import build

from probe.texts import (
    COLLECT_ENV,
    LSCPU_EXTENDED,
    LSCPU_HYBRID,
    LSCPU_NEW,
    LSCPU_OFFLINE,
    LSCPU_OLD,
    LSCPU_PARSE,
    NUMACTL,
    NUMACTL_RANGES,
    TEXTS,
    as_json,
    extended_json,
)
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology

ORIGINS = {
    "lscpu-new": "lscpu",
    "lscpu-offline": "lscpu",
    "lscpu-hybrid": "lscpu",
    "lscpu-J": "lscpu-json",
    "lscpu-J-nested": "lscpu-json",
    "lscpu-e": "lscpu-extended",
    "lscpu-e-J": "lscpu-extended",
    "lscpu-p": "lscpu-parse",
    "numactl-ranges": "numactl",
    "collect-env-sections": "collect-env",
}


def read(text: str) -> Topology:
    return read_source(text, source="machine.txt")


def codes(t: Topology) -> list[str]:
    return [n.code for n in t.notes]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_kind_is_recognised(name: str) -> None:
    t = read(TEXTS[name])
    assert t.origin == ORIGINS.get(name, name)
    assert t.allowed_cpus is None
    assert t.allowed_mems is None
    assert all(n.free_bytes is None for n in t.nodes)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_windows_line_ends_and_a_mark_change_nothing(name: str) -> None:
    text = "\ufeff" + TEXTS[name].replace("\n", "\r\n")
    assert read(text) == read(TEXTS[name])


def test_a_saved_probe(tree: Path) -> None:
    t = read_sysfs(build("hybrid-core-and-atom", tree), live=False)
    assert read(json.dumps(t.to_dict())) == t


def test_lscpu() -> None:
    t = read(LSCPU_OLD)
    assert t.machine.model == "AMD EPYC 0000 4-Core Processor"
    assert (t.machine.arch, t.machine.vendor, t.machine.avx512) == ("x86_64", "AuthenticAMD", True)
    assert str(t.online) == "0-15"
    assert t.offline == CpuSet()
    assert {n.id: str(n.cpus) for n in t.nodes} == {0: "0-3,8-11", 1: "4-7,12-15"}
    assert t.threads_per_core == 2
    # Two sockets, but nothing says which CPUs are in which; nor which are siblings.
    assert [(p.id, p.cpus_known) for p in t.packages] == [(0, False), (1, False)]
    assert t.cores == ()
    assert not t.l3_known
    assert all(n.memory_bytes is None and n.package is None for n in t.nodes)


def test_lscpu_where_the_counts_leave_one_answer() -> None:
    t = read(LSCPU_NEW)
    assert t.machine.model == "AMD EPYC 0000 8-Core Processor"
    assert t.machine.avx512 is False
    assert [str(p.cpus) for p in t.packages] == ["0-7"]
    assert [str(c.cpus) for c in t.cores] == list("01234567")
    assert {c.node for c in t.cores} == {0}
    assert {c.package for c in t.cores} == {0}
    assert [(n.id, str(n.cpus), n.package) for n in t.nodes] == [(0, "0-7", 0), (1, "", None)]


def test_lscpu_json_says_the_same() -> None:
    for text, nested in ((LSCPU_OLD, False), (LSCPU_NEW, True)):
        flat = replace(read(text), origin="lscpu-json")
        assert read(as_json(text, nested=nested)) == flat


def test_lscpu_json_null_is_an_empty_list() -> None:
    t = read(as_json(LSCPU_NEW))
    assert str(t.nodes[1].cpus) == ""


def test_lscpu_with_offline_cpus_does_not_trust_the_threads() -> None:
    t = read(LSCPU_OFFLINE)
    assert str(t.offline) == "12-15"
    assert str(t.nodes[1].cpus) == "4-7"
    assert t.threads_per_core is None
    assert t.cores == ()
    assert codes(t) == ["node-names-offline-cpus", "threads-unknown", "offline-cpus"]


def test_lscpu_of_several_core_types() -> None:
    t = read(LSCPU_HYBRID)
    assert t.machine.model == "the fast one"
    assert t.threads_per_core == 1
    assert [(p.id, p.cpus_known) for p in t.packages] == [(0, False)]
    assert len(t.cores) == 8
    assert {c.package for c in t.cores} == {None}


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("Thread(s) per core:    2", "Thread(s) per core:    0", None),
        ("Thread(s) per core:    2", "Thread(s) per core:    16", None),
        ("Thread(s) per core:    2", "Thread(s) per core:    3", None),
        ("Socket(s):             2", "Socket(s):             2 // two of them", 2),
        ("Socket(s):             2", "Socket(s):             -", 2),
        ("Core(s) per socket:    4", "Core(s) per socket:    8", None),
    ],
)
def test_lscpu_threads(old: str, new: str, want: int | None) -> None:
    assert read(LSCPU_OLD.replace(old, new)).threads_per_core == want


def test_lscpu_of_one_core_in_all() -> None:
    text = "CPU(s): 2\nOn-line CPU(s) list: 0,1\nThread(s) per core: 2\nSocket(s): 1\n"
    t = read(text)
    assert [(c.id, str(c.cpus), c.node) for c in t.cores] == [(0, "0-1", None)]
    assert [str(p.cpus) for p in t.packages] == ["0-1"]


def test_lscpu_hexadecimal() -> None:
    text = "CPU(s): 4\nOn-line CPU(s) mask: 0xf\nNUMA node(s): 1\nNUMA node3 CPU(s): 0xf\n"
    t = read(text)
    assert str(t.online) == "0-3"
    assert [(n.id, str(n.cpus)) for n in t.nodes] == [(3, "0-3")]


def test_lscpu_before_it_listed_the_online_cpus() -> None:
    nodes = "NUMA node(s): 2\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n"
    t = read(f"Architecture: x86_64\nCPU(s): 8\nCPU socket(s): 2\nThread(s) per core: 1\n{nodes}")
    assert str(t.online) == "0-7"
    assert len(t.packages) == 2
    with pytest.raises(TopologyError, match="line 1: the text does not list its CPUs"):
        read(f"CPU(s): 9\n{nodes}")


@pytest.mark.parametrize(
    ("flags", "want"),
    [("fpu vme ...", None), ("", None), ("avx512f ...", True), (" ".join("abcdefghijkl"), False)],
)
def test_flags_that_were_cut_deny_nothing(flags: str, want: bool | None) -> None:
    t = read(f"CPU(s): 1\nOn-line CPU(s) list: 0\nFlags: {flags}\n")
    assert t.machine.avx512 is want


def test_table() -> None:
    for text in (LSCPU_EXTENDED, extended_json(LSCPU_EXTENDED)):
        t = read(text)
        assert str(t.online) == "0-6"
        assert str(t.offline) == "7"
        assert [str(c.cpus) for c in t.cores] == ["0,4", "1,5", "2,6", "3"]
        assert [str(d.cpus) for d in t.l3] == ["0-1,4-5", "2-3,6"]
        assert [(p.id, str(p.cpus)) for p in t.packages] == [(0, "0-1,4-5"), (1, "2-3,6")]
        assert [(n.id, n.package) for n in t.nodes] == [(0, 0), (1, 1)]
        assert t.cores[2].l3 == 1
        assert t.threads_per_core is None


def test_parsable_table() -> None:
    t = read(LSCPU_PARSE)
    assert t.offline is None
    assert [str(c.cpus) for c in t.cores] == ["0,4", "1,5", "2,6", "3,7"]
    assert [str(d.cpus) for d in t.l3] == ["0-1,4-5", "2-3,6-7"]
    assert t.threads_per_core == 2


def test_columns_that_are_not_there_are_not_known() -> None:
    t = read("# CPU,Node\n0,0\n1,1\n")
    assert t.cores == ()
    assert t.packages == ()
    assert not t.l3_known
    assert t.threads_per_core is None
    assert [(n.id, str(n.cpus)) for n in t.nodes] == [(0, "0"), (1, "1")]
    assert codes(t) == ["columns-missing"]
    t = read("CPU ONLINE\n 0 yes\n 1 yes\n")
    assert (t.nodes, t.cores, str(t.online)) == ((), (), "0-1")


def test_a_cache_cell_that_lacks_a_level_says_nothing() -> None:
    t = read(LSCPU_EXTENDED.replace("  3    1      1    3 3:3:3:1", "  3    1      1    3 3:3:1  "))
    assert not t.l3_known
    assert t.l3 == ()
    assert "l3-unknown" in codes(t)
    t = read(LSCPU_PARSE.replace("3,3,1,1,,3,3,3,1", "3,3,1,1,,3,3,1"))
    assert not t.l3_known
    assert len(t.cores) == 4


def test_core_numbers_per_type_of_core() -> None:
    text = "CPU SOCKET CORE L1d:L1i:L2\n 0 0 0 0:0:0\n 1 0 1 1:1:1\n 2 0 0 2:2:2\n 3 0 1 3:3:3\n"
    t = read(text)
    assert t.cores == ()
    assert t.packages == ()
    assert "cores-per-type" in codes(t)


def test_physical_core_numbers_repeat_in_each_socket_and_node() -> None:
    t = read("# CPU,Core,Socket,Node\n0,0,0,0\n1,0,0,1\n2,0,1,2\n3,0,1,3\n")
    assert [str(c.cpus) for c in t.cores] == ["0", "1", "2", "3"]


def test_some_cpus_without_a_core_number() -> None:
    t = read("# CPU,Core\n0,0\n1,\n")
    assert t.cores == ()
    assert "siblings-unknown" in codes(t)


def test_numactl() -> None:
    t = read(NUMACTL)
    assert {n.id: str(n.cpus) for n in t.nodes} == {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}
    assert {n.id: n.memory_bytes for n in t.nodes} == {0: 64215 << 20, 1: 0, 2: 128000 << 20}
    assert t.nodes[2].distances == {0: 255, 1: 255, 2: 10}
    assert (t.packages, t.cores, t.threads_per_core) == ((), (), None)
    assert codes(t) == ["memoryless-node", "memory-only-node", "distances-asymmetric"]
    t = read(NUMACTL_RANGES)
    assert [(n.id, len(n.cpus), n.memory_bytes) for n in t.nodes] == [
        (0, 256, 773727 << 20), (8, 256, None),
    ]  # fmt: skip


def test_numactl_without_cpu_lines() -> None:
    t = read("available: 2 nodes (0-1)\nnode 0 size: 0 MB\nnode 1 size: 4032 MB\n")
    assert not t.online_known
    assert not any(n.cpus_known for n in t.nodes)
    assert t.to_dict()["online"] is None
    assert [n.memory_bytes for n in t.nodes] == [0, 4032 << 20]
    assert codes(t) == ["cpus-unknown", "memoryless-node"]


def test_numactl_cut_at_the_top() -> None:
    t = read(NUMACTL.split("\n", 1)[1])
    assert codes(t)[0] == "text-incomplete"


def test_collect_env_is_the_lscpu_inside() -> None:
    assert read(COLLECT_ENV) == replace(read(LSCPU_OLD), origin="collect-env")


REFUSED = {
    "": "machine.txt: the text is empty",
    "hello\n": "machine.txt, line 1: not a text that describes a machine\n  1: hello",
    "\x1b[31mred\n": "\n  1: ·[31mred",
    "\n\nCPU\n": "line 3: not a text that describes a machine",
    "{": "line 1: not JSON: ",
    '{\n"schema": 1,\n}': "line 3: not JSON: ",
    "[" * 100_000: "line 1: not JSON that a probe or lscpu prints",
    '{"schema": ' + "9" * 5000 + "}": "line 1: not JSON that a probe or lscpu prints",
    "[]": "JSON, but neither a saved probe nor what lscpu -J prints",
    "{}": "JSON, but neither",
    '{"schema": 1}': "the key machine is missing",
    '{"lscpu": {}}': '"lscpu" is not a list of fields',
    '{"lscpu": [{"data": "1"}]}': "is no field",
    '{"lscpu": [{"field": "CPU(s):", "data": 4}]}': "is no field",
    '{"lscpu": [{"field": "CPU(s):", "data": "4", "children": 1}]}': "not a list of fields",
    '{"cpus": [1]}': '"cpus" is not a list of CPUs',
    '{"cpus": []}': "the table has no rows",
    '{"cpus": [{"node": 0}]}': "a row without the number of its CPU",
    LSCPU_OLD + NUMACTL: "the outputs of several programs in one text: numactl, lscpu",
    "CPU(s): 0\n": "line 1: lscpu found no CPU here",
    "CPU(s): 4\n": "line 1: the text does not list its CPUs",
    "CPU(s): 4\nOn-line CPU(s) list:\n": "line 2: the text does not list its CPUs",
    "CPU(s): many\nOn-line CPU(s) list: 0\n": "line 1: not a number\n  1: CPU(s): many",
    "CPU(s): 4\nOn-line CPU(s) list: 0 ... 3\n": "line 2: not a CPU list",
    "CPU(s): 4\nOn-line CPU(s) mask: 0xg\n": "line 2: not a CPU mask",
    "CPU(s): 2\nOn-line CPU(s) list: 0-3\n": "line 1: 2 CPUs are announced, 4 are on-line",
    "CPU(s): 4\nOn-line CPU(s) list: 0-1\nOff-line CPU(s) list: 3\n": "4 CPUs are announced",
    "CPU(s): 4\nOn-line CPU(s) list: 0-2\nOff-line CPU(s) list: 2-3\n": "CPUs 2 are on-line",
    LSCPU_OLD + LSCPU_NEW: "differs from line 4: two machines in one text?",
    LSCPU_OLD.replace("NUMA node(s):          2", "NUMA node(s): 3"): (
        "line 9: 3 NUMA nodes are announced, 2 are listed"
    ),
    LSCPU_OLD.replace("4-7,12-15", "4-7,12-"): "line 15: not a CPU list",
    LSCPU_OLD.replace("node1 CPU", "node99999 CPU"): "line 15: node 99999 is beyond any machine",
    LSCPU_PARSE.replace("5,1,0,0,,1,1,1,0", "5,1"): "line 10: 2 cells for 9 columns",
    LSCPU_PARSE.replace("5,1,0,0,,1,1,1,0", "5,1,0,0,,1,1,1,0,7"): "10 cells for 9 columns",
    LSCPU_PARSE.replace("5,1,0,0", "x,1,0,0"): "line 10: CPU is 'x', not a number",
    LSCPU_PARSE.replace("5,1,0,0", "99999,1,0,0"): "CPU is '99999', not a number",
    LSCPU_PARSE.replace("5,1,0,0", "4,1,0,0"): "line 10: CPU 4 is in line 9 already",
    LSCPU_PARSE.replace("5,1,0,0", ",1,0,0"): "line 10: a row without the number of its CPU",
    LSCPU_PARSE + "# CPU,Node\n8,0\n": "line 13: a second table with other columns begins here",
    "# CPU,Node\n": "the table has no rows",
    LSCPU_EXTENDED.replace("- -                 no ", "-                   no "): (
        "line 9: 7 cells for 8 columns"
    ),
    LSCPU_EXTENDED.replace(" no ", " 17 "): "line 9: ONLINE is '17', not yes or no",
    LSCPU_EXTENDED.replace("yes", " no"): "no CPU of the table is on-line",
    LSCPU_EXTENDED + "CPU NODE\n 9 0\n": "line 10: a second table",
    NUMACTL.replace("0 1 2 3 8", "0 ... 3 8"): "line 2: not a list of CPU numbers",
    NUMACTL.replace("0 1 2 3 8", "0 1 2 2 8"): "line 2: CPU 2 is listed twice",
    NUMACTL.replace("available: 3", "available: 4"): "line 1: 4 nodes are announced, 3",
    NUMACTL.replace("(0-2)", "(0-1,3)"): "line 1: nodes 0-1,3 are announced, 0-2 are described",
    NUMACTL.replace("(0-2)", "(x)"): "line 1: not a CPU list",
    NUMACTL.replace("64215 MB", "64 GB"): "line 3: not a size in MB",
    NUMACTL + NUMACTL: "a second machine begins here",
    NUMACTL.replace("node 1 cpus", "node 0 cpus"): "line 5: the CPUs of node 0 are listed twice",
    NUMACTL.replace("node 1 size", "node 0 size"): "line 7: the size of node 0 is given twice",
    NUMACTL.replace("node 2 cpus:\n", ""): "line 9: node 2 has no line `node 2 cpus:`",
    NUMACTL.replace("node 1 free", "node 1 frei"): "line 8: not a line that numactl -H prints",
    NUMACTL.replace("  1:  32  10  50", "  1:  32  10"): "line 15: 2 distances for the 3 nodes",
    NUMACTL.replace("  1:  32  10  50\n", ""): "line 13: the table of distances has 2 rows for 3",
    NUMACTL.replace("  1:  32", "  0:  32"): "line 15: the distances of node 0 are given twice",
    NUMACTL.replace("node   0   1   2", "node   0   1   3"): "is not about the nodes 0-2",
    NUMACTL.replace("node   0   1   2", "node   0   1   2\nnode   0   1   2"): (
        "line 14: a second table of distances begins here"
    ),
    "node 0 cpus:\nnode 0 size: 5 MB\n": "line 1: no node has a CPU",
    "available: 1 nodes (0)\n": "the text ends without a line `node N cpus:`",
    "node 99999 size: 5 MB\n": "node 99999 is beyond any machine",
    COLLECT_ENV.split("CPU:")[0]: "the report has no CPU block",
    "x" * (17 << 20): "17 MiB of text describe no machine",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=[m[:60] for m in REFUSED.values()])
def test_refused_with_the_line(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read(text)
    assert REFUSED[text] in caught.value.message
    assert caught.value.hint or "machine" in caught.value.message
    assert len(caught.value.message) < 400
