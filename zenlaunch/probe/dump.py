"""Pack what a maintainer needs to read this machine again, and nothing else.

Owns the list of files, which is a list of what is taken: a file that is not named here never leaves
the machine. Serial numbers (topology/ppin, "Serial" of cpuinfo), the host's name, addresses,
processes, the environment and the names of cgroups are not named. Does not send anything.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zenlaunch.errors import RenderError
from zenlaunch.probe.cgroup import read_allowed
from zenlaunch.probe.cpuinfo import CPUINFO
from zenlaunch.probe.sysfs import CPU, read_sysfs
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Topology

_NODE = "sys/devices/system/node"
_CPU_FILES = ("online", "offline", "present", "possible", "isolated", "nohz_full", "kernel_max")
_SMT_FILES = ("smt/active", "smt/control")
_TOPOLOGY_FILES = (
    *("physical_package_id", "die_id", "cluster_id", "core_id", "book_id", "drawer_id"),
    *("thread_siblings", "thread_siblings_list", "core_cpus", "core_cpus_list"),
    *("core_siblings", "core_siblings_list", "package_cpus", "package_cpus_list"),
    *("die_cpus", "die_cpus_list", "cluster_cpus", "cluster_cpus_list"),
    *("book_siblings", "book_siblings_list", "drawer_siblings", "drawer_siblings_list"),
)
_CACHE_FILES = ("id", "level", "type", "size", "shared_cpu_list", "shared_cpu_map")
_NODES_FILES = ("online", "possible", "has_cpu", "has_memory", "has_normal_memory")
_NODE_FILES = ("cpulist", "cpumap", "distance", "meminfo")
_OTHER_FILES = (
    *("sys/devices/cpu_core/cpus", "sys/devices/cpu_atom/cpus"),
    "sys/kernel/cpu_byteorder",
)
# The keys that `cpuinfo` and `conflicts` read; everything else in that file stays.
_CPUINFO_KEYS = frozenset(
    [
        *("processor", "vendor_id", "vendor", "model", "model name", "cpu model", "cpu family"),
        *("stepping", "siblings", "cpu cores", "physical id", "core id", "apicid", "flags"),
        *("Features", "features", "uarch", "isa", "cpu", "arch", "family", "revision", "type"),
        *("Processor", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"),
    ]
)
_README = """\
The processor topology of one machine, made with `zenlaunch probe --save`.
Below sys/ and proc/: files of the kernel that say which CPUs, caches and memory nodes there are,
and which of them a process may use. Read it with `zenlaunch probe --sysroot` and this folder.
No host name, serial number, address, process or environment is in it.
"""


def save_dump(root: Path, destination: Path) -> Path:
    """Pack the topology files below `root` into a .tar.gz in the folder `destination`.

    Returns the path of the archive; unpacked, its only folder is what `--sysroot` takes. The same
    machine gives the same bytes. Raises TopologyError for a root without a machine, RenderError
    where the archive cannot be written.
    """
    topology = read_sysfs(root, live=False)
    tree = Tree(root)
    name = _name(topology)
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for rel, content in _files(tree):
            entry = tarfile.TarInfo(f"{name}/{rel}")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return _write(destination, f"{name}.tar.gz", packed.getvalue())


def _write(folder: Path, name: str, content: bytes) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(content)
            os.fchmod(fd, 0o644)
        return Path(temporary).replace(folder / name)
    except OSError as e:
        raise RenderError(
            f"{folder / name}: the dump cannot be written: {e.strerror or e}",
            hint="name a folder that can be written to",
        ) from None


def _name(topology: Topology) -> str:
    model = topology.machine.model or topology.machine.arch or "machine"
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:48].strip("-") or "machine"
    return f"{slug}-{len(topology.online)}cpus"


def _files(tree: Tree) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of everything that is packed."""
    yield "README", _README.encode()
    for rel in _paths(tree):
        content = tree.raw(rel)
        if content is not None and rel.endswith("/meminfo"):
            content = b"".join(line for line in content.splitlines(True) if b"MemTotal:" in line)
        if content is not None:
            yield rel, content
    for cpu in tree.numbered(CPU, "cpu"):  # the links to the node of each CPU: their names suffice
        for node in tree.numbered(f"{CPU}/cpu{cpu}", "node"):
            yield f"{CPU}/cpu{cpu}/node{node}", b""
    cpuinfo = tree.text(CPUINFO)
    if cpuinfo:
        yield CPUINFO, _keep(cpuinfo, _CPUINFO_KEYS)
    meminfo = tree.text("proc/meminfo")
    if meminfo:
        yield "proc/meminfo", _keep(meminfo, frozenset(["MemTotal"]))
    # The names of cgroups are those of users, jobs and containers: only the sets are kept, as
    # affinity AND cpuset.
    allowed = read_allowed(tree, affinity=None)
    lists = {"Cpus_allowed_list": allowed.cpus, "Mems_allowed_list": allowed.mems}
    lines = [f"{key}:\t{cpus}\n" for key, cpus in lists.items() if cpus is not None]
    if lines:
        yield "proc/self/status", "".join(lines).encode()


def _paths(tree: Tree) -> Iterator[str]:
    yield from (f"{CPU}/{name}" for name in (*_CPU_FILES, *_SMT_FILES))
    for cpu in tree.numbered(CPU, "cpu"):
        folder = f"{CPU}/cpu{cpu}"
        yield from (f"{folder}/{name}" for name in ("online", "cpu_capacity"))
        yield from (f"{folder}/topology/{name}" for name in _TOPOLOGY_FILES)
        for index in tree.numbered(f"{folder}/cache", "index"):
            yield from (f"{folder}/cache/index{index}/{name}" for name in _CACHE_FILES)
    yield from (f"{_NODE}/{name}" for name in _NODES_FILES)
    for node in tree.numbered(_NODE, "node"):
        yield from (f"{_NODE}/node{node}/{name}" for name in _NODE_FILES)
    yield from _OTHER_FILES


def _keep(text: str, keys: frozenset[str]) -> bytes:
    """Keep blank lines and the lines whose key is listed."""
    lines = [
        line
        for line in text.splitlines()
        if not line.strip() or line.partition(":")[0].strip() in keys
    ]
    return ("\n".join(lines) + "\n").encode()
