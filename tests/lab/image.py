"""Build the guest of the NUMA lab: a small Debian with a kernel, an initrd of our own and a disk.

Owns what is in the image and its cache (`.cache/lab-debian/`, each part named after a hash of what
it is made from). Does not boot anything (that is `vm`). Needs root for debootstrap; where something
is missing, `Unavailable` says what. The mirror is the one that apt of this machine uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
CACHE = REPOSITORY / ".cache" / "lab-debian"
SUITE = "bookworm"  # Debian 12: systemd 252, Python 3.11, Linux 6.1
NEEDED = ("qemu-system-x86", "debootstrap", "e2fsprogs")
PACKAGES = (
    "systemd-sysv", "dbus", "python3", "numactl", "iproute2", "procps", "kmod", "busybox-static",
    "linux-image-cloud-amd64",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MODULES = (
    "virtio", "virtio_ring", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
    "virtio_blk",
)  # fmt: skip
# Nothing in the guest needs these, and under emulation each costs a second.
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
    "e2scrub_reap.service", "fstrim.timer", "systemd-tmpfiles-clean.timer", "getty@tty1.service",
    "serial-getty@ttyS0.service", "kmod-static-nodes.service", "modprobe@configfs.service",
    "modprobe@dm_mod.service", "modprobe@drm.service", "modprobe@efi_pstore.service",
    "modprobe@fuse.service", "modprobe@loop.service", "systemd-binfmt.service",
    "systemd-journal-flush.service", "systemd-modules-load.service",
    "systemd-networkd.service", "systemd-pstore.service", "systemd-random-seed.service",
    "systemd-timesyncd.service", "systemd-udev-settle.service", "systemd-udev-trigger.service",
    "systemd-udevd.service", "systemd-udevd-control.socket", "systemd-udevd-kernel.socket",
    "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service",
    "sys-fs-fuse-connections.mount", "sys-kernel-config.mount", "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount", "systemd-remount-fs.service", "systemd-boot-random-seed.service",
)  # fmt: skip

AGENT = """\
#!/bin/sh
# Unpack the work, do it, write the results to the third disk, power off. As init, or from systemd.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root
if [ $$ = 1 ]; then
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir -p /dev/shm
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs tmpfs /run
    mount -t tmpfs tmpfs /tmp
    ip link set lo up
fi
if [ ! -e /lab/run ]; then
    mkdir -p /lab/out
    tar xf /dev/vdb -C /lab
fi
# A reboot in the midst of the work starts this again: `run` sees by itself how far it has come.
{ /lab/run; echo $? >/lab/out/rc; } 2>&1 | tee -a /lab/out/log >/dev/console
tar cf /dev/vdc -C /lab/out .
sync
echo o >/proc/sysrq-trigger
sleep 600
"""
AGENT_UNIT = """\
[Unit]
Description=The lab's work
After=multi-user.target
[Service]
Type=simple
ExecStart=/opt/lab/agent
TimeoutStopSec=5
[Install]
WantedBy=multi-user.target
"""
INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox insmod /m/$module.ko; done
until [ -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 /dev/vda /root
for word in $(/bin/busybox cat /proc/cmdline); do
    case $word in init=*) init=${{word#init=}} ;; esac
done
/bin/busybox umount /proc
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root ${{init:-/sbin/init}}
"""


class Unavailable(Exception):
    """The lab cannot be built on this machine; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What qemu boots."""

    kernel: Path
    initrd: Path
    disk: Path


def build() -> Image:
    """Return the image, made where the cache has none. Raises Unavailable."""
    if os.uname().machine != "x86_64":
        raise Unavailable("the lab's guest is x86_64, and so must this machine be")
    if os.geteuid() != 0:
        raise Unavailable("debootstrap needs root")
    CACHE.mkdir(parents=True, exist_ok=True)
    install = REPOSITORY / "scripts" / "debian_packages.sh"
    _run("install the lab's tools", [str(install), *NEEDED])
    root = CACHE / f"root-{_hash(SUITE, *PACKAGES)}"
    if not root.is_dir():
        _bootstrap(root)
    needs = sorted(r for r in metadata.requires("zenlaunch") or () if "extra ==" not in r)
    image = CACHE / f"image-{_hash(root.name, Path(__file__).read_text(), *needs)}"
    if not image.is_dir():
        _furnish(root, needs)
        _finish(root, image)
    return Image(kernel=image / "vmlinuz", initrd=image / "initrd", disk=image / "disk.img")


