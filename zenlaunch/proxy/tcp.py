"""What is asked of the kernel for a TCP connection, on either side of the proxy."""

from __future__ import annotations

import socket

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def watch_peer(sock: socket.socket) -> None:
    """Let the kernel find out within two minutes that a peer's machine is gone: no FIN tells."""
    if sock.family != socket.AF_UNIX:
        for option in _OPTIONS:
            sock.setsockopt(*option)
