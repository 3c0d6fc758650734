"""A small engine that fails in every way on request: a program, stdlib only.

Like the real one it binds its port early, listens only when ready, keeps child processes, and
counts in `vllm:` metrics. Run with --help for its faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--ready-after", type=float, default=0.0)
parser.add_argument("--exit-after", type=float, help="seconds after the start, ready or not")
parser.add_argument("--exit-after-answers", type=int, help="of /health")
parser.add_argument("--exit-code", type=int, default=0)
parser.add_argument(
    "--once", help="a file: the fault of --exit-after only where it is not yet there"
)
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--drain", type=float, default=0.0, help="seconds from SIGTERM to the end")
parser.add_argument("--never-listen", action="store_true")
parser.add_argument("--unavailable", action="store_true", help="answer 503 for ever")
parser.add_argument("--segfault-after", type=float)
parser.add_argument("--children", type=int, default=0, help="processes that outlive the main one")
parser.add_argument("--daemon", action="store_true", help="a detached grandchild with our stdout")
parser.add_argument("--flood", type=int, default=0, help="MiB of log at start")
parser.add_argument("--say", action="append", default=[], help="a log line at start")
parser.add_argument("--artifact", help="write this file and log it, as a compile cache does")
parser.add_argument("--show-env", action="append", default=[])
parser.add_argument("--echo-secret", help="log the value of this variable")
parser.add_argument("--metrics-file", help="what /metrics answers")
parser.add_argument("--daemon-listens", action="store_true", help="a detached grandchild serves")
parser.add_argument("--shared-memory", action="store_true", help="a segment, whose name is logged")
parser.add_argument("--odd-names", help="a folder: a thread and a mapped file named in no encoding")
args = parser.parse_args()

lock = threading.Lock()
served = 0
tokens = 0
running = 0
hanging = False
ending = False


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def child(*, detached: bool) -> None:
    """Fork a process that ignores SIGTERM and lives until it is killed."""
    pid = os.fork()
    if pid:
        if detached:
            os.waitpid(pid, 0)
        return
    if detached:
        os.setsid()
        if os.fork():
            os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def metrics() -> str:
    if args.metrics_file is not None:
        return Path(args.metrics_file).read_text()
    return (
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} 0\n'
        f'vllm:iteration_tokens_total_count{{engine="0"}} {tokens}\n'
        f'vllm:request_success_total{{finished_reason="stop"}} {served}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
    )


def stream(connection: socket.socket, count: int) -> None:
    global running, tokens, served
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    connection.sendall(head.encode())
    with lock:
        running += 1
    try:
        for i in range(count):
            while hanging:
                time.sleep(0.02)
            time.sleep(0.02)
            event = {"choices": [{"index": 0, "delta": {"content": f"t{i} "}}]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
            tokens += 1
        data = b"data: [DONE]\n\n"
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        served += 1
    finally:
        with lock:
            running -= 1


def answer(connection: socket.socket) -> None:
    global hanging
    with connection, contextlib.suppress(OSError, ValueError):
        stream_of = connection.makefile("rb")
        while request := stream_of.readline():
            method, path, _ = request.decode().split()
            length = 0
            while (line := stream_of.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = stream_of.read(length)
            status, text = "200 OK", "{}"
            if args.unavailable:
                status, text = "503 Service Unavailable", "not yet"
            elif path == "/metrics":
                text = metrics()
            elif path == "/v1/models":
                text = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})
            elif path == "/pid":
                text = str(os.getpid())
            elif path == "/hang":
                hanging = True
            elif path == "/crash":
                os.kill(os.getpid(), signal.SIGKILL)
            elif method == "POST" and path.startswith("/v1/"):
                asked = json.loads(body or b"{}")
                if asked.get("stream"):
                    stream(connection, int(asked.get("max_tokens", 16)))
                    continue
                text = json.dumps({"choices": [{"message": {"content": "hello"}}]})
            elif path != "/health":
                status, text = "404 Not Found", "{}"
            data = text.encode()
            head = f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            if path == "/health" and args.exit_after_answers is not None:
                args.exit_after_answers -= 1
                if args.exit_after_answers <= 0:
                    os._exit(args.exit_code)


def at(seconds: float, act: object) -> None:
    timer = threading.Timer(seconds, act)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()


def odd_names(folder: bytes) -> None:
    """Start a thread and map a file for execution whose names are no UTF-8."""
    import ctypes
    import mmap

    def idle() -> None:
        ctypes.CDLL(None).prctl(15, b"\xff\xfeidle")  # PR_SET_NAME
        time.sleep(3600)

    threading.Thread(target=idle, daemon=True).start()
    file = os.open(folder + b"/lib\xff.so", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, mmap.PAGESIZE)
    globals()["kept"] = mmap.mmap(file, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | 4)


def terminate(*_: object) -> None:
    global ending
    say("got SIGTERM")
    if ending or args.ignore_term:
        return
    ending = True
    until = time.monotonic() + args.drain

    def leave() -> None:
        while running and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()


signal.signal(signal.SIGTERM, terminate)
for name in args.show_env:
    say(f"env {name}={os.environ.get(name)}")
if args.echo_secret:
    say(f"the key is {os.environ[args.echo_secret]}, keep it")
for line in args.say:
    say(line)
for _ in range(args.children):
    child(detached=False)
if args.daemon:
    child(detached=True)
for number in range(args.flood * 16):
    sys.stdout.write(f"flood {number} " + "x" * 50 + "\n" + ("y" * 99 + "\n") * 654)
sys.stdout.flush()
if args.exit_after is not None:
    first = True
    if args.once:
        first = not Path(args.once).exists()
        Path(args.once).touch()
    if first:
        at(args.exit_after, lambda: os._exit(args.exit_code))
if args.segfault_after is not None:
    at(args.segfault_after, lambda: os.kill(os.getpid(), signal.SIGSEGV))

server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((args.host, args.port))
time.sleep(args.ready_after)
if args.never_listen:
    while True:
        time.sleep(3600)
if args.artifact:
    Path(args.artifact).write_text("compiled")
    say(f"saved AOT compiled function to {args.artifact}")
if args.daemon_listens:
    if os.fork():
        while True:
            time.sleep(3600)
    os.setsid()
    if os.fork():
        os._exit(0)
if args.shared_memory:
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(create=True, size=1 << 20)
    say(f"segment {segment.name}")
if args.odd_names:
    odd_names(os.fsencode(args.odd_names))
server.listen(64)
say("Application startup complete.")
while True:
    connection, _ = server.accept()
    threading.Thread(target=answer, args=(connection,), daemon=True).start()
