"""What makes a machine another one, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines.build import build

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.same_machine import differences
from zenlaunch.topology import Topology

CPUS = CpuSet.parse("0-3")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return read_sysfs(build("epyc-9755-2s", tmp_path_factory.mktemp("m")), live=False)


def without(machine: Topology, cpus: CpuSet) -> Topology:
    """Return the machine after some of its CPUs were taken offline."""
    return replace(
        machine,
        online=machine.online - cpus,
        offline=cpus,
        packages=tuple(replace(p, cpus=p.cpus - cpus) for p in machine.packages),
        nodes=tuple(replace(n, cpus=n.cpus - cpus) for n in machine.nodes),
        l3=tuple(replace(d, cpus=d.cpus - cpus) for d in machine.l3),
        cores=tuple(replace(c, cpus=c.cpus - cpus) for c in machine.cores if c.cpus - cpus),
    )


def test_same(machine: Topology) -> None:
    assert differences(machine, machine, cpus=CPUS) == ()


def test_what_changes_by_itself(machine: Topology) -> None:
    later = replace(
        machine,
        allowed_cpus=CPUS,
        nodes=tuple(
            replace(n, free_bytes=1, memory_bytes=(n.memory_bytes or 0) - (64 << 20))
            for n in machine.nodes
        ),
    )
    assert differences(machine, later, cpus=CPUS) == ()


def test_an_offline_cpu_counts_for_its_own_instance(machine: Topology) -> None:
    later = without(machine, CpuSet([9]))
    assert differences(machine, later, cpus=CPUS) == ()
    assert differences(machine, later, cpus=CpuSet.parse("8-11")) == ("CPU 9 is offline",)


def test_another_model(machine: Topology) -> None:
    other = replace(machine, machine=replace(machine.machine, model="another"))
    (found,) = differences(machine, other, cpus=CPUS)
    assert found == "model: planned for AMD EPYC 9755 128-Core Processor, this is another"


def test_another_nps(machine: Topology, tmp_path: Path) -> None:
    other = read_sysfs(build("epyc-9755-2s-nps2", tmp_path), live=False)
    found = differences(machine, other, cpus=CPUS)
    assert "node 0: planned with CPUs 0-127, this one has 0-63" in found
    assert "node 2 is new" in found


def test_fewer_cpus(machine: Topology) -> None:
    other = replace(without(machine, CpuSet([0])), offline=CpuSet())
    found = differences(machine, other, cpus=CPUS)
    assert "CPU 0 is not there" in found


def test_lost_memory(machine: Topology) -> None:
    first, second = machine.nodes
    less = replace(first, memory_bytes=(first.memory_bytes or 0) // 2)
    found = differences(machine, replace(machine, nodes=(less, second)), cpus=CPUS)
    assert found == ("node 0: planned with 786432 MiB of memory, this one has 393216",)


def test_a_node_that_is_gone(machine: Topology) -> None:
    found = differences(machine, replace(machine, nodes=machine.nodes[:1]), cpus=CPUS)
    assert "node 1 is not there" in found
