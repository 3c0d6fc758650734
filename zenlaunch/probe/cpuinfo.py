"""/proc/cpuinfo: names of the hardware, and the cores of a machine whose sysfs does not show them.

Owns the blocks of that file on every architecture. Does not decide when to believe it: sysfs comes
first (see `sysfs`), because cpuinfo shows APIC numbers that the kernel may have reinterpreted.
Follows arch/*/kernel/*proc*.c of Linux; there is no document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from zenlaunch.cpuset import MAX_ID
from zenlaunch.probe.source import printable
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Machine

CPUINFO = "proc/cpuinfo"
# The first block is enough for the names, and its flags line has some 3 KiB.
_HEAD = 16 << 10
_MODEL_KEYS = ("model name", "cpu model", "uarch", "cpu", "Processor", "family")
_VENDOR_KEYS = ("vendor_id", "vendor", "CPU implementer")
_FLAG_KEYS = ("flags", "Features", "features")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBlock:
    """What one block says of one CPU; None where it says nothing."""

    package: int | None = None
    core: int | None = None
    siblings: int | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuInfo:
    """The blocks by CPU number, empty where the file is absent."""

    cpus: Mapping[int, CpuBlock] = field(default_factory=dict)


def read_machine(tree: Tree, *, arch: str | None) -> Machine:
    """Return the names of the hardware; `arch` is the live machine's, None for a dump."""
    text = tree.text(CPUINFO, limit=_HEAD) or ""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            first.setdefault(key.strip(), printable(value.strip()))
    flags = next((first[k].split() for k in _FLAG_KEYS if first.get(k)), None)
    vendor = next((first[k] for k in _VENDOR_KEYS if first.get(k)), None)
    # arm64 names no model; "cpu" is a count on sparc only in other keys, a model on power and s390.
    model = next((first[k] for k in _MODEL_KEYS if first.get(k)), None)
    return Machine(
        arch=arch or _arch(first, flags or [], tree.text("sys/kernel/cpu_byteorder")),
        vendor=vendor,
        model=model,
        avx512=None if flags is None else "avx512f" in flags,
    )


def is_virtual(tree: Tree) -> bool:
    """Say whether the CPU tells its guests of a hypervisor (x86)."""
    text = tree.text(CPUINFO, limit=_HEAD) or ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split()


def read_cpuinfo(tree: Tree) -> CpuInfo:
    """Read every block; numbers that cannot be read are None, this file is only a fallback."""
    text = tree.text(CPUINFO)
    if not text:
        return CpuInfo()
    cpus: dict[int, CpuBlock] = {}
    for block in re.split(r"\n[ \t]*\n", text):
        values: dict[str, str] = {}
        for line in block.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                values.setdefault(key.strip(), value.strip())
        cpu = _number(values.get("processor"))
        if cpu is None or not 0 <= cpu <= MAX_ID:
            continue
        cpus[cpu] = CpuBlock(
            package=_number(values.get("physical id")),
            core=_number(values.get("core id")),
            siblings=_number(values.get("siblings")),
            cores=_number(values.get("cpu cores")),
        )
    return CpuInfo(cpus=cpus)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d{1,9}", text) else None


def _arch(first: Mapping[str, str], flags: list[str], byte_order: str | None) -> str | None:
    """Name the architecture by the keys only its kernel prints; None where they do not tell."""
    vendor = first.get("vendor_id", "")
    if first.get("arch") == "IA-64":
        return "ia64"
    if "IBM/S390" in vendor:
        return "s390x"
    if "isa" in first and first["isa"].startswith(("rv32", "rv64")):
        return "riscv" + first["isa"][2:4]
    if "CPU implementer" in first:
        return "aarch64" if first.get("CPU architecture") in ("8", "AArch64") else "armv7l"
    if "flags" in first and vendor:  # other architectures call them features, or isa
        return "x86_64" if "lm" in flags else "i686"
    if "(pvr" in first.get("revision", "") and not first.get("cpu", "").startswith("POWER"):
        return "ppc"
    if first.get("cpu", "").upper().startswith(("POWER", "PPC", "CELL")):
        return "ppc64le" if byte_order == "little" else "ppc64"
    if "sparc" in first.get("cpu", "").lower() or first.get("type", "").startswith("sun4"):
        return "sparc64"
    return None
