"""The lab's engine: a main process that answers HTTP, a worker with memory and pinned threads.

Stdlib only. With --like-vllm the worker does each thing that vLLM needs the kernel's leave for, and
ends with the name of what was refused.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SET_MEMPOLICY, MIGRATE_PAGES, MPOL_BIND = 238, 256, 2

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--cpus", default="", help="one thread on each of these: 0,2")
parser.add_argument("--mib", type=int, default=32, help="memory that the worker touches")
parser.add_argument("--like-vllm", metavar="CACHE", help="a folder for compiled code")
parser.add_argument("--die-after", type=float, help="seconds after which the main process exits 1")
parser.add_argument("--die-if", help="a file: --die-after counts only where it exists")
parser.add_argument("--hold", help="a file: not ready while it is there")
parser.add_argument("--token-s", type=float, default=0.05)
args = parser.parse_args()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def need(ok: bool, what: str) -> None:
    if not ok:
        code = ctypes.get_errno()
        print(f"refused: {what}: {os.strerror(code)}", flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(3)


def own_node() -> int:
    """Return the node of the first CPU that this process may use, as vLLM takes it."""
    cpu = min(os.sched_getaffinity(0))
    folder = next(Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node*"))
    return int(folder.name.removeprefix("node"))


def like_vllm(cache: Path) -> None:
    """Bind memory, move pages, run code that was written just now, load a compiled library."""
    need("flags" in Path("/proc/cpuinfo").read_text(), "read /proc/cpuinfo")
    mask = (ctypes.c_ulong * 1)(1 << own_node())
    size = ctypes.c_ulong(65)
    done = libc.syscall(ctypes.c_long(SET_MEMPOLICY), ctypes.c_int(MPOL_BIND), mask, size)
    need(done == 0, "set_mempolicy")
    moved = libc.syscall(ctypes.c_long(MIGRATE_PAGES), ctypes.c_int(0), size, mask, mask)
    need(moved >= 0, "migrate_pages")
    # mov eax, 42; ret - in a page that is first writable, then executable.
    code = b"\xb8\x2a\x00\x00\x00\xc3"
    page = libc.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))
    need(page not in (None, 2**64 - 1), "mmap")
    ctypes.memmove(page, code, len(code))
    need(libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 5) == 0, "W->X mprotect")
    need(ctypes.CFUNCTYPE(ctypes.c_int)(page)() == 42, "run generated code")
    cache.mkdir(parents=True, exist_ok=True)
    program = cache / f"compiled-{os.getpid()}"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o700)
    need(os.spawnv(os.P_WAIT, str(program), [str(program)]) == 0, "execute from the cache")
    fd = os.open(program, os.O_RDONLY)
    mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    os.close(fd)
    program.unlink()
    shared = Path("/dev/shm") / f"lab-{os.getpid()}"
    shared.write_bytes(b"x" * 4096)
    shared.unlink()
    print("like vLLM: all allowed", flush=True)


def pinned(cpu: int, until: float) -> None:
    os.sched_setaffinity(0, {cpu})  # of this thread
    while time.monotonic() < until:
        pass
    threading.Event().wait()


def worker() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.like_vllm:
        like_vllm(Path(args.like_vllm))
    until = time.monotonic() + 0.3
    for cpu in (int(c) for c in args.cpus.split(",") if c):
        threading.Thread(target=pinned, args=(cpu, until), daemon=True).start()
    memory = bytearray(args.mib << 20)
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    os.write(ready_w, b"1")
    threading.Event().wait()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        elif self.path == "/metrics":
            self.answer(b'vllm:num_requests_running{engine="0"} 0\n', "text/plain")
        else:
            self.answer(b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not asked.get("stream"):
            self.answer(json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(int(asked.get("max_tokens", 16))):
            time.sleep(args.token_s)
            event = {"choices": [{"index": 0, "delta": {"content": f"t{i} "}}]}
            self.chunk(f"data: {json.dumps(event)}\n\n".encode())
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


ready_r, ready_w = os.pipe()
child = os.fork()
if child == 0:
    worker()
os.read(ready_r, 1)
while args.hold and Path(args.hold).exists():
    time.sleep(0.1)
server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
server.daemon_threads = True


def leave(*_: object) -> None:
    os.kill(child, signal.SIGKILL)
    os._exit(0)


signal.signal(signal.SIGTERM, leave)
if args.die_after is not None and (args.die_if is None or Path(args.die_if).exists()):
    timer = threading.Timer(args.die_after, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
print("Application startup complete.", flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    leave()
sys.exit(0)
