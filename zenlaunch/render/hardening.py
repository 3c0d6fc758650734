"""Hardening of the units, as data: each directive, and for each that is left out the reason.

Owns what a process may still do. An instance keeps what an engine does: binding memory, pinning
threads, moving pages, running code that it has just compiled. Follows systemd.exec(5).
"""

from __future__ import annotations

_COMMON = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
SecureBits=noroot-locked
ProtectSystem=strict
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
ProtectProc=invisible
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
KeyringMode=private
LockPersonality=yes
RemoveIPC=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallErrorNumber=EPERM
UMask=0077
"""

_ENGINE = """\
# @resources stays allowed: an engine calls set_mempolicy, sched_setaffinity, migrate_pages.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
# AF_NETLINK: engines and torch ask for the list of network interfaces.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Left out, with the reason:
#   MemoryDenyWriteExecute=  compiled kernels are written, then executed (oneDNN, inductor, numba)
#   ProcSubset=pid           hides /proc/cpuinfo, which the engine and its libraries read
#   NoExecPaths=             the compile cache holds shared libraries that are loaded
#   PrivateNetwork=, IPC=    the proxy reaches the instance on the loopback; workers share /dev/shm
#   IPAddressDeny=           workers listen on whatever address the host's name stands for
#   SystemCallFilter=~@resources   see above
#   ProtectHome=tmpfs, DynamicUser=   caches must outlive a restart and belong to one user
"""

_PROXY = """\
MemoryDenyWriteExecute=yes
ProcSubset=pid
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
# Left out, with the reason:
#   PrivateNetwork=          clients and instances are reached over the network
#   DynamicUser=             the admin socket must belong to the instances' user
"""

_LOCAL = """\
IPAddressDeny=any
IPAddressAllow=localhost
"""


def instance_hardening(*, home: bool) -> str:
    """Return the directives of an instance; `home`: it reads something below /home or /root."""
    return _COMMON + _home(home) + _ENGINE


def proxy_hardening(*, local: bool, home: bool) -> str:
    """Return the directives of the proxy; `local`: it listens on the loopback only."""
    network = _LOCAL if local else (
        "#   IPAddressDeny=           clients come from other machines\n"
    )  # fmt: skip
    return _COMMON + _home(home) + _PROXY + network


def _home(needed: bool) -> str:
    if needed:
        return "# read-only, not yes: the model or a program is below a home folder\n" \
            "ProtectHome=read-only\n"  # fmt: skip
    return "ProtectHome=yes\n"
