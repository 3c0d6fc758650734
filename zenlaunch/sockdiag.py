"""Sockets that are bound and do not listen, as the kernel's socket diagnosis has them.

/proc/net/tcp leaves them out, and so does this before Linux 6.8, which finds none then. One
question, the answer in full: sock_diag(7), include/uapi/linux/inet_diag.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_SOCK_DIAG = 4  # netlink family
_BY_FAMILY = 20  # message type
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_BOUND_INACTIVE = 13  # TCP_BOUND_INACTIVE, a state of this interface alone
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
# family, protocol, what to add; states; source and destination port; addresses, interface, cookie
_QUESTION = struct.Struct("=BBBxI2s2x44x")
_INODE_AT = 4 + 48 + 16  # after the state, the socket's identity, timers and the user
_PATIENCE_S = 5.0


def bound_inactive(port: int) -> list[int]:
    """Return the inodes of TCP sockets that are bound to a port and neither listen nor connect."""
    try:
        return [inode for f in (socket.AF_INET, socket.AF_INET6) for inode in _ask(f, port)]
    except OSError:
        return []  # not allowed (a container), or not known


def _ask(family: int, port: int) -> Iterator[int]:
    question = _QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, 1 << _BOUND_INACTIVE, port.to_bytes(2, "big")
    )
    header = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST | _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as s:
        s.settimeout(_PATIENCE_S)
        s.send(header + question)
        while True:
            answer = s.recv(1 << 16)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind in (_ERROR, _DONE):
                    return
                row = answer[_HEADER.size : length]
                if row[4:6] == port.to_bytes(2, "big"):
                    yield struct.unpack_from("=I", row, _INODE_AT)[0]
                answer = answer[(length + 3) & ~3 :]
