"""Boot the lab's guest: a machine of a given shape does one piece of work and powers off.

Owns the qemu command line and the way in and out: a tar with the project and the work as the second
disk, a tar of results on the third. Needs no network and no mount. The first disk is never written
to (snapshot=on), but keeps what a guest wrote over its own reboots.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.image import REPOSITORY, Image

OUT_BYTES = 64 << 20
CRASHED = 139  # qemu itself, now and then, under load


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The guest's shape. Each node is (CPUs, MiB); "" is a node without CPUs."""

    smp: str = "8,sockets=2,cores=4,threads=1"
    nodes: tuple[tuple[str, int], ...] = (("0-1", 512), ("2-3", 512), ("4-5", 512), ("6-7", 512))
    near: int = 12
    far: int = 32
    nodes_per_socket: int = 2

    def arguments(self) -> list[str]:
        words = ["-smp", self.smp, "-m", f"{sum(size for _, size in self.nodes)}M"]
        for node, (cpus, size) in enumerate(self.nodes):
            numa = f"node,nodeid={node}" + (f",cpus={cpus}" if cpus else "")
            if size:
                words += ["-object", f"memory-backend-ram,id=m{node},size={size}M"]
                numa += f",memdev=m{node}"
            words += ["-numa", numa]
        for a in range(len(self.nodes)):
            for b in range(len(self.nodes)):
                same = a // self.nodes_per_socket == b // self.nodes_per_socket
                distance = 10 if a == b else self.near if same else self.far
                words += ["-numa", f"dist,src={a},dst={b},val={distance}"]
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the guest left: its files, their status, and how long it took (seconds, wall)."""

    rc: int
    log: str
    files: dict[str, bytes] = field(repr=False)
    seconds: float

    def json(self, name: str) -> Any:
        assert name in self.files, f"the guest wrote no {name}; its log:\n{self.log}"
        return json.loads(self.files[name])


def boot(
    image: Image,
    folder: Path,
    work: str,
    *,
    machine: Machine | None = None,
    systemd: bool = False,
    timeout_s: float = 240.0,
) -> Result:
    """Run `inside/WORK` in a guest and return what it wrote to /lab/out.

    `folder` takes the disks and logs of this boot. With `systemd` the work runs as a unit after
    multi-user.target, otherwise as the only process. Fails when the guest does not come to its end.
    """
    (folder / "in.tar").write_bytes(_parcel(work))
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,vendor=GenuineIntel",
        *(machine or Machine()).arguments(),
        "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", "root=/dev/vda rw console=ttyS0 quiet mitigations=off tsc=unstable panic=-1 "
        "random.trust_cpu=on " + ("" if systemd else "init=/opt/lab/agent"),
        "-nodefaults", "-display", "none",
        "-serial", f"file:{folder / 'console'}",
        "-drive", f"file={image.disk},if=virtio,format=raw,snapshot=on",
        "-drive", f"file={folder / 'in.tar'},if=virtio,format=raw,readonly=on",
        "-drive", f"file={folder / 'out.img'},if=virtio,format=raw,cache=unsafe",
    ]  # fmt: skip
    began = time.monotonic()
    for attempt in (1, 2):
        with (folder / "out.img").open("wb") as out:
            out.truncate(OUT_BYTES)
        with (folder / "qemu.log").open("wb") as log:
            try:
                rc = subprocess.run(
                    command, stdout=log, stderr=log, timeout=timeout_s, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                tail = (folder / "console").read_text(errors="replace")[-4000:]
                raise AssertionError(f"no end after {timeout_s} s; console:\n{tail}") from None
        if rc not in (-11, CRASHED) or attempt == 2:
            break
    assert rc == 0, (folder / "qemu.log").read_text()
    files = _unpack(folder / "out.img")
    text = files.get("log", b"").decode(errors="replace")
    assert "rc" in files, (folder / "console").read_text(errors="replace")[-4000:]
    return Result(rc=int(files["rc"]), log=text, files=files, seconds=time.monotonic() - began)


def _parcel(work: str) -> bytes:
    """Return a tar of the package, the lab's inside and `run`, which starts the work."""
    run = f"#!/bin/sh\nexec python3 -u /lab/src/inside/{work}\n".encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, path in [
            ("src/zenlaunch", REPOSITORY / "zenlaunch"),
            ("src/inside", Path(__file__).parent / "inside"),
        ]:
            tar.add(path, name)
        info = tarfile.TarInfo("run")
        info.size, info.mode = len(run), 0o755
        tar.addfile(info, io.BytesIO(run))
    return out.getvalue()


def _unpack(path: Path) -> dict[str, bytes]:
    try:
        with tarfile.open(path) as tar:
            return {
                m.name.removeprefix("./"): f.read()
                for m in tar
                if m.isfile() and (f := tar.extractfile(m)) is not None
            }
    except tarfile.ReadError:
        return {}
