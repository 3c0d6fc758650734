"""Upstreams named in a file: what may stand there, and what SIGHUP makes of it under load."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import free_ports

from zenlaunch.errors import ConfigError, ProxyError
from zenlaunch.proxy.address import address_of, parse_upstream, read_upstreams

from .harness import Client, Engine, Proxy, Response, until

Start = Callable[..., list[Engine]]


# -- the file


def test_a_file_of_upstreams(tmp_path: Path) -> None:
    path = tmp_path / "upstreams"
    path.write_bytes(
        b"\xef\xbb\xbf# engines\r\n\r\n  a=http://127.0.0.1:8001  # the first\r\n"
        b"http://127.0.0.1:8002\nhttp://[::1]:8003/\n\tb.2 http://x\n".replace(b".2 ", b".2=")
    )
    assert read_upstreams(path) == (
        ("a", "http://127.0.0.1:8001"),
        ("127.0.0.1-8002", "http://127.0.0.1:8002"),
        ("1-8003", "http://[::1]:8003/"),
        ("b.2", "http://x"),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it names no upstream"),
        ("# nobody\n\n", "it names no upstream"),
        ("http://a:1\n127.0.0.1:8001\n", "line 2: upstream .*'127.0.0.1:8001' is not the address"),
        ("\n\nhttps://a:1", "line 3: .*Write http://HOST:PORT"),
        ("http://a:1/v1", "line 1: .*without a path"),
        ("http://a:0", "line 1: .*port 0 is outside"),
        ("http://a:99999", "line 1: .*out of range"),
        ("http://user:pw@a:1", "line 1: .*is not the address"),
        ("http://a:1?x", "line 1: .*is not the address"),
        ("http://:1", "line 1: "),
        ("http://a\x00b:1", "line 1: "),
        ("http://1.2.3:1", "line 1: .*no name or address"),
        ("a b=http://a:1", "line 1: .*one upstream a line"),
        ("a=http://a:1 b=http://b:1", "line 1: .*one upstream a line"),
        ("a/b=http://a:1", "line 1: upstream name 'a/b' is not usable"),
        ("=http://a:1", "line 1: upstream name '' is not usable"),
        ("a=", "line 1: upstream a: '' is not the address"),
        ("a=http://a:1\na=http://a:2", "line 2: upstream a is in line 1 already"),
        ("http://a:1\n\nhttp://a:1", "line 3: upstream a-1 is in line 1 already"),
        (f"http://{'a.' * 40}b:1", "line 1: upstream name .* is not usable"),
        ("http://\u00e4:1", "line 1: "),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "upstreams"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_upstreams(path)
    assert re.search(says, caught.value.message), caught.value.message
    assert caught.value.message.startswith(f"{path}: ")


def test_all_problems_at_once_and_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "upstreams"
    path.write_text("x\n" * 30)
    with pytest.raises(ConfigError, match=r"line 1: (.|\n)*line 20: (.|\n)*and 10 more"):
        read_upstreams(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_upstreams(tmp_path)
    path.write_bytes(b"a\xff=http://a:1")
    with pytest.raises(ConfigError, match=r"line 1: .*is not usable"):
        read_upstreams(path)


def test_names() -> None:
    assert parse_upstream("http://h:1", name="u0") == ("u0", "http://h:1")
    assert parse_upstream("a=http://h:1", name="u0") == ("a", "http://h:1")
    assert parse_upstream("http://h:1/?a=b", name="u0") == ("u0", "http://h:1/?a=b")
    assert address_of("a", "http://[::1]").url == "http://[::1]:80"
    with pytest.raises(ProxyError, match="is not usable"):
        address_of("a" * 65, "http://h")


# -- the running proxy


class Door(Proxy):
    """`zenlaunch proxy --upstreams-file`, as a user starts it."""

    def argv(self) -> list[str]:
        port = str(free_ports(1))
        return [
            *(sys.executable, "-m", "zenlaunch", "proxy", "--listen", f"127.0.0.1:{port}"),
            *("--upstreams-file", str(self.file), "--admin-socket", str(self.folder / "admin")),
            *("--api-keys-file", str(self.folder / "keys")),
        ]

    def set_engines(self, engines: list[Engine]) -> None:
        keys = self.folder / "keys"
        if not keys.exists():
            keys.write_text("me: sk-me\n")
        self.write("".join(f"{engine.url}\n" for engine in engines))

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def reload(self) -> None:
        before = self.text().count("reload:")
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.text().count("reload:") > before)

    def post(self, client: Client | None = None, **body: Any) -> Response:
        with client or self.connect() as one:
            send(one, **body)
            return one.read()

    def status(self) -> dict[str, Any]:
        return dict(self.json("/zenlaunch/status"))

    def json(self, path: str) -> Any:
        return json.loads(self.request("GET", path, authorization="Bearer sk-me").body)

    def successors(self) -> list[int]:
        """The processes that have this proxy's file on their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.file).encode() in words and state != "Z":
                found.append(int(path.name))
        return sorted(found)

    def stop(self) -> int:
        code = super().stop()
        for pid in self.successors():
            os.kill(pid, signal.SIGKILL)
        return code


