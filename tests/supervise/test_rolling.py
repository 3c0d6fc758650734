"""A rolling restart under load, behind the real proxy: no request is lost, no stream is cut."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from supervise.world import Running, deployment, engine, free_port, left_of
from zenlaunch import events
from zenlaunch.lifecycle import Policy, State
from zenlaunch.spec import HealthCheck, LaunchSpec

CLIENTS = 6


class Load:
    """Clients that ask one after the other, half of them for streams; what went wrong is kept."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answered = 0
        self.by: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stopping = False

    async def ask(self, *, stream: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"model": "m", "prompt": "x", "stream": stream, "max_tokens": 15})
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write((head + body).encode())
        answer = (await reader.read()).decode()
        writer.close()
        whole = "hello" in answer
        if stream:
            whole = "data: [DONE]" in answer and answer.endswith("0\r\n\r\n")
        if not answer.startswith("HTTP/1.1 200 ") or not whole:
            self.wrong.append(answer[:300] or "nothing")
            return
        self.answered += 1
        for line in answer.partition("\r\n\r\n")[0].lower().splitlines():
            if line.startswith("x-zenlaunch-upstream:"):
                self.by[line.partition(":")[2].strip()] += 1

    async def client(self, *, stream: bool) -> None:
        while not self.stopping:
            try:
                await self.ask(stream=stream)
            except OSError as e:
                self.wrong.append(repr(e))
                await asyncio.sleep(0.05)


def test_a_rolling_restart_under_load_loses_no_request(tmp_path: Path) -> None:
    specs = [engine(f"i{n}", "--drain", "10", drain_s=10.0) for n in range(3)]
    port, admin = free_port(), tmp_path / "admin"
    upstreams = [w for s in specs for w in ("--upstream", f"{s.name}=http://127.0.0.1:{s.port}")]
    proxy = LaunchSpec(
        name="proxy",
        argv=(sys.executable, "-m", "zenlaunch", "proxy", "--listen", f"127.0.0.1:{port}",
              "--admin-socket", str(admin), *upstreams),
        port=port,
        health=HealthCheck(interval_s=0.2),
        drain_s=10.0,
    )  # fmt: skip

    async def usable(count: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return f'"usable": {count}'.encode() in answer

    async def scene() -> None:
        wanted = deployment(tmp_path, *specs, proxy=proxy, admin_socket=admin)
        async with Running(wanted) as r:
            await r.all_ready()
            while not await usable(3):
                await asyncio.sleep(0.05)
            load = Load(port)
            clients = [asyncio.create_task(load.client(stream=bool(n % 2))) for n in range(CLIENTS)]
            await r.until(lambda: load.answered > 50)
            assert r.supervisor.roll()
            await r.until(lambda: r.of(events.RollingEnded), timeout_s=60)
            seen = load.answered
            await r.until(lambda: load.answered > seen + 50)
            load.stopping = True
            await asyncio.gather(*clients)
            assert load.wrong == []
            assert set(load.by) == {"i0", "i1", "i2"}
            assert [m.restarts for m in r.supervisor.status()] == [1, 1, 1, 0]
            for spec in specs:
                assert r.log(spec.name).count("got SIGTERM") == 1
                # Answers take 0.3 s: a drain that lasts to its limit has waited for nothing.
                (drain_s,) = r.seconds_in(spec.name, State.DRAINING)
                assert drain_s < Policy().drain_s / 2
        assert left_of("test/") == []

    asyncio.run(scene())
