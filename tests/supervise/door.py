"""A stand-in for the proxy: `door.py PORT SOCKET`; 503 on its port, the admin on its socket.

Each look at the status finds one answer less under way for an upstream that drains, from three on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

port, path = sys.argv[1:]
left: dict[str, int] = {}


def answer(connection: socket.socket, *, admin: bool) -> None:
    with connection, connection.makefile("rb") as lines:
        request = lines.readline().decode()
        while lines.readline().strip():
            pass
        status, body = "503 Service Unavailable", ""
        if admin:
            status = "200 OK"
            _, target, _ = request.split()
            if target == "/zenlaunch/status":
                for name in left:
                    left[name] = max(0, left[name] - 1)
                body = json.dumps(
                    {"upstreams": [{"name": n, "in_flight": c} for n, c in left.items()]}
                )
                print(f"status {body}", flush=True)
            else:
                name, verb = target.split("/")[-2:]
                left[name] = 3
                print(f"{verb} {name}", flush=True)
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        connection.sendall((head + body).encode())


def serve(server: socket.socket, *, admin: bool) -> None:
    server.listen()
    while True:
        connection, _ = server.accept()
        answer(connection, admin=admin)


def leave(*_: object) -> None:
    print("got SIGTERM", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGHUP, lambda *_: print("got SIGHUP", flush=True))
inside = socket.socket(socket.AF_UNIX)
inside.bind(path)
threading.Thread(target=serve, args=(inside,), kwargs={"admin": True}, daemon=True).start()
front = socket.socket()
front.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
front.bind(("127.0.0.1", int(port)))
serve(front, admin=False)
