"""The lab's engine: threads that pin themselves as told, memory that is touched, a health answer.

Runs in the guest with nothing but Python. `--escape` pins to every CPU of the machine whatever the
mask says; `--node` binds its memory to another node than it was started with.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--cpus", required=True)
parser.add_argument("--mib", type=int, default=24)
parser.add_argument("--escape", action="store_true")
parser.add_argument("--node", type=int)
args = parser.parse_args()

if args.node is not None:
    mask = ctypes.c_ulong(1 << args.node)
    assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), 65) == 0
cpus = [int(c) for c in args.cpus.split(",")]
ready = threading.Barrier(len(cpus) + 1)


def work(cpu: int) -> None:
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if args.escape else {cpu})
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    ready.wait()
    while True:
        time.sleep(3600)


for cpu in cpus:
    threading.Thread(target=work, args=(cpu,), daemon=True).start()
memory = bytearray(args.mib << 20)
for i in range(0, len(memory), 4096):
    memory[i] = 1
ready.wait()
print(f"core ids={cpus}", flush=True)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", args.port))
server.listen()
while True:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(10)
        try:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        except OSError:
            pass
