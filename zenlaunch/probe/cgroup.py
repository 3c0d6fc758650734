"""What this process may use: the cpuset of its cgroup, and the lists of /proc/self/status.

Owns finding the process's cpuset (cgroup v2, cgroup v1, and the cpuset filesystem before both) from
/proc/self/cgroup, /proc/self/cpuset and the mount table, below any root. Does not know which CPUs
exist. Follows Documentation/admin-guide/cgroup-v2.rst ("Cpuset"), cgroup-v1/cpusets.rst and
proc(5), cpuset(7).
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """CPUs and memory nodes that may be used; None where the root does not show it."""

    cpus: CpuSet | None = None
    mems: CpuSet | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    root: str
    point: str
    kind: str
    options: frozenset[str]


# Per kind of hierarchy: (cpus, mems), the effective file first. v1 has "effective" since 3.17, and
# no prefix when mounted with noprefix or as the old cpuset filesystem.
_V2 = (("cpuset.cpus.effective",), ("cpuset.mems.effective",))
_V1 = (
    ("cpuset.effective_cpus", "cpuset.cpus", "effective_cpus", "cpus"),
    ("cpuset.effective_mems", "cpuset.mems", "effective_mems", "mems"),
)


def read_allowed(tree: Tree, *, affinity: CpuSet | None) -> Allowed:
    """Return affinity AND cgroup cpuset; `affinity` is the live process's own mask.

    Without it (a dump) Cpus_allowed_list of proc/self/status stands for it.
    """
    status = tree.text("proc/self/status") or ""
    cpus, mems = affinity, _status_list(tree, status, "Mems_allowed_list")
    if cpus is None:
        cpus = _status_list(tree, status, "Cpus_allowed_list")
    group = _read_cpuset(tree)
    return Allowed(cpus=_both(cpus, group.cpus), mems=_both(mems, group.mems))


def _both(a: CpuSet | None, b: CpuSet | None) -> CpuSet | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _status_list(tree: Tree, status: str, key: str) -> CpuSet | None:
    match = re.search(rf"^{key}:[ \t]*(\S+)[ \t]*$", status, re.MULTILINE)
    if match is None:
        return None
    try:
        return CpuSet.parse(match[1])
    except ValueError as e:
        raise tree.damaged("proc/self/status", match[0], f"is not a list ({e})") from None


def _read_cpuset(tree: Tree) -> Allowed:
    mounts = _mounts(tree)
    v1_path, v2_path = _own_paths(tree)
    v1 = [m for m in mounts if m.kind == "cpuset" or (m.kind == "cgroup" and "cpuset" in m.options)]
    v2 = [m for m in mounts if m.kind == "cgroup2"]
    # The cpuset controller lives in one hierarchy only; a v1 mount of it decides.
    for found, path, files in ((v1, v1_path, _V1), (v2, v2_path, _V2)):
        for mount in reversed(found):  # the last mount on a point hides earlier ones
            if path is None:
                continue
            allowed = Allowed(
                cpus=_nearest(tree, mount, path, files[0]),
                mems=_nearest(tree, mount, path, files[1]),
            )
            if allowed.cpus is not None or allowed.mems is not None:
                return allowed
    return Allowed()


def _own_paths(tree: Tree) -> tuple[str | None, str | None]:
    """Return this process's path in the cpuset hierarchy of v1 and in v2."""
    v1 = v2 = None
    for line in (tree.text("proc/self/cgroup") or "").splitlines():
        number, _, rest = line.strip().partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if "cpuset" in controllers.split(","):
            v1 = path
        elif number == "0" and not controllers:
            v2 = path
    # Kernels before 2.6.24 and slim dumps have this file alone; it names the cpuset's own path.
    cpuset = tree.text("proc/self/cpuset")
    if cpuset and cpuset.startswith("/"):
        v1 = v1 or cpuset
        v2 = v2 or cpuset
    return v1, v2


def _mounts(tree: Tree) -> list[_Mount]:
    found: list[_Mount] = []
    for line in (tree.text("proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if dash and len(left) >= 5 and right:
            options = frozenset(",".join(right[2:]).split(","))
            found.append(
                _Mount(root=_plain(left[3]), point=_plain(left[4]), kind=right[0], options=options)
            )
    if found:
        return found
    text = tree.text("proc/self/mounts") or tree.text("proc/mounts") or ""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4:
            options = frozenset(words[3].split(","))
            found.append(_Mount(root="/", point=_plain(words[1]), kind=words[2], options=options))
    return found


def _plain(path: str) -> str:
    """Undo the octal escapes of the mount table (blank, tab, newline, backslash)."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda m: chr(int(m[1], 8)), path)


def _nearest(tree: Tree, mount: _Mount, path: str, files: tuple[str, ...]) -> CpuSet | None:
    """Return the set of the group at `path`, or of the nearest group above that shows one.

    A group whose parent does not hand the controller down has no files: the parent's set holds.
    """
    # Without a cgroup namespace a container's mount shows only its own subtree, and the path in
    # /proc/self/cgroup begins with that subtree. A path outside the mount ("/..", or of another
    # subtree) cannot be followed: the mount's own top is the nearest group that can be seen.
    if mount.root != "/":
        path = path.removeprefix(mount.root) if f"{path}/".startswith(f"{mount.root}/") else "/"
    inside = posixpath.normpath("/" + path.strip("/"))
    while True:
        folder = posixpath.normpath(f"{mount.point}/{inside}").strip("/")
        for name in files:
            found = tree.cpulist(f"{folder}/{name}")
            if found:
                return found
        if inside == "/":
            return None
        inside = posixpath.dirname(inside)
