"""In the guest: what systemd says of units, and what a guest without cpusets gets instead."""

from __future__ import annotations

from pathlib import Path

from inside.kernel import sh

UNITS = Path("/etc/systemd/system")


def show(unit: str, *names: str) -> dict[str, str]:
    text = sh(f"systemctl show {unit} -p {','.join(names)}")
    return dict(line.partition("=")[::2] for line in text.splitlines())


def active(units: list[str]) -> dict[str, str]:
    words = sh(f"systemctl is-active {' '.join(units)}", check=False).split()
    return dict(zip(units, words, strict=True))


def main_pid(unit: str) -> int:
    return int(show(unit, "MainPID")["MainPID"])


def has_cpuset() -> bool:
    """Say whether AllowedCPUs= can take effect here."""
    return "cpuset" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()


def bind_by_affinity(pattern: str) -> None:
    """Give units the CPUs of their AllowedCPUs= by CPUAffinity=, which needs no control group.

    So that the guard, which is right to refuse an instance without its CPUs, lets it start.
    """
    for unit in UNITS.glob(pattern):
        for line in unit.read_text().splitlines():
            if line.startswith("AllowedCPUs="):
                folder = unit.with_name(f"{unit.name}.d")
                folder.mkdir()
                cpus = line.partition("=")[2]
                (folder / "affinity.conf").write_text(f"[Service]\nCPUAffinity={cpus}\n")
    sh("systemctl daemon-reload")
