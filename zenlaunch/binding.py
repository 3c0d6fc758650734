"""Binding: where a process tree may run and where its memory comes from, and how that is spelled.

Owns the value and its numactl spelling. Does not decide bindings (that is `plan`) nor apply them
(that is the supervisor). Follows numactl(8) and set_mempolicy(2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from zenlaunch.cpuset import CpuSet


class MemPolicy(StrEnum):
    """The kernel's memory policies that zenlaunch uses."""

    BIND = "bind"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """CPUs, memory nodes and mempolicy of one instance; no memory nodes means no policy."""

    cpus: CpuSet
    mem_nodes: CpuSet

    @property
    def policy(self) -> MemPolicy:
        return MemPolicy.BIND if self.mem_nodes else MemPolicy.DEFAULT


def split_numactl(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (numactl's words, the program's) of what begins with `numactl_argv`."""
    own = ("--physcpubind=", "--membind=")
    at = 0
    if argv and argv[0] == "numactl":
        at = 1
        while at < len(argv) and argv[at].startswith(own):
            at += 1
    return tuple(argv[:at]), tuple(argv[at:])


def numactl_argv(binding: Binding) -> tuple[str, ...]:
    """Return the numactl prefix; () for an unbound process.

    `--physcpubind` takes the CPUs' numbers as the kernel counts them; a list with an offline or
    forbidden CPU makes numactl refuse to start, which is what a plan for another machine deserves.
    """
    argv = []
    if binding.cpus:
        argv.append(f"--physcpubind={binding.cpus}")
    if binding.policy is MemPolicy.BIND:
        argv.append(f"--membind={binding.mem_nodes}")
    return ("numactl", *argv) if argv else ()
