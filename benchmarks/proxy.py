"""What a front door costs, side by side: zenlaunch, nginx, HAProxy and vllm-router in one run.

    python benchmarks/proxy.py [--rounds N] [--only NAME,NAME] [--vllm-router PATH]

Two stand-in engines and the load share CPU 0, the proxy has CPU 1 for itself, so the numbers are
the proxy's own: CPU time of its whole process tree (from schedstat) for each relayed event and for
each small request. `direct` is the load without any proxy, what the latencies are compared with.
zenlaunch runs with API keys, metrics and its access log on, nginx with its access log. Proxies that
are not installed are left out and named. Prints a Markdown table of the medians of the rounds, and
how many times as much CPU zenlaunch takes as each other: the median over the rounds and, since the
speed of a machine changes within a run, the smallest and largest. Each round begins with another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import uvloop

TICK_S = 0.02
KEY = "sk-benchmark"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1796087396,'
    b'"model":"tiny","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null}],"usage":null}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
SMALL = (
    b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"hello","finish_reason":'
    b'"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)


# -- the engines: the first event at once, then one a tick to every stream, as an engine step does


class EngineProtocol(asyncio.Protocol):
    streams: ClassVar[set[EngineProtocol]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""
        self.left = 0

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            self.left = asked["max_tokens"] - 1
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n" + CHUNK
            )
            self.streams.add(self)
            return
        payload = SMALL if head.startswith(b"post") else b'{"object":"list","data":[{"id":"tiny"}]}'
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(payload), payload)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)


async def engine(port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(EngineProtocol, "127.0.0.1", port, backlog=4096)
    due = time.perf_counter()
    while True:
        due += TICK_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for stream in list(EngineProtocol.streams):
            stream.left -= 1
            if stream.left >= 0:
                stream.transport.write(CHUNK)
            else:
                stream.transport.write(LAST)
                EngineProtocol.streams.discard(stream)


# -- the load


class Call(asyncio.Protocol):
    """One connection that sends requests one after another and times what comes."""

    def __init__(self, request: bytes, count: int, done: asyncio.Future[None]) -> None:
        self.request, self.count, self.done = request, count, done
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.buffer = b""
        self.fresh = True
        self.at = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: {")
        self.events += events
        now = time.perf_counter()
        self.buffer = (self.buffer + data)[-512:]
        if events:
            (self.first if self.fresh else self.gaps).append(now - self.at)
            self.fresh = False
            self.at = now
        whole = self.buffer.endswith(b"0\r\n\r\n") or self.buffer.endswith(SMALL)
        if whole:
            if self.fresh:
                self.first.append(now - self.at)
            self.count -= 1
            if self.count:
                self.send()
            else:
                self.transport.close()
                if not self.done.done():
                    self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the proxy closed: {self.buffer[-200:]!r}"))


def post(tokens: int, *, stream: bool) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": stream, "max_tokens": tokens})
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def call(port: int, request: bytes, count: int = 1) -> Call:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    _, one = await loop.create_connection(lambda: Call(request, count, done), "127.0.0.1", port)
    await asyncio.wait_for(done, 120)
    return one


def percentile(values: list[float], part: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))]


async def measure(port: int, pid: int | None) -> dict[str, float]:
    out: dict[str, float] = {}

    def cpu_s() -> float:
        return tree_cpu_s(pid) if pid else 0.0

    await asyncio.gather(*(call(port, post(2, stream=True)) for _ in range(16)))  # warm

    before = cpu_s()
    calls = await asyncio.gather(*(call(port, post(150, stream=True)) for _ in range(128)))
    events = sum(one.events for one in calls)
    assert events == 128 * 150, f"{events} events arrived"
    out["us/event"] = (cpu_s() - before) / events * 1e6
    gaps = [abs(gap - TICK_S) * 1e3 for one in calls for gap in one.gaps]
    out["gap jitter p99 ms"] = percentile(gaps, 0.99)

    before = cpu_s()
    await asyncio.gather(*(call(port, post(1, stream=False), 250) for _ in range(64)))
    out["us/request"] = (cpu_s() - before) / (64 * 250) * 1e6

    async def later(delay_s: float) -> Call:
        await asyncio.sleep(delay_s)
        return await call(port, post(1, stream=True))

    calls = await asyncio.gather(*(later(at * 0.0067) for at in range(600)))
    first = [value * 1e3 for one in calls for value in one.first]
    out["spread p50 ms"], out["spread p99 ms"] = percentile(first, 0.5), percentile(first, 0.99)
    for size in (64, 512):
        calls = await asyncio.gather(*(call(port, post(1, stream=True)) for _ in range(size)))
        first = [value * 1e3 for one in calls for value in one.first]
        out[f"burst {size} p50 ms"] = percentile(first, 0.5)
        out[f"burst {size} p99 ms"] = percentile(first, 0.99)

    if pid:
        idle_bytes = tree_pss_bytes(pid)
        tasks = [asyncio.create_task(call(port, post(100_000, stream=True))) for _ in range(2000)]
        await asyncio.sleep(4)
        out["kB/stream"] = (tree_pss_bytes(pid) - idle_bytes) / 2000 / 1000
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return out


def tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += tree(int(child))
    return found


def tree_cpu_s(pid: int) -> float:
    return sum(
        int(task.read_text().split()[0]) / 1e9
        for process in tree(pid)
        for task in Path(f"/proc/{process}/task").glob("*/schedstat")
    )


def tree_pss_bytes(pid: int) -> int:
    return sum(
        int(line.split()[1]) * 1024
        for process in tree(pid)
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )


# -- the proxies


def zenlaunch(folder: Path, port: int, engines: list[int]) -> list[str]:
    (folder / "keys").write_text(f"bench: {KEY}\n")
    (folder / "front.py").write_text(
        "from pathlib import Path\n"
        "from zenlaunch.proxy.options import ProxyOptions\n"
        "from zenlaunch.proxy.server import run\n"
        f"run(ProxyOptions(listen_port={port}, upstreams={upstreams(engines)!r},\n"
        f"  api_keys_file=Path({str(folder / 'keys')!r}),"
        f" access_log=Path({str(folder / 'access.log')!r})))\n"
    )
    return [sys.executable, str(folder / "front.py")]


def upstreams(engines: list[int]) -> tuple[tuple[str, str], ...]:
    return tuple((f"i{at}", f"http://127.0.0.1:{port}") for at, port in enumerate(engines))


def nginx(folder: Path, port: int, engines: list[int]) -> list[str]:
    servers = "".join(f"server 127.0.0.1:{engine};" for engine in engines)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;"
        "worker_rlimit_nofile 20000; events { worker_connections 16000; }"
        f"http {{ access_log {folder}/access.log; client_body_temp_path {folder};"
        f"proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};"
        f"scgi_temp_path {folder}; keepalive_requests 100000;"
        f"upstream e {{ least_conn; {servers} keepalive 1024; keepalive_requests 100000; }}"
        f"server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://e;"
        'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;'
        "proxy_read_timeout 900s; } } }"
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def haproxy(folder: Path, port: int, engines: list[int]) -> list[str]:
    servers = "".join(f" server s{at} 127.0.0.1:{e}\n" for at, e in enumerate(engines))
    (folder / "haproxy.cfg").write_text(
        "global\n maxconn 8000\n nbthread 1\ndefaults\n mode http\n timeout connect 5s\n"
        " timeout client 900s\n timeout server 900s\n option http-no-delay\n"
        f"frontend f\n bind 127.0.0.1:{port}\n default_backend b\n"
        f"backend b\n balance leastconn\n http-reuse always\n{servers}"
    )
    return ["haproxy", "-f", str(folder / "haproxy.cfg")]


def router(path: str) -> Callable[[Path, int, list[int]], list[str]]:
    def make(folder: Path, port: int, engines: list[int]) -> list[str]:
        urls = [url for _, url in upstreams(engines)]
        return [path, "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port),
                "--policy", "round_robin", "--prometheus-port", str(free_port()),
                "--max-concurrent-requests", "8000"]  # fmt: skip

    return make


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int, *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    request = post(1, stream=False)
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
                sock.sendall(request)
                if b" 200 " in sock.recv(1000):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"nobody answers on port {port}")


def start(argv: list[str], cpu: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(["taskset", "-c", str(cpu), *argv], stdout=out, stderr=out)


def run_one(
    make: Callable[[Path, int, list[int]], list[str]] | None, engines: list[int]
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = None
        port = engines[0]
        if make is not None:
            port = free_port()
            process = start(make(folder, port, engines), 1, folder / "log")
        try:
            wait_for(port)
            pid = process.pid if process is not None else 0
            argv = [sys.executable, __file__, "--load", f"{port},{pid}"]
            done = subprocess.run(["taskset", "-c", "0", *argv], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr + (folder / "log").read_text()[-2000:])
            return dict(json.loads(done.stdout))
        finally:
            if process is not None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router") or "")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        uvloop.run(engine(args.engine))
    if args.load:
        port, pid = (int(part) for part in args.load.split(","))
        print(json.dumps(uvloop.run(measure(port, pid or None))))
        return
    makers: dict[str, Callable[[Path, int, list[int]], list[str]] | None] = {"direct": None}
    makers["zenlaunch"] = zenlaunch
    absent = []
    for name, make in (("nginx", nginx), ("haproxy", haproxy)):
        if shutil.which(name):
            makers[name] = make
        else:
            absent.append(name)
    if args.vllm_router:
        makers["vllm-router"] = router(args.vllm_router)
    else:
        absent.append("vllm-router")
    if args.only:
        makers = {name: make for name, make in makers.items() if name in args.only.split(",")}
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory() as name:
        engines = [
            start([sys.executable, __file__, "--engine", str(p)], 0, Path(name) / "log")
            for p in ports
        ]
        try:
            for port in ports:
                wait_for(port)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
            for at in range(args.rounds):
                turn = at % len(makers)
                for name, make in [*makers.items()][turn:] + [*makers.items()][:turn]:
                    found[name].append(run_one(make, ports))
                    print(f"round {at + 1}: {name} {found[name][-1]}", file=sys.stderr)
        finally:
            for process in engines:
                process.kill()
                process.wait()
    columns = list(next(iter(found.values()))[0] if len(found) == 1 else found[list(found)[1]][0])
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    print(
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}; `python benchmarks/proxy.py --rounds {args.rounds}`"
    )
    if absent:
        print(f"Not installed, left out: {', '.join(absent)}")
    print("\n| proxy | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|")
    for name, rounds in found.items():
        cells = [
            f"{statistics.median([r[c] for r in rounds]):.1f}" if c in rounds[0] else "-"
            for c in columns
        ]
        if name == "direct":
            cells[columns.index("us/event")] = cells[columns.index("us/request")] = "-"
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name in found:
        if name in ("direct", "zenlaunch") or "zenlaunch" not in found:
            continue
        for column in ("us/event", "us/request"):
            pairs = zip(found["zenlaunch"], found[name], strict=True)
            times = [ours[column] / theirs[column] for ours, theirs in pairs]
            print(
                f"{column}: {statistics.median(times):.2f} times {name} "
                f"({min(times):.2f} to {max(times):.2f})"
            )


if __name__ == "__main__":
    main()