def _bootstrap(root: Path) -> None:
    fresh = root.with_name("root.new")
    _remove(fresh)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    try:
        _run("debootstrap", [*command, SUITE, str(fresh), _mirror()])
    finally:
        # debootstrap leaves these behind when it is interrupted.
        for name in ("proc", "sys"):
            subprocess.run(["umount", "-l", str(fresh / name)], capture_output=True, check=False)
    fresh.rename(root)


def _mirror() -> str:
    """Return the address from which apt of this machine takes Debian's main packages."""
    fields = "$(REPO_URI) $(CODENAME) $(COMPONENT) $(ORIGIN)"
    text = _run("ask apt", ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"])
    for line in text.splitlines():
        if line.split()[1:] == [SUITE, "main", "Debian"]:
            return line.split()[0]
    raise Unavailable(f"apt of this machine knows no mirror of Debian {SUITE}")


def _furnish(root: Path, needs: list[str]) -> None:
    """Put zenlaunch's dependencies, the agent and the settings into the root."""
    lab = root / "opt" / "lab"
    _remove(lab)
    lab.mkdir(parents=True)
    platforms = [f"--platform={p}" for p in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    _run(
        "pip",
        [*pip, "--root-user-action=ignore", "--target", str(lab / "lib"), "--python-version=3.11",
         "--only-binary=:all:", "--no-compile", *platforms, *needs],
    )  # fmt: skip
    _run("compile", ["chroot", str(root), "python3", "-m", "compileall", "-q", "/opt/lab/lib"])
    paths = root / "usr/lib/python3/dist-packages/lab.pth"
    paths.write_text("/opt/lab/lib\n/lab/src\n")
    _write_program(lab / "agent", AGENT)
    _write_program(root / "usr/local/bin/zenlaunch", '#!/bin/sh\nexec python3 -m zenlaunch "$@"\n')
    units = root / "etc/systemd/system"
    (units / "lab-agent.service").write_text(AGENT_UNIT)
    for link in units.iterdir():  # masks of an earlier build from the same root
        if link.is_symlink() and str(link.readlink()) == "/dev/null":
            link.unlink()
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    for link, target in [
        (wants / "lab-agent.service", "../lab-agent.service"),
        *((units / name, "/dev/null") for name in MASKED),
    ]:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    (root / "etc/machine-id").write_text(f"{_hash('lab')[:16] * 2}\n")
    (root / "etc/hostname").write_text("lab\n")
    (root / "etc/fstab").write_text("")


def _finish(root: Path, image: Path) -> None:
    fresh = image.with_name("image.new")
    _remove(fresh)
    fresh.mkdir()
    for old in CACHE.glob("image-*"):
        _remove(old)
    kernel = max((root / "boot").glob("vmlinuz-*"))
    shutil.copy(kernel, fresh / "vmlinuz")
    (fresh / "initrd").write_bytes(_initrd(root, kernel.name.removeprefix("vmlinuz-")))
    _run(
        "mke2fs",
        ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root),
         str(fresh / "disk.img"), "2500M"],
    )  # fmt: skip
    fresh.rename(image)


def _initrd(root: Path, version: str) -> bytes:
    """Return a cpio archive ("newc") that loads the disk's driver and goes on to the disk."""
    modules = {p.stem: p for p in (root / "lib/modules" / version / "kernel").rglob("virtio*.ko")}
    members: list[tuple[str, int, bytes]] = [
        (name, 0o040755, b"") for name in ("bin", "dev", "m", "proc", "root")
    ]
    members.append(("bin/busybox", 0o100755, (root / "bin/busybox").read_bytes()))
    members += [(f"m/{name}.ko", 0o100644, modules[name].read_bytes()) for name in MODULES]
    members.append(("init", 0o100755, INIT.format(modules=" ".join(MODULES)).encode()))
    members.append(("TRAILER!!!", 0, b""))
    out = io.BytesIO()
    for inode, (name, mode, data) in enumerate(members, 1):
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08X" % f for f in fields) + name.encode() + b"\0")
        out.write(b"\0" * (-out.tell() % 4) + data)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


def _run(what: str, command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as e:
        raise Unavailable(f"{what}: {command[0]}: {e.strerror}") from None
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()] or ["no output"]
        raise Unavailable(f"{what} failed ({done.returncode}): {' / '.join(lines[-3:])}")
    return done.stdout


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
