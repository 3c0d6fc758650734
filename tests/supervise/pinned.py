"""A small stand-in for an engine's worker: pinned threads and memory, then silence.

`pinned.py MIB CPU...`: one thread for each CPU list ("0" or "0-1"), MIB of touched memory; prints
"core ids=[...]" and "pinned" when it is so. With --port it answers each POST that carries the key
of WORKER_KEY, after all threads but those of --lazy have worked.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("mib", type=int)
parser.add_argument("places", nargs="*")
parser.add_argument("--port", type=int)
parser.add_argument("--lazy", action="append", default=[], help="a place whose thread never works")
args = parser.parse_args()

memory = bytearray(args.mib << 20)
for i in range(0, len(memory), 4096):
    memory[i] = 1
ready = threading.Barrier(len(args.places) + 1)
turn = threading.Barrier(len(args.places) - len(args.lazy) + 1)


def cpus(place: str) -> set[int]:
    first, _, last = place.partition("-")
    return set(range(int(first), int(last or first) + 1))


def work(place: str) -> None:
    os.sched_setaffinity(0, cpus(place))
    ready.wait()
    while args.port and place not in args.lazy:
        turn.wait()
    time.sleep(3600)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        key = os.environ.get("WORKER_KEY")
        allowed = key is None or self.headers["authorization"] == f"Bearer {key}"
        if allowed:
            turn.wait()
            turn.wait()  # nobody comes here again who has not run
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


for place in args.places:
    threading.Thread(target=work, args=(place,), daemon=True).start()
ready.wait()
server = HTTPServer(("127.0.0.1", args.port), Handler) if args.port else None
print(f"core ids=[{', '.join(args.places)}]", flush=True)
print("pinned", flush=True)
if server is not None:
    server.serve_forever()
time.sleep(3600)
