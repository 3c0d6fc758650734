"""Expand a compact machine description (tests/machines/*.yaml) to a sysfs and procfs tree.

A description has the machine's facts, its quirks, and `expect`: what a careful reader takes from
the tree, written by hand. Keys of a description, all optional but `packages` (or `cpus_of`):

  packages, nodes_per_package, l3_per_package, cores_per_l3, threads   counts
  numbering     linear: package after package, all second siblings after all first ones (x86);
                adjacent: siblings side by side (POWER, VMs); round-robin: CPU n is in package
                n mod packages (or in node n mod nodes with `round_robin: nodes`)
  core_cpus     list of the CPUs of each core: replaces the numbering of an irregular machine
  package_ids   the kernel's ids, -1 allowed; default 0, 1, ...
  node_ids      the kernel's ids in the order of the packages; default 0, 1, ...
  core_ids      package (repeat in each package), node (repeat in each node), minus (-1), none
  memory, memory_of, l3_size, near, far    sizes and distances ("768GiB"; 12; 32)
  nodes         node id -> {cpus, memory}: replaces or adds nodes (cpus "" for a memory-only one)
  distances     node id -> row: replaces the computed rows
  offline, isolated, nohz_full, no_l3, fast, slow     CPU lists
  machine       vendor, model, arch, flags
  cgroup        version (1, 2, cpuset), path, mount, cpus, mems; shown_at: the group that has files
  status        cpus, mems: what proc/self/status allows
  quirks        masks (no *_list files), no-online, empty-online, no-present, no-caches, no-levels,
                no-topology, no-cpuinfo, no-nodes, no-meminfo, no-distance, stale-node-lists
                (they name offline CPUs), new-names (core_cpus_list, package_cpus_list), nul
  files         path -> content: written last, over everything else; null removes it (a "*" in the
                path stands for any characters)
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MACHINES = Path(__file__).parent
CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
UNITS = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20, "TiB": 1 << 30}


@dataclass
class Row:
    """One CPU: which core, L3, node and package it is in (numbers of the description, not ids)."""

    cpu: int
    package: int
    core: int
    l3: int
    node: int
    core_id: int


@dataclass
class Description:
    name: str
    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def expect(self) -> dict[str, Any]:
        return dict(self.facts["expect"])

    @property
    def what(self) -> str:
        return str(self.facts["what"])


def names() -> list[str]:
    """Return the names of all descriptions."""
    return sorted(p.stem for p in MACHINES.glob("*.yaml"))


def load(name: str) -> Description:
    """Read one description and lay out its CPUs."""
    facts = yaml.safe_load((MACHINES / f"{name}.yaml").read_text())
    return Description(name=name, facts=facts, rows=lay_out(facts))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a temporary folder for trees, in memory where possible: they are thousands of files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def build(name: str, root: Path, *, full: bool = False) -> Path:
    """Write the tree of one description below `root`; returns `root`.

    A large machine has each set of CPUs under one name and no L1 and L2, unless `full` (which is
    some 20,000 files for 512 CPUs, and what lscpu wants).
    """
    return write(files_of(load(name), full=full), root)


def write(files: dict[str, str], root: Path) -> Path:
    """Write files (path -> content) below a folder."""
    made: set[Path] = set()
    for rel, content in files.items():
        path = root / rel
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_text(content)
    return root


def lay_out(facts: dict[str, Any]) -> list[Row]:
    """Number the CPUs of a regular machine."""
    packages, nps = facts.get("packages", 1), facts.get("nodes_per_package", 1)
    l3s, per_l3 = facts.get("l3_per_package", 1), facts["cores_per_l3"]
    threads, numbering = facts.get("threads", 1), facts.get("numbering", "linear")
    per_package = l3s * per_l3
    cores = packages * per_package
    rows = []
    node_ids = facts.get("node_ids", range(packages * nps))
    for core in range(cores):
        package, place = divmod(core, per_package)
        node = package * nps + place * nps // per_package
        in_node = place - -(-(node % nps) * per_package // nps)
        first = core
        if numbering == "round-robin":
            by_node = facts.get("round_robin") == "nodes"
            groups = packages * nps if by_node else packages
            first = in_node * groups + node if by_node else place * groups + package
        if "core_cpus" in facts:
            cpus = sorted(ids(facts["core_cpus"][core]))
        elif numbering == "adjacent":
            cpus = [first * threads + thread for thread in range(threads)]
        else:
            cpus = [first + thread * cores for thread in range(threads)]
        core_id = {"node": in_node, "minus": -1}.get(facts.get("core_ids", "package"), place)
        rows += [
            Row(
                cpu=cpu,
                package=package,
                core=core,
                l3=core // per_l3,
                node=node_ids[node],
                core_id=core_id,
            )
            for cpu in cpus
        ]
    return sorted(rows, key=lambda r: r.cpu)


def cpu_list(cpus: Iterable[int]) -> str:
    """Print in list format (apart from zenlaunch.cpuset, which is under test)."""
    left = sorted(set(cpus))
    runs: list[list[int]] = []
    for cpu in left:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def cpu_mask(cpus: Iterable[int], width: int) -> str:
    """Print as hex words of 32 bits, as wide as the kernel was built for."""
    bits = sum(1 << c for c in set(cpus))
    words = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, width, 32)]
    return ",".join(reversed(words))


def ids(text: str | None) -> set[int]:
    """Read list format; None is the empty set."""
    found: set[int] = set()
    for part in str("" if text is None else text).split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def kib(size: str) -> int:
    """Read "768GiB" as a number of KiB."""
    return round(float(size[:-3]) * UNITS[size[-3:]])


class _Writer:
    """Collects the files of one machine."""

    def __init__(self, description: Description, *, full: bool) -> None:
        self.facts = description.facts
        self.rows = description.rows
        self.quirks = set(self.facts.get("quirks", ()))
        self.files: dict[str, str] = {}
        self.all = {r.cpu for r in self.rows}
        self.offline = ids(self.facts.get("offline"))
        self.online = self.all - self.offline
        self.width = -(-(max(self.all) + 1) // 32) * 32
        # A large machine has every set under one name only, and its L3 as only cache: the tests
        # would else write 20,000 files for one machine.
        self.large = len(self.all) > 64 and not full

    def put(self, rel: str, content: object) -> None:
        self.files[rel] = f"{content}\n" + ("\0" if "nul" in self.quirks else "")

    def put_set(self, rel: str, listed: str, masked: str, cpus: Iterable[int]) -> None:
        """Write a set under both of its names, or as a mask alone."""
        cpus = set(cpus)
        if "masks" not in self.quirks:
            self.put(f"{rel}/{listed}", cpu_list(cpus))
        short = self.large and "masks" not in self.quirks and not rel.startswith(NODE)
        if "lists" not in self.quirks and not short:
            self.put(f"{rel}/{masked}", cpu_mask(cpus, self.width))

    def group(self, key: str) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for row in self.rows:
            if row.cpu in self.online:
                found.setdefault(getattr(row, key), set()).add(row.cpu)
        return found


def files_of(description: Description, *, full: bool = False) -> dict[str, str]:
    """Return the whole tree as path -> content; `full` spares nothing on a large machine."""
    w = _Writer(description, full=full)
    _cpus(w)
    if "no-topology" not in w.quirks:
        _topology(w)
    if "no-caches" not in w.quirks:
        _caches(w)
    if "no-nodes" not in w.quirks:
        _nodes(w)
    if "no-cpuinfo" not in w.quirks:
        _cpuinfo(w)
    _allowed(w)
    for pattern, content in w.facts.get("files", {}).items():
        if content is not None:
            w.files[pattern] = str(content)
            continue
        for rel in [r for r in w.files if fnmatch.fnmatch(r, pattern)]:
            del w.files[rel]
    return w.files


def _cpus(w: _Writer) -> None:
    if "no-present" not in w.quirks:
        w.put(f"{CPU}/present", cpu_list(w.all))
        w.put(f"{CPU}/possible", w.facts.get("possible", cpu_list(w.all)))
    if "empty-online" in w.quirks:
        w.files[f"{CPU}/online"] = ""
    elif "no-online" not in w.quirks:
        w.put(f"{CPU}/online", cpu_list(w.online))
        w.put(f"{CPU}/offline", cpu_list(w.offline))
    w.put(f"{CPU}/isolated", w.facts.get("isolated", ""))
    w.put(f"{CPU}/nohz_full", w.facts.get("nohz_full", "(null)"))
    for cpu in sorted(w.all):
        if cpu or cpu in w.offline:  # CPU 0 has the file where it can be taken offline
            w.put(f"{CPU}/cpu{cpu}/online", int(cpu in w.online))
    for key, folder in (("fast", "cpu_core"), ("slow", "cpu_atom")):
        if key in w.facts:
            w.put(f"sys/devices/{folder}/cpus", w.facts[key])
    for cpus, capacity in w.facts.get("capacity", {}).items():
        for cpu in ids(cpus) & w.online:
            w.put(f"{CPU}/cpu{cpu}/cpu_capacity", capacity)


def _topology(w: _Writer) -> None:
    cores, packages = w.group("core"), w.group("package")
    package_ids = w.facts.get("package_ids", list(range(len(packages) + 1)))
    new = "new-names" in w.quirks
    core = ("core_cpus_list", "core_cpus") if new else ("thread_siblings_list", "thread_siblings")
    package = (
        ("package_cpus_list", "package_cpus") if new else ("core_siblings_list", "core_siblings")
    )
    for row in w.rows:
        if row.cpu not in w.online:
            continue
        folder = f"{CPU}/cpu{row.cpu}/topology"
        w.put(f"{folder}/physical_package_id", package_ids[row.package])
        if w.facts.get("core_ids") != "none":
            w.put(f"{folder}/core_id", row.core_id)
        w.put_set(folder, *core, cores[row.core])
        w.put_set(folder, *package, packages[row.package])


def _caches(w: _Writer) -> None:
    cores, l3s = w.group("core"), w.group("l3")
    without = ids(w.facts.get("no_l3"))
    levels = [(0, 1, "Data", "32K"), (1, 1, "Instruction", "32K"), (2, 2, "Unified", "1024K")]
    if "l3_size" in w.facts:
        levels = [] if w.large else levels
        levels.append((3, 3, "Unified", f"{kib(w.facts['l3_size'])}K"))
    for row in w.rows:
        for index, level, kind, size in levels:
            if row.cpu not in w.online or (level == 3 and row.cpu in without):
                continue
            folder = f"{CPU}/cpu{row.cpu}/cache/index{index}"
            shared = l3s[row.l3] - without if level == 3 else cores[row.core]
            w.put_set(folder, "shared_cpu_list", "shared_cpu_map", shared)
            if "no-levels" not in w.quirks:
                w.put(f"{folder}/level", level)
                w.put(f"{folder}/type", kind)
                w.put(f"{folder}/size", size)


def _nodes(w: _Writer) -> None:
    cpus = {n: set[int]() for n in {r.node for r in w.rows}}
    packages: dict[int, int] = {}
    for row in w.rows:
        packages[row.node] = row.package
        if row.cpu in w.online or "stale-node-lists" in w.quirks:
            cpus[row.node].add(row.cpu)
    usual = w.facts.get("memory", "64GiB")
    memory = dict.fromkeys(cpus, usual)
    for node, facts in w.facts.get("nodes", {}).items():
        if facts is None:
            del cpus[node], memory[node]
            continue
        cpus[node] = ids(facts["cpus"]) if "cpus" in facts else cpus[node]
        memory[node] = facts.get("memory", memory.get(node, usual))
    order = sorted(cpus)
    w.put(f"{NODE}/online", cpu_list(order))
    w.put(f"{NODE}/possible", w.facts.get("possible_nodes", cpu_list(order)))
    for node in order:
        folder = f"{NODE}/node{node}"
        w.put_set(folder, "cpulist", "cpumap", cpus[node])
        if "no-meminfo" not in w.quirks and memory[node] is not None:
            total = kib(memory[node])
            lines = {"MemTotal": total, "MemFree": total // 2, "MemUsed": total - total // 2}
            text = [f"Node {node} {key + ':':<16}{value:>10} kB" for key, value in lines.items()]
            w.put(f"{folder}/meminfo", "\n".join(text))
        if "no-distance" not in w.quirks:
            row = w.facts.get("distances", {}).get(node) or " ".join(
                str(
                    10
                    if to == node
                    else w.facts.get("near", 12)
                    if packages.get(to) == packages.get(node)
                    else w.facts.get("far", 32)
                )
                for to in order
            )
            w.put(f"{folder}/distance", row)


def _cpuinfo(w: _Writer) -> None:
    machine = w.facts.get("machine", {})
    cores, packages = w.group("core"), w.group("package")
    blocks = []
    for row in w.rows:
        if row.cpu not in w.online:
            continue
        per_package = {r.core for r in w.rows if r.package == row.package}
        values = {
            "processor": row.cpu,
            "vendor_id": machine.get("vendor", "GenuineIntel"),
            "model name": machine.get("model", "a made-up processor"),
            "physical id": row.package,
            "siblings": len(packages[row.package]),
            "core id": row.core_id,
            "cpu cores": len([c for c in per_package if c in cores]),
            "flags": " ".join(["fpu", "lm", *machine.get("flags", [])]),
            "address sizes": "52 bits physical, 57 bits virtual",
        }
        blocks.append("".join(f"{key}\t: {value}\n" for key, value in values.items()))
    w.files["proc/cpuinfo"] = "\n".join(blocks)


def _allowed(w: _Writer) -> None:
    status = w.facts.get("status")
    if status:
        lines = ["Name:\tpython3"]
        lines += [f"Cpus_allowed_list:\t{status['cpus']}"] if "cpus" in status else []
        lines += [f"Mems_allowed_list:\t{status['mems']}"] if "mems" in status else []
        w.files["proc/self/status"] = "\n".join(lines) + "\n"
    group = w.facts.get("cgroup")
    if not group:
        return
    version, path = str(group["version"]), group.get("path", "/")
    mount = group.get("mount", "/sys/fs/cgroup" + ("" if version == "2" else "/cpuset"))
    own, kind, options, prefix, suffix = {
        "2": (f"0::{path}", "cgroup2", "rw,nsdelegate", "cpuset.", ".effective"),
        "1": (f"7:memory:/\n4:cpuset:{path}", "cgroup", "rw,cpuset", "cpuset.", ""),
        "cpuset": (None, "cpuset", "rw", "", ""),
    }[version]
    if own is not None:
        w.put("proc/self/cgroup", own)
    else:
        w.put("proc/self/cpuset", path)
    if "mount_root" in group:
        line = f"30 23 0:26 {group['mount_root']} {mount} rw - {kind} cgroup {options}"
        w.put("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/vda rw\n{line}")
    else:
        w.put("proc/mounts", f"sysfs /sys sysfs rw 0 0\ncgroup {mount} {kind} {options} 0 0")
    folder = f"{mount}/{group.get('shown_at', path)}".replace("//", "/").strip("/")
    for key in ("cpus", "mems"):
        if key in group:
            w.put(f"{folder}/{prefix}{key}{suffix}", group[key])