def name_of(engine: Engine) -> str:
    return f"127.0.0.1-{engine.port}"


def send(client: Client, *, stream: bool = False, **body: Any) -> None:
    client.send(
        "POST", "/v1/completions", {"model": "tiny", "prompt": "p", "stream": stream, **body},
        authorization="Bearer sk-me",
    )  # fmt: skip


def admin(path: Path, target: str) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return int(sock.recv(65536).split()[1])


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Callable[[list[Engine]], Door]]:
    started: list[Door] = []

    def start(engines: list[Engine]) -> Door:
        folder = tmp_path / f"door{len(started)}"
        folder.mkdir()
        started.append(Door(engines, folder))
        return started[-1]

    yield start
    for one in started:
        one.stop()
        assert "Traceback" not in one.text(), one.text()


def test_new_ones_are_used_and_removed_ones_finish(engines: Start, door: Any) -> None:
    first, second, third = engines(3)
    one = door([first, second])
    streams = [one.connect() for _ in range(4)]
    for client in streams:
        send(client, stream=True, do={"events": 30, "gap_s": 0.02})
        client.wait_bytes(b" t0")
    one.write(f"# {first.url} is gone\n{second.url}\nnew={third.url}\n")
    one.reload()
    assert [u["name"] for u in one.status()["upstreams"]] == [name_of(second), "new"]
    until(lambda: one.json("/health")["usable"] == 2)
    before = first.seen()["requests"]
    assert before == 2
    assert {one.post()["x-zenlaunch-upstream"] for _ in range(8)} == {"new"}, "the least busy"
    for client in streams:
        response = client.read()
        assert response.whole, "what was under way finishes"
        assert response.events[-1] == "[DONE]"
    assert first.seen()["requests"] == before
    until(lambda: first.seen()["connections"] == 1)  # the question itself: none is kept there
    until(lambda: one.status()["in_flight"] == 0)


def test_unchanged_ones_keep_connections_counts_and_state(engines: Start, door: Any) -> None:
    first, second = engines()
    one = door([first, second])
    for _ in range(4):
        one.post()
    peers = {r["x-zenlaunch-upstream"]: r["x-peer"] for r in (one.post(), one.post())}
    before = {u["name"]: u for u in one.status()["upstreams"]}
    one.write(f"{second.url}\n{first.url}\n")
    one.reload()
    after = {u["name"]: u for u in one.status()["upstreams"]}
    assert before == after
    assert list(after) == [name_of(second), name_of(first)]
    again = {r["x-zenlaunch-upstream"]: r["x-peer"] for r in (one.post(), one.post())}
    assert peers == again, "the same connections"


def test_a_name_that_moves_to_another_engine(engines: Start, door: Any) -> None:
    """Neither its count nor the end of the one before is the new one's."""
    first, second, third = engines(3)
    one = door([first])
    one.write(f"a={first.url}\n")
    one.reload()
    until(lambda: one.json("/health")["usable"] == 1)
    streams = [one.connect() for _ in range(6)]
    for client in streams:
        send(client, stream=True, do={"events": 1, "end": "hang"})
        client.wait_bytes(b" t0")
    one.write(f"a={second.url}\nb={third.url}\n")
    one.reload()
    until(lambda: one.json("/health")["usable"] == 2)
    assert [u["in_flight"] for u in one.status()["upstreams"]] == [0, 0]
    assert one.status()["in_flight"] == 6
    first.stop()
    for client in streams:
        assert not client.read().whole
    until(lambda: one.status()["in_flight"] == 0)
    for upstream in one.status()["upstreams"]:
        assert (upstream["state"], upstream["errors"]) == ("ready", 0)
    assert one.post()["x-zenlaunch-upstream"] == "a"


