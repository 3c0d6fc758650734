"""The main job on real input: `make up`, two real vLLM instances, one endpoint.

One start serves all tests of this file; the last one stops it. The environment is polluted, on
purpose, with what install guides tell people to export.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import ROOT, free_ports, wait_for

from zenlaunch.child import tree
from zenlaunch.cpuset import CpuSet
from zenlaunch.observe import threads_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

POLLUTED = {
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "OMP_NUM_THREADS": "7",
    "OMP_WAIT_POLICY": "ACTIVE",
    "VLLM_PORT": "tcp://10.0.0.1:80",
    "VLLM_CPU_KVCACHE_SPACE": "900",
    "VLLM_CPU_OMP_THREADS_BIND": "0-255",
    "TORCHINDUCTOR_FREEZING": "1",
}


@dataclass(slots=True, kw_only=True)
class Pair:
    """A running `make up`."""

    process: subprocess.Popen[bytes]
    screen: Path
    plan: dict[str, Any]
    folder: Path
    environ: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan['proxy']['port']}"

    def text(self) -> str:
        return self.screen.read_text(errors="replace")

    def metric(self, instance: dict[str, Any], name: str, label: str = "") -> float:
        """Sum one series of one instance, asked directly."""
        text = httpx.get(f"http://127.0.0.1:{instance['port']}/metrics").text
        rows = [r for r in text.splitlines() if r.startswith(name) and label in r]
        return sum(float(r.rpartition(" ")[2]) for r in rows)


@pytest.fixture(scope="module")
def pair(
    vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    port = free_ports(3)
    flags = f"--name pair-{os.getpid()} --port {port} --base-port {port + 1}"
    environ = os.environ | POLLUTED | {
        "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"), "MAKEFLAGS": "",
    }  # fmt: skip
    screen = folder / "screen.txt"
    with screen.open("wb") as out:
        process = subprocess.Popen(
            ["make", "up", f"UP_FLAGS={flags}"],
            cwd=ROOT,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    plan = json.loads(
        subprocess.run(
            [ROOT / ".venv/bin/zenlaunch", "plan", ".cache/tiny-llama", "--json",
             "--python", str(vllm_python), "--instances-per-node", "2", "--kv-cache", "512M",
             "--overhead", "2G", "--port", str(port), "--base-port", str(port + 1),
             "--", "--max-model-len", "1024"],
            capture_output=True, check=True, cwd=ROOT,
        ).stdout
    )  # fmt: skip
    running = Pair(process=process, screen=screen, plan=plan, folder=folder, environ=environ)
    try:
        wait_for(
            lambda: process.poll() is not None or "'Say hello.' ->" in running.text(),
            600,
            running.text(),
        )
        assert process.poll() is None, running.text()
        yield running
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)


def test_screen_shows_the_map_and_the_proof(pair: Pair) -> None:
    text = pair.text()
    assert re.search(r"node 0 +Ab", text)
    assert len(re.findall(r"ready +\d+ s +1/1 threads on plan, (99|100)\.\d% of pages", text)) == 2
    assert re.search(r"'Say hello\.' -> i[01]: ", text)
    assert "warning" not in text, text


def test_real_client_reaches_both_instances(pair: Pair) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    before = [pair.metric(i, "vllm:request_success_total") for i in pair.plan["instances"]]
    for _ in range(4):
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello."}], max_tokens=8
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens <= 8
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=16, stream=True
    )
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    text = client.completions.create(model=model, prompt="One engine", max_tokens=4)
    assert text.choices[0].finish_reason in ("length", "stop")
    after = [pair.metric(i, "vllm:request_success_total") for i in pair.plan["instances"]]
    assert all(b > a for a, b in zip(before, after, strict=True)), (before, after)
    assert sum(after) - sum(before) == 6


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_vllm_bench_serve_through_the_proxy(
    pair: Pair, vllm_python: Path, tmp_path: Path, kind: str
) -> None:
    """vLLM's own load generator: every request succeeds, both instances take part."""
    model = httpx.get(f"{pair.url}/v1/models").json()["data"][0]["id"]
    before = [pair.metric(i, "vllm:request_success_total") for i in pair.plan["instances"]]
    done = subprocess.run(
        [vllm_python.parent / "vllm", "bench", "serve", "--base-url", pair.url,
         "--backend", "openai-chat" if "chat" in kind else "openai", "--endpoint", f"/v1/{kind}",
         "--model", model, "--tokenizer", ROOT / ".cache/tiny-llama",
         "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32",
         "--num-prompts", "64", "--max-concurrency", "8",
         "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"],
        env=os.environ | {"PYTHONPATH": str(vllm_distribution(vllm_python, tmp_path)),
                          "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (64, 0)
    assert result["total_output_tokens"] > 0
    after = [pair.metric(i, "vllm:request_success_total") for i in pair.plan["instances"]]
    served = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(served) >= 64, "some versions send one more, to see whether anybody answers"
    assert min(served) >= 16, served
    status = httpx.get(f"{pair.url}/zenlaunch/status").json()
    assert status["in_flight"] == 0
    assert all(u["errors"] == 0 for u in status["upstreams"])


def vllm_distribution(python: Path, folder: Path) -> Path:
    """Return a folder in which a distribution called `vllm` is found.

    The `vllm` command asks for its version, and a repack (`vllm-cpu`) has another name.
    """
    ask = "import importlib.metadata as m; print(next(iter(m.packages_distributions()['vllm'])))"
    name = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    if name.stdout.strip() != "vllm":
        info = folder / "vllm-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0\n")
    return folder


def test_threads_are_where_the_plan_has_them(pair: Pair) -> None:
    status = {name: int(pid) for name, pid in _main_pids(pair).items()}
    seen = CpuSet()
    for instance in pair.plan["instances"]:
        planned = CpuSet.parse(instance["cpus"])
        pids = tree(status[instance["name"]])
        assert len(pids) >= 3  # API server, engine core, worker
        threads = [t for pid in pids for t in threads_of(pid)]
        assert len(threads) > 20
        assert all(t.cpus <= planned for t in threads)
        assert seen.isdisjoint(planned)
        seen |= planned


def test_every_engine_thread_works(pair: Pair) -> None:
    """`verify` sends each engine a request of its own, with its key, and looks who worked."""
    done = subprocess.run(
        [ROOT / ".venv/bin/zenlaunch", "verify", "--json", "--name", f"pair-{os.getpid()}"],
        capture_output=True, text=True, timeout=120, check=False, env=pair.environ,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert [one["idle_cpus"] for one in found.values()] == ["", ""], found
    assert done.returncode == 0, found
    text = httpx.get(f"{pair.url}/metrics").text
    for name in found:
        assert f'zenlaunch_instance_problems{{instance="{name}"}} 0.0' in text


def test_polluted_environment_is_cleaned(pair: Pair) -> None:
    for instance in pair.plan["instances"]:
        pid = _main_pids(pair)[instance["name"]]
        raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        env = dict(pair_.decode().partition("=")[::2] for pair_ in raw if pair_)
        for name in POLLUTED:
            assert name not in env, name
        for name, value in instance["env"].items():
            assert env[name] == value


def test_engines_cannot_be_reached_round_the_proxy(pair: Pair) -> None:
    for instance in pair.plan["instances"]:
        port = instance["port"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
    keys = list((pair.folder / "zenlaunch").rglob("upstream.key"))
    assert [k.stat().st_mode & 0o777 for k in keys] == [0o600]
    secret = keys[0].read_text().strip()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                assert secret.encode() not in (entry / "cmdline").read_bytes()
    for log in pair.folder.rglob("*.log"):
        assert secret not in log.read_text(errors="replace")


def test_a_second_up_of_the_name_touches_nothing(pair: Pair, vllm_python: Path) -> None:
    (key,) = (pair.folder / "zenlaunch").rglob("upstream.key")
    before = key.read_text()
    port = free_ports(3)
    done = subprocess.run(
        [ROOT / ".venv/bin/zenlaunch", "up", ".cache/tiny-llama", "--python", str(vllm_python),
         "--name", f"pair-{os.getpid()}", "--kv-cache", "512M", "--overhead", "1G",
         "--port", str(port), "--base-port", str(port + 1), "--", "--max-model-len", "1024"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=pair.environ,
    )  # fmt: skip
    assert done.returncode == 6, done.stdout
    assert "is up already" in done.stderr
    assert key.read_text() == before


def freed(pair: Pair) -> None:
    """Both engines have nothing to do any more, a second after their clients have left."""

    def running() -> float:
        return sum(pair.metric(i, "vllm:num_requests_running") for i in pair.plan["instances"])

    wait_for(lambda: running() == 0, 1, "an engine goes on for nobody")
    status = httpx.get(f"{pair.url}/zenlaunch/status").json()
    assert all(u["in_flight"] == u["errors"] == 0 for u in status["upstreams"])


LONG: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_clients_that_leave_free_the_engines(pair: Pair, chat: bool) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": client.models.list().data[0].id, **LONG}
    ask |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}

    create = client.chat.completions.create if chat else client.completions.create
    with pytest.raises(openai.APITimeoutError):
        create(timeout=0.3, **ask)
    freed(pair)
    for stream in [create(stream=True, **ask) for _ in range(3)]:
        next(iter(stream))
        stream.close()
    freed(pair)

    async def cancel_all() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{pair.url}/v1", api_key="none", max_retries=0
        ) as later:
            create = later.chat.completions.create if chat else later.completions.create

            async def one(*, stream: bool) -> None:
                answer = await create(stream=stream, **ask)
                async for _ in answer:
                    pass

            tasks = [asyncio.create_task(one(stream=k % 2 == 0)) for k in range(6)]
            await asyncio.sleep(0.4)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel_all())
    freed(pair)


def test_ctrl_c_leaves_nothing(pair: Pair) -> None:
    pids = {p for pid in _main_pids(pair).values() for p in tree(int(pid))}
    assert len(pids) >= 6
    os.killpg(pair.process.pid, signal.SIGINT)
    assert pair.process.wait(120) != 0
    assert "stopping (SIGINT)" in pair.text()
    left = [p for p in pids if Path(f"/proc/{p}").exists()]
    assert not left, [Path(f"/proc/{p}/cmdline").read_bytes() for p in left]
    for instance in pair.plan["instances"]:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", instance["port"]))


def _main_pids(pair: Pair) -> dict[str, int]:
    """Find the main process of each instance by the marker in its environment and its parent."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        for instance in pair.plan["instances"]:
            port = str(instance["port"]).encode()
            if b"api_server" in command and b"--port\0" + port + b"\0" in command:
                found[instance["name"]] = int(entry.name)
    return found


def test_engine_that_dies_while_starting(
    vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_ports(3)
    done = subprocess.run(
        [ROOT / ".venv/bin/zenlaunch", "up", str(tiny_model), "--python", str(vllm_python),
         "--instances-per-node", "2", "--kv-cache", "512M", "--overhead", "2G",
         "--port", str(port), "--base-port", str(port + 1), "--name", f"dies-{os.getpid()}",
         "--", "--max-model-len", "4096"],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path),
                          "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 6, done.stdout + done.stderr
    assert "died while starting" in done.stderr or "was ended while starting" in done.stderr
    assert "--max-model-len is longer than the model's own limit" in done.stderr
    assert "max_model_len (4096)" in done.stderr  # the line that says so
