"""What the kernel knows about a connection and does for it: keep-alive, resets, queues.

Linux' own: see tcp(7), socket(7) for SO_LINGER, tty_ioctl(2) for TIOCOUTQ.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios

_RESET = struct.pack("ii", 1, 0)


def watch_peer(sock: socket.socket) -> None:
    """Let the kernel find out within two minutes that a peer's machine is gone: no FIN tells.

    Connections inherit it from the socket that they were accepted on.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def reset_on_close(sock: socket.socket) -> None:
    """Let the end of the connection be a reset, which nobody takes for the end of an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def unacknowledged_bytes(fd: int) -> int:
    """Return how much the kernel still holds for the peer; 0 when it does not say."""
    try:
        packed = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(packed, sys.byteorder)
