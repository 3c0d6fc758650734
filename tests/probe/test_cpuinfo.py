"""The names of the hardware on every architecture, by the keys of /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines.build import write

from zenlaunch.probe.cpuinfo import read_cpuinfo, read_machine
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Machine

X86 = "processor : 0\nvendor_id : AuthenticAMD\nmodel name : EPYC\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            X86 + "flags : fpu lm avx512f\n",
            Machine(arch="x86_64", vendor="AuthenticAMD", model="EPYC", avx512=True),
        ),
        (
            X86 + "flags : fpu\n",
            Machine(arch="i686", vendor="AuthenticAMD", model="EPYC", avx512=False),
        ),
        (X86, Machine(arch=None, vendor="AuthenticAMD", model="EPYC", avx512=None)),
        (
            "CPU implementer : 0x41\nCPU architecture: 8\nFeatures : fp asimd\n",
            Machine(arch="aarch64", vendor="0x41", avx512=False),
        ),
        (
            "Processor : ARMv7\nCPU implementer : 0x41\nCPU architecture: 7\n",
            Machine(arch="armv7l", vendor="0x41", model="ARMv7"),
        ),
        ("vendor_id : IBM/S390\n", Machine(arch="s390x", vendor="IBM/S390")),
        ("isa : rv64imafdc\nuarch : x,y\n", Machine(arch="riscv64", model="x,y")),
        ("vendor : GenuineIntel\narch : IA-64\nfamily : Itanium 2\n",
         Machine(arch="ia64", vendor="GenuineIntel", model="Itanium 2")),
        ("cpu : POWER9\nrevision : 2.2 (pvr 1)\n", Machine(arch="ppc64", model="POWER9")),
        ("cpu : 740/750\nrevision : 3.1 (pvr 8)\n", Machine(arch="ppc", model="740/750")),
        ("cpu : TI UltraSparc\ntype : sun4u\n", Machine(arch="sparc64", model="TI UltraSparc")),
        ("", Machine()),
        ("no colon here\n", Machine()),
    ],
)  # fmt: skip
def test_names(tree: Path, text: str, want: Machine) -> None:
    write({"proc/cpuinfo": text}, tree)
    assert read_machine(Tree(tree), arch=None) == want


def test_power_in_little_endian(tree: Path) -> None:
    write({"proc/cpuinfo": "cpu : POWER9\n", "sys/kernel/cpu_byteorder": "little\n"}, tree)
    assert read_machine(Tree(tree), arch=None).arch == "ppc64le"


def test_the_live_architecture_is_known_otherwise(tree: Path) -> None:
    assert read_machine(Tree(tree), arch="x86_64") == Machine(arch="x86_64")


def test_blocks(tree: Path) -> None:
    write({"proc/cpuinfo": "processor : 0\ncore id : 3\n\nprocessor : 70000\n\nx : y\n"}, tree)
    found = read_cpuinfo(Tree(tree)).cpus
    assert list(found) == [0]
    assert (found[0].core, found[0].package) == (3, None)
