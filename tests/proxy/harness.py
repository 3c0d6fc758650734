"""What the proxy's tests stand on: engines and proxies are real processes, clients real sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).parent


def until(what: Callable[[], Any], *, within_s: float = 5.0, why: str = "") -> Any:
    """Ask again and again until the answer is true; fail when it is not in time."""
    deadline = time.monotonic() + within_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, why or f"not within {within_s} s"
        time.sleep(0.005)


class Engine:
    """One faulty engine (`engine.py`)."""

    def __init__(self, *models: str, port: int = 0) -> None:
        self.models = models
        self.process: subprocess.Popen[str]
        self.port = port
        self.start()

    def start(self) -> None:
        self.begin()
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def begin(self) -> None:
        """Start, and do not wait for it to listen."""
        argv = [sys.executable, str(HERE / "engine.py"), str(self.port), *self.models]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, value: Any = None) -> Any:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        client.request(method, path, body=json.dumps(value) if value is not None else None)
        body = client.getresponse().read()
        client.close()
        return json.loads(body)

    def do(self, do: dict[str, Any] | None, *, times: int = -1, **also: Any) -> None:
        self.ask("POST", "/_do", {"do": do, "times": times, **also})

    def seen(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/_seen"))

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Proxy:
    """One proxy (`launcher.py`) before engines; `options` are fields of ProxyOptions."""

    def __init__(
        self, engines: list[Engine], folder: Path, *, ready: bool = True, **options: Any
    ) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {
            "listen_port": 0,
            "probe_interval_s": 0.05,
            "probe_ready_interval_s": 0.2,
            "api_keys_env": None,
            **options,
        }
        self.file = folder / "options.json"
        self.log = (folder / "proxy.log").open("w+")
        self.set_engines(engines)
        self.process = subprocess.Popen(self.argv(), stderr=self.log, env={**os.environ})
        until(lambda: "listening on" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        self.port = int(self.text().split("listening on ")[1].split()[0].rsplit(":", 1)[1])
        if ready and engines:
            self.wait_usable(len(engines))

    def argv(self) -> list[str]:
        return [sys.executable, str(HERE / "launcher.py"), str(self.file)]

    def set_engines(self, engines: list[Engine]) -> None:
        names = [f"i{at}" for at in range(len(engines))]
        pairs = [[name, engine.url] for name, engine in zip(names, engines, strict=True)]
        self.file.write_text(json.dumps({**self.options, "upstreams": pairs}))

    def text(self) -> str:
        return (self.folder / "proxy.log").read_text()

    def wait_usable(self, count: int, *, within_s: float = 10.0) -> None:
        until(
            lambda: json.loads(self.request("GET", "/health").body)["usable"] == count,
            within_s=within_s,
            why=f"not {count} usable",
        )

    def connect(self) -> Client:
        return Client(self.port)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        with self.connect() as client:
            client.send(method, path, body, **headers)
            return client.read()

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.request("GET", "/zenlaunch/status").body))

    def upstream(self, name: str) -> dict[str, Any]:
        return next(u for u in self.status()["upstreams"] if u["name"] == name)

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        text = self.request("GET", "/metrics").body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def idle(self) -> bool:
        """Whether nothing is counted any more: no request, no queue, no buffered body."""
        s = self.status()
        zero = s["in_flight"] == s["queued"] == s["buffered_body_bytes"] == 0
        return zero and all(u["in_flight"] == 0 for u in s["upstreams"])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self.log.close()
        return code


@dataclass
class Response:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = True  # False: the connection ended before the message did
    reset: bool = False
    head: bytes = b""
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)

    def __getitem__(self, name: str) -> str | None:
        values = [v for k, v in self.headers if k == name]
        assert len(values) <= 1, f"{name} twice"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])

    @property
    def events(self) -> list[Any]:
        out: list[Any] = []
        assert self.body.endswith(b"\n\n") or not self.body, self.body[-80:]
        for block in self.body.split(b"\n\n"):
            name, _, rest = block.partition(b"\n")
            if name == b"event: error":
                assert json.loads(rest[6:])["type"] == "error"
                block = rest
            if block.startswith(b"data: "):
                data = block[6:]
                out.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        return out


class Client:
    """A client made of one plain socket, so that every byte is the test's own."""

    opened: ClassVar[list[socket.socket]] = []  # closed after each test

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.opened.append(self.sock)
        self.sock.settimeout(20)
        self.sock.connect(("127.0.0.1", port))
        self.buffer = b""
        self.ended = False
        self.was_reset = False
        self.method = "GET"
        self.arrivals: list[tuple[float, bytes]] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def raw(self, data: bytes | str) -> None:
        self.sock.sendall(data.encode("latin-1") if isinstance(data, str) else data)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.method = method
        fields = {"host": "front", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = b""
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            fields.setdefault("content-length", str(len(data)))
        lines = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + data)

    def post(self, path: str = "/v1/completions", *, stream: bool = False, **body: Any) -> None:
        self.send("POST", path, {"model": "tiny", "prompt": "p", "stream": stream, **body})

    def _more(self) -> bool:
        if self.ended:
            return False
        try:
            data = self.sock.recv(262_144)
        except ConnectionResetError:
            data, self.was_reset = b"", True
        if not data:
            self.ended = True
            return False
        self.arrivals.append((time.monotonic(), data))
        self.buffer += data
        return True

    def read_head(self) -> Response:
        while b"\r\n\r\n" not in self.buffer:
            if not self._more():
                raise EOFError(f"no response: {self.buffer!r}")
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        version, status, reason = line.split(" ", 2)
        assert version == "HTTP/1.1"
        pairs = [item.split(": ", 1) for item in lines]
        headers = [(k.lower(), v) for k, v in pairs]
        return Response(int(status), reason, headers, head=head)

    def read(self, *, interim: bool = False) -> Response:
        response = self.read_head()
        while response.status < 200 and not interim:
            response = self.read_head()
        response.arrivals = self.arrivals
        if response.status < 200 or response.status in (204, 304) or self.method == "HEAD":
            return response
        if response["transfer-encoding"] == "chunked":
            self._read_chunks(response)
        elif (length := response["content-length"]) is not None:
            size = int(length)
            while len(self.buffer) < size and self._more():
                pass
            response.body, self.buffer = self.buffer[:size], self.buffer[size:]
            response.whole = len(response.body) == size
        else:
            while self._more():
                pass
            response.body, self.buffer = self.buffer, b""
            response.whole = not self.was_reset
        response.reset = self.was_reset
        return response

    def _read_chunks(self, response: Response) -> None:
        pieces: list[bytes] = []
        while True:
            while b"\r\n" not in self.buffer:
                if not self._more():
                    response.whole = False
                    response.body = b"".join(pieces)
                    return
            line, _, rest = self.buffer.partition(b"\r\n")
            size = int(line, 16)
            while len(rest) < size + 2:
                self.buffer = rest
                if not self._more():
                    response.whole = False
                    response.body = b"".join(pieces) + self.buffer
                    return
                rest = self.buffer
            assert rest[size : size + 2] == b"\r\n"
            self.buffer = rest[size + 2 :]
            if size == 0:
                response.body = b"".join(pieces)
                return
            pieces.append(rest[:size])

    def wait_bytes(self, mark: bytes) -> None:
        while mark not in self.buffer:
            assert self._more(), f"{mark!r} never came: {self.buffer!r}"

    def closed(self, within_s: float = 5.0) -> bool:
        """Whether the server ends the connection without another byte."""
        self.sock.settimeout(within_s)
        try:
            return not self._more() and not self.buffer
        except TimeoutError:
            return False

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def fin(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)
