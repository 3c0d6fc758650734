"""The small parts under the supervisor: logs, checks, stamps, crash reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from supervise.world import KERNEL_NAMES_BOUND, engine, free_port
from zenlaunch import checks, compiled, crash
from zenlaunch.blot import argv_without, is_secret, secrets_of
from zenlaunch.cpuset import CpuSet
from zenlaunch.logs import TAIL_CHARS, Lines, LogFile
from zenlaunch.values import for_terminal


def test_lines_are_cut_and_the_rest_is_kept() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == (b"one\n", ("one",))
    assert lines.feed(b"o\r\nthree\n") == (b"two\r\nthree\n", ("two", "three"))
    assert lines.flush() == (b"", ())
    lines.feed(b"\xff end")
    assert lines.flush() == (b"\xff end\n", ("� end",))
    assert list(lines.tail) == ["one", "two", "three", "� end"]


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    lines = Lines()
    raw, text = lines.feed(b"x" * 100_000)
    assert len(raw) == 100_000
    assert text == ("x" * 100_000,)


def test_markers_are_found_in_their_lines() -> None:
    found: list[tuple[str, str]] = []
    Lines(markers=("b", "bc")).feed(b"a\nbc\nb\n", found=lambda m, line: found.append((m, line)))
    assert found == [("b", "bc"), ("bc", "bc"), ("b", "b")]


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("VLLM_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True),
     ("KEYBOARD", False), ("PATH", False), ("SSH_KEY", True), ("DB_PASSWORD", True),
     ("AWS_ACCESS_KEY_ID", True), ("--hf-token", True), ("--tokenizer", False),
     ("--max-num-batched-tokens", False), ("TOKENIZERS_PARALLELISM", False),
     ("--api-keys-file", False), ("--upstream-key-file", False), ("HF_TOKEN_PATH", False)],
)  # fmt: skip
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_settings_of_a_command_line_are_blotted_out_by_their_name() -> None:
    words = ["up", "--env", "HF_TOKEN=abc", "--env=API_KEY=x=y", "A=1", "--api-keys-file", "k"]
    assert argv_without(words) == [
        "up", "--env", "HF_TOKEN=***", "--env=API_KEY=***", "A=1", "--api-keys-file", "k",
    ]  # fmt: skip


def test_secrets_are_blotted_out_the_longest_first() -> None:
    environ = {
        "A_TOKEN": "abcdefgh",
        "B_TOKEN": "abcdefghij",
        "C_TOKEN": "on",
        "PATH": "/usr/bin/x",
    }
    lines = Lines(secrets=secrets_of(environ))
    assert lines.feed(b"abcdefghij abcdefgh on\n")[1] == ("*** *** on",)


def test_secrets_are_those_of_environment_and_command_line() -> None:
    argv = ("x", "--api-key", "first-key", "second-key", "--max-num-batched-tokens", "8192",
            "--hf-token=hf_12345", "--api-key", "--tokenizer", "tokenizer", "-v")  # fmt: skip
    environ = {"TLS_KEY": "-- begin --\nfirst line\n", "ODD_TOKEN": "\udcff1234567"}
    assert set(secrets_of(environ, argv)) == {
        b"first-key", b"second-key", b"hf_12345", b"-- begin --", b"first line", b"\xff1234567",
    }  # fmt: skip
    assert argv_without([*argv, "--url", "http://u:first-key@x"], [b"first-key"]) == [
        "x", "--api-key", "***", "***", "--max-num-batched-tokens", "8192",
        "--hf-token=***", "--api-key", "--tokenizer", "tokenizer", "-v", "--url", "http://u:***@x",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1000, 65_530, 65_536, 100_000])
def test_a_secret_in_a_line_without_an_end_is_never_in_two_pieces(size: int) -> None:
    lines = Lines(secrets=(b"0123456789",))
    raw = b""
    for cut in range(11):
        data = b"x" * size + b"0123456789"
        at = size + cut
        raw += lines.feed(data[:at])[0] + lines.feed(data[at:])[0]
    raw += lines.flush()[0]
    assert raw.count(b"***") == 11
    assert not set(b"0123456789") & set(raw)
    assert raw.count(b"x") == 11 * size


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\tword é", "plain   word é"),
        ("\x1b[31mred\x1b[0m and \x1b[1;4mbold", "\x1b[31mred\x1b[0m and \x1b[1;4mbold\x1b[0m"),
        ("\x1b[2Jwiped\x1b]0;title\x07\x00", "·[2Jwiped·]0;title··"),
        ("cut \x1b[3", "cut ·[3"),
    ],
)
def test_a_line_of_a_log_does_nothing_to_a_terminal(line: str, shown: str) -> None:
    assert for_terminal(line) == shown


def test_the_last_lines_are_kept_short() -> None:
    lines = Lines()
    lines.feed(b"y" * (TAIL_CHARS + 5) + b"\n")
    assert list(lines.tail) == ["y" * TAIL_CHARS + "... (5 characters more)"]


def test_a_log_file_is_rotated_by_size(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "i0.log", most_bytes=10, keep=2)
    for n in range(5):
        assert log.write(b"line %d\n" % n) is None
    log.close()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "i0.log": "line 4\n",
        "i0.log.1": "line 3\n",
        "i0.log.2": "line 2\n",
    }


def test_a_log_file_that_cannot_be_written_counts_what_it_drops(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "no" / "i0.log")
    error = log.write(b"12345")
    assert isinstance(error, FileNotFoundError)
    assert log.dropped_bytes == 5


def test_who_holds_a_port_is_told() -> None:
    port = free_port()
    assert checks.port_taken("127.0.0.1", port) is None
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))
        assert "does not listen yet" in (checks.port_taken("127.0.0.1", port) or "")
        s.listen()
        assert f"pid {os.getpid()} " in (checks.port_taken("127.0.0.1", port) or "")
        assert checks.foreign_listener(port, [1]) == os.getpid()
        assert checks.foreign_listener(port, [os.getpid()]) is None
    assert "cannot bind 192.0.2.1" in (checks.port_taken("192.0.2.1", port) or "")


def test_closing_connections_of_an_earlier_run_do_not_hold_a_port() -> None:
    port = free_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server closes first, so that its port lingers
            assert client.recv(1) == b""
    assert [r.state for r in checks.tcp_rows(port)] == ["06"]
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    assert checks.port_taken("127.0.0.1", port) is None
    with socket.socket() as loads:  # another engine, as vLLM binds
        loads.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loads.bind(("127.0.0.1", port))
        said = checks.port_taken("127.0.0.1", port)
        if KERNEL_NAMES_BOUND:
            assert f"port {port} is bound by pid {os.getpid()} (" in (said or "")
        else:
            assert said is None
    assert checks.port_taken("127.0.0.1", port) is None


def test_free_memory_of_a_node_is_the_engines_own_sum(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node3"
    node.mkdir(parents=True)
    rows = {"MemTotal": 900, "MemFree": 100, "Active(file)": 20, "Inactive(file)": 3,
            "SReclaimable": 4, "Active(anon)": 500}  # fmt: skip
    text = "".join(f"Node 3 {key}: {kib:10d} kB\n" for key, kib in rows.items())
    (node / "meminfo").write_text(text)
    assert checks.node_free_bytes(3, tmp_path) == 127 * 1024
    assert checks.node_free_bytes(4, tmp_path) is None


def test_a_memory_cgroup_allows_what_the_tightest_around_it_does(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = "5:cpu:/x\n0::/a/b\n"
    (tmp_path / "proc/self/cgroup").write_text(lines)
    base = tmp_path / "sys/fs/cgroup"

    def group(folder: Path, limit: str, used: int, stat: str, *, old: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
        for name, text in zip(names, (limit, str(used)), strict=True):
            (folder / f"memory.{name}").write_text(f"{text}\n")
        (folder / "memory.stat").write_text(stat)

    assert checks.group_free_bytes(tmp_path) is None
    stat = "anon 9\nfile 30\nshmem 10\nslab_reclaimable 5\n"
    group(base / "a/b", "max", 50, stat)
    assert checks.group_free_bytes(tmp_path) is None
    group(base / "a", "100", 60, stat)
    assert checks.group_free_bytes(tmp_path) == 100 - 60 + 25
    group(base, "80", 70, stat)  # a container whose path is that of the host
    assert checks.group_free_bytes(tmp_path) == 80 - 70 + 25
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/m\n")
    assert checks.group_free_bytes(tmp_path) is None
    old = "cache 1\ntotal_cache 40\ntotal_shmem 8\n"
    group(base / "memory", str(2**63 - 4096), 70, old, old=True)
    assert checks.group_free_bytes(tmp_path) is None
    group(base / "memory/m", "200", 70, old, old=True)
    assert checks.group_free_bytes(tmp_path) == 200 - 70 + 32


def test_metrics_are_summed_by_exact_name() -> None:
    text = (
        '# HELP a_total x\na_total{e="0",m="x y"} 2.0\na_total{e="1"} 3\na_total_more 9\nb 4.5\n'
        'a_total{e="2"} 1 1700000000\n'
    )
    assert checks.metric(text, "a_total") == 6.0
    assert checks.metric(text, "b") == 4.5
    assert checks.metric(text, "c") is None
    assert checks.metric("a NaN\n", "a") is None
    assert checks.metric("a +Inf\n", "a") is None
    assert checks.metric("a garbage\na\n", "a") is None


def test_in_flight_is_read_from_the_proxys_status() -> None:
    status = {"upstreams": [{"name": "i0", "in_flight": 3}, {"name": "i1"}]}
    assert checks.in_flight(status, "i0") == 3
    assert checks.in_flight(status, "i1") is None
    assert checks.in_flight([], "i0") is None


def test_a_stamp_holds_while_all_its_artifacts_are_there(tmp_path: Path) -> None:
    artifact = tmp_path / "model"
    artifact.touch()
    cache = tmp_path / "compiled"
    assert not compiled.is_warm(cache, "key")
    compiled.remember(cache, "key", (str(artifact), str(artifact)))
    assert compiled.is_warm(cache, "key")
    assert not compiled.is_warm(cache, "other key/x")
    artifact.unlink()
    assert not compiled.is_warm(cache, "key")
    compiled.remember(cache, "none", ())
    assert not compiled.is_warm(cache, "none")
    compiled.stamp_path(cache, "key").write_text("{")
    assert not compiled.is_warm(cache, "key")


@pytest.mark.parametrize(
    ("line", "path"),
    [("saved to /a/b/model", "/a/b/model"), ("saved to '/a/b'.", "/a/b"), ("saved to", None),
     ("saved to nowhere", None), ("x saved to /a, y", "/a")],
)  # fmt: skip
def test_artifacts_are_read_from_the_log(line: str, path: str | None) -> None:
    assert compiled.artifact_in(line, "saved to") == path


def test_a_crash_report_holds_all_but_secrets(tmp_path: Path) -> None:
    spec = engine("i0", "--hf-token", "hf_1", "--api-key=k", mem_nodes=CpuSet.parse("0"))
    environ = {"HF_TOKEN": "hf_1", "A": "1"}
    for number in range(1, 13):
        report = crash.write_report(
            tmp_path, spec, facts={"how": "exit 1"}, environ=environ, log=["a", "b"]
        )
        assert report == tmp_path / f"i0-crash-{number}"
    assert report is not None
    assert len(list(tmp_path.iterdir())) == crash.KEPT
    data = json.loads((report / "report.json").read_text())
    assert data["how"] == "exit 1"
    assert data["environment"] == {"A": "1", "HF_TOKEN": "***"}
    assert data["argv"][-3:] == ["--hf-token", "***", "--api-key=***"]
    assert (report / "log.txt").read_text() == "a\nb\n"
    assert "MemFree" in (report / "meminfo-node0.txt").read_text()
    assert crash.write_report(tmp_path / "no", spec, facts={}, environ={}, log=[]) is None


@pytest.mark.parametrize("version", [1, 2])
def test_out_of_memory_is_said_only_with_evidence(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line, base, name = (
        ("4:memory:/box", "sys/fs/cgroup/memory/box", "memory.oom_control")
        if version == 1
        else ("0::/box", "sys/fs/cgroup/box", "memory.events")
    )
    (tmp_path / "proc/self/cgroup").write_text(f"2:cpu:/x\n{line}\n")
    (tmp_path / "proc/vmstat").write_text("nr_free 1\noom_kill 7\n")
    group = tmp_path / base
    group.mkdir(parents=True)
    (group / name).write_text("oom 2\noom_kill 2\n")
    before = crash.oom_count(tmp_path)
    assert before == crash.OomCount(7, 2)
    assert before.rose_since(before) is None
    (group / name).write_text("oom 2\noom_kill 3\n")
    assert "cgroup rose from 2 to 3" in (crash.oom_count(tmp_path).rose_since(before) or "")
    assert "vmstat rose from 7 to 8" in (crash.OomCount(8, 2).rose_since(before) or "")
    assert crash.OomCount(None, None).rose_since(before) is None


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi and more", (200, "hi")),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n3;x\r\n yo\r\n0\r\n\r\n",
         (200, "hi yo")),
        (b"HTTP/1.0 503 No\r\n\r\nto the end", (503, "to the end")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut", None),
        (b"HTTP/1.1 what\r\n\r\n", None),
        (b"SSH-2.0\r\n\r\n", None),
        (b"", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\nx", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nx", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\nhi", None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (checks.ANSWER_BYTES + 1), None),
        (b"x" * 100_000, None),
    ],
)  # fmt: skip
def test_answers_are_read_whole_or_not_at_all(raw: bytes, answer: tuple[int, str] | None) -> None:
    async def scene() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):  # who has heard enough hangs up
                writer.write(raw)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await checks.Http(host="127.0.0.1", port=port).get("/x") == answer
        server.close()

    asyncio.run(scene())


def test_nobody_and_silence_are_no_answer() -> None:
    async def scene() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            http = checks.Http(host="127.0.0.1", port=silent.getsockname()[1])
            assert await http.get("/health") is None
            silent.listen()
            assert await http.get("/health", timeout_s=0.1) is None

    asyncio.run(scene())
