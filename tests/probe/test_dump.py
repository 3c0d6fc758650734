"""The dump that a user sends: it reads back as the same machine, and holds nothing private."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from machines.build import build, names, write

from zenlaunch.errors import RenderError, TopologyError
from zenlaunch.probe.dump import save_dump
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology

MACHINES = [*(n for n in names() if not n.startswith(("epyc-", "past-"))), "epyc-9755-2s"]


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def stable(t: Topology) -> Topology:
    return replace(t, notes=tuple(n for n in t.notes if n.code != "spelling-conflict"))


@pytest.mark.parametrize("name", MACHINES)
def test_it_reads_back_as_the_same_machine(name: str, tree: Path) -> None:
    before = read_sysfs(build(name, tree / "machine"), live=False)
    archive = save_dump(tree / "machine", tree / "out")
    after = read_sysfs(unpack(archive, tree / "unpacked"), live=False)
    assert stable(after) == stable(before)


def test_the_same_machine_gives_the_same_bytes(tree: Path) -> None:
    build("hbm-flat", tree / "machine")
    first = save_dump(tree / "machine", tree / "a")
    second = save_dump(tree / "machine", tree / "b")
    assert first.name == second.name == "a-made-up-processor-16cpus.tar.gz"
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_mode & 0o777 == 0o644


SECRET = "SECRET-4711"


def test_nothing_private_is_packed(tree: Path) -> None:
    root = build("cgroup2-job", tree / "machine")
    cpuinfo = root / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text() + f"\nHardware : {SECRET}\nSerial : {SECRET}\n")
    write(
        {
            "sys/devices/system/cpu/cpu0/topology/ppin": SECRET,
            "sys/class/net/eth0/address": SECRET,
            "sys/class/dmi/id/product_uuid": SECRET,
            "proc/sys/kernel/hostname": SECRET,
            "proc/version": f"Linux version 6.1 (root@{SECRET})",
            "proc/self/environ": f"TOKEN={SECRET}",
            "proc/self/cmdline": SECRET,
            "proc/1/status": SECRET,
            "proc/cmdline": SECRET,
            "etc/hostname": SECRET,
            "proc/self/status": f"Name:\t{SECRET}\nCpus_allowed_list:\t0-3\nGroups:\t{SECRET}\n",
            "proc/self/cgroup": f"0::/{SECRET}/job/step\n",
            f"cgroup/unified/{SECRET}/job/step/cpuset.cpus.effective": "0-2\n",
            "proc/meminfo": f"MemTotal: 1 kB\n{SECRET}: 1 kB\n",
        },
        root,
    )
    archive = save_dump(root, tree / "out")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            assert SECRET not in member.name
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert member.mtime == 0
            assert member.isfile()
            file = tar.extractfile(member)
            assert file is not None
            assert SECRET.encode() not in file.read(), member.name
        kept = {m.name.partition("/")[2] for m in tar.getmembers()}
    assert not any("ppin" in name or "environ" in name for name in kept)
    assert "README" in kept
    after = read_sysfs(unpack(archive, tree / "unpacked"), live=False)
    assert str(after.allowed_cpus) == "0-2"


def test_this_machine(tree: Path) -> None:
    archive = save_dump(Path("/"), tree / "out")
    after = read_sysfs(unpack(archive, tree / "unpacked"), live=False)
    here = read_sysfs(Path("/"), live=True)
    assert after.cores == here.cores
    assert after.l3 == here.l3
    assert after.allowed_cpus == here.allowed_cpus


def test_a_folder_that_cannot_be_written(tree: Path) -> None:
    root = build("hbm-flat", tree / "machine")
    (tree / "file").write_text("")
    with pytest.raises(RenderError, match="the dump cannot be written") as caught:
        save_dump(root, tree / "file")
    assert caught.value.hint


def test_no_machine_no_dump(tree: Path) -> None:
    with pytest.raises(TopologyError):
        save_dump(tree, tree / "out")
    assert not (tree / "out").exists()
