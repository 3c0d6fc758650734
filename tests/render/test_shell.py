"""The script of `render shell`: correct for bash, and run with real engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervise.world import ENGINE, free_port

from render.examples import composed
from zenlaunch.config import override
from zenlaunch.render import RENDERERS, RenderOptions


def wait_for(test: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """Poll until `test` gives something; fails when the script ends before."""
    import time

    until = time.monotonic() + 120
    while not (value := test()):
        assert process.poll() is None, "the script has ended"
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return value


def usable(port: int) -> int:
    try:
        url = f"http://127.0.0.1:{port}/zenlaunch/status"
        with urllib.request.urlopen(url, timeout=5) as answer:
            status = json.load(answer)
    except OSError:
        return 0
    return sum(u["state"] == "ready" for u in status["upstreams"])


def alive(text: str) -> list[int]:
    """Return the processes whose command holds `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def script(tmp_path: Path) -> tuple[Path, int]:
    """Return a script of two engines and a proxy on free ports."""
    port, base = free_port(), free_port() + 10
    out = tmp_path / "serve.sh"
    wishes = ["--engine", "command", "--instances", "2", "--kv-cache", "16M", "--weights", "16M",
              "--overhead", "16M", "--port", str(port), "--base-port", str(base)]  # fmt: skip
    engine = [sys.executable, "-S", str(ENGINE), "--port", "{port}", "--say", "it's $HOME; `x`",
              "--ready-after", "0.5", "--children", "1"]  # fmt: skip
    command = [sys.executable, "-m", "zenlaunch", "render", "shell", "--output", str(out)]
    subprocess.run([*command, *wishes, "--", *engine], check=True)
    return out, port


def test_bash_and_shellcheck_have_no_complaint(script: tuple[Path, int]) -> None:
    path, _ = script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(path)], check=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_runs_and_leaves_nothing(
    script: tuple[Path, int], tmp_path: Path, signum: signal.Signals
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two engines need two CPUs")
    path, port = script
    logs = tmp_path / "logs"
    env = {**os.environ, "LOGS": str(logs)}
    with subprocess.Popen(["bash", str(path)], env=env) as process:
        wait_for(lambda: usable(port) == 2, process)
        assert "it's $HOME; `x`" in (logs / "i0.log").read_text()
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum
    assert [pid for pid in alive(str(ENGINE)) if str(path.parent) in cwd_of(pid)] == []
    assert usable(port) == 0


def cwd_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def test_says_why_an_engine_ended(script: tuple[Path, int], tmp_path: Path) -> None:
    path, _ = script
    text = path.read_text().replace("--ready-after 0.5", "--ready-after 60 --exit-after 0.2")
    path.write_text(text)
    env = {**os.environ, "LOGS": str(tmp_path / "logs")}
    done = subprocess.run(["bash", str(path)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 6
    assert "i0 ended; the end of" in done.stderr


@pytest.mark.parametrize("renderer", ["shell", "systemd"])
def test_the_proxy_gets_every_key_of_the_config(renderer: str) -> None:
    made = composed("small-server")
    wishes = {"proxy.max_queued": 7, "proxy.api_keys_file": "/etc/keys"}
    config = override(made.config, wishes)
    files = RENDERERS[renderer](made.plan, made.specs, config, RenderOptions())
    words = " ".join(file.text for file in files)
    assert "--max-queued 7" in words
    assert "--api-keys-file /etc/keys" in words