def test_broken_files_change_nothing(engines: Start, door: Any) -> None:
    first, second = engines()
    one = door([first])
    (one.folder / "keys").write_text("me: sk-me\nyou: sk-you\n")
    for text, says in (
        (f"{second.url}\nnonsense\n", "line 2: upstream nonsense"),
        ("", "it names no upstream"),
        (f"{first.url}\n{first.url}\n", "line 2: "),
    ):
        one.write(text)
        one.reload()
        assert f"reload: {one.file}: " in one.text()
        assert says in one.text()
        assert "nothing was changed" in one.text().splitlines()[-1]
        assert [u["url"] for u in one.status()["upstreams"]] == [first.url]
        you = one.request("GET", "/v1/models", authorization="Bearer sk-you").status
        assert you == 401, "the keys neither: one reload is one change"
    one.file.unlink()
    one.reload()
    assert "No such file" in one.text()
    one.write(f"{second.url}\n")
    (one.folder / "keys").write_text("")
    one.reload()
    assert [u["url"] for u in one.status()["upstreams"]] == [first.url]
    (one.folder / "keys").write_text("me: sk-me\nyou: sk-you\n")
    one.reload()
    assert [u["url"] for u in one.status()["upstreams"]] == [second.url]
    assert one.request("GET", "/v1/models", authorization="Bearer sk-you").status in (200, 503)
    until(lambda: one.post().status == 200)


class Load:
    """Clients that ask all the time; `problems` is everything but whole, good answers."""

    def __init__(self, port: int, clients: int) -> None:
        self.problems: list[str] = []
        self.answers = 0
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.live, args=(port, k)) for k in range(clients)]
        for thread in self.threads:
            thread.start()

    def live(self, port: int, k: int) -> None:
        client: Client | None = None
        while not self.over.is_set():
            try:
                client = client or Client(port)
                send(client, stream=k % 2 == 0, do={"prefill_s": 0.01, "gap_s": 0.002})
                response = client.read()
                if response.status != 200 or not response.whole:
                    self.problems.append(f"{response.status} {response.body!r}")
                self.answers += 1
                if response["connection"] == "close":
                    client = None
            except Exception as error:
                self.problems.append(repr(error))
                client = None

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()
        assert not self.problems, self.problems[:3]


def test_49_nothing_is_lost_while_upstreams_change(engines: Start, door: Any) -> None:
    some = engines(4)
    one = door(some[:2])
    load = Load(one.port, 8)
    for k in range(24):
        # One stays, one comes, one goes; after a file that is only half written all are others.
        chosen = [some[k % 4], some[(k + 1) % 4]]
        one.write("".join(f"{e.url}\n" for e in chosen) + ("oops\n" if k % 6 == 5 else ""))
        one.reload()
        if k % 6 != 5:
            until(lambda: one.json("/health")["usable"] == 2)
        answers = load.answers
        until(lambda before=answers: load.answers > before + 20)
    load.end()
    one.write("".join(f"{e.url}\n" for e in some[2:]))
    one.reload()
    before = [e.seen()["requests"] for e in some[:2]]
    for _ in range(6):
        assert one.post().status == 200
    assert [e.seen()["requests"] for e in some[:2]] == before
    assert min(before) > 0
    until(lambda: one.status()["in_flight"] == 0)


def test_handover_reads_the_file_and_sighup_goes_on_there(engines: Start, door: Any) -> None:
    first, second, third = engines(3)
    one = door([first])
    load = Load(one.port, 6)
    with one.connect() as slow:
        send(slow, stream=True, do={"events": 40, "gap_s": 0.02})
        slow.wait_bytes(b" t0")

        one.write("nonsense\n")
        one.process.send_signal(signal.SIGUSR2)
        until(lambda: "ended before it served" in one.text(), within_s=20)
        assert f"{one.file}: line 1: " in one.text()
        assert one.successors() == [one.process.pid]

        one.write(f"{second.url}\ndown={third.url}\n")
        one.reload()
        assert admin(one.folder / "admin", "/zenlaunch/upstreams/down/drain") == 200
        one.process.send_signal(signal.SIGUSR2)
        until(lambda: len(one.successors()) == 2, within_s=20)
        response = slow.read()
        assert response.whole
        assert response.events[-1] == "[DONE]"
    assert one.process.wait(20) == 0
    (successor,) = one.successors()
    assert [u["url"] for u in one.status()["upstreams"]] == [second.url, third.url]
    assert one.upstream("down")["state"] == "draining", "what an operator drained stays so"
    before = first.seen()["requests"]
    one.write(f"{third.url}\n{second.url}\n")
    os.kill(successor, signal.SIGHUP)
    until(lambda: third.url == one.status()["upstreams"][0]["url"])
    until(lambda: one.json("/health")["usable"] == 2)
    answers = load.answers
    until(lambda: load.answers > answers + 20)
    load.end()
    assert first.seen()["requests"] == before
    assert third.seen()["requests"] > 0
    os.kill(successor, signal.SIGTERM)
    until(lambda: not one.successors())
