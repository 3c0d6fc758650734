"""What the guest's kernel says of processes, and small helpers of the lab's inside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path("/lab/out")
ENGINE = "/lab/src/inside/engine.py"


def sh(command: str, *, check: bool = True, timeout_s: float = 120.0) -> str:
    """Run a shell command and return its stdout; its stderr goes to the log."""
    done = subprocess.run(
        command, shell=True, stdout=subprocess.PIPE, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode:
        sys.exit(f"{command!r} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def status_of(command: str) -> tuple[int, str]:
    """Run a shell command; return its status and what it said, stderr included."""
    done = subprocess.run(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout


def wait_for(what: str, test: Callable[[], Any], *, timeout_s: float = 90.0) -> Any:
    """Poll until `test` is true and return what it gave."""
    until = time.monotonic() + timeout_s
    while not (value := test()):
        if time.monotonic() > until:
            sys.exit(f"waited {timeout_s} s in vain: {what}")
        time.sleep(0.1)
    return value


def get(url: str, timeout_s: float = 10.0) -> Any:
    """Return the JSON that a GET gives, or None."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def ask(url: str, timeout_s: float = 30.0, **fields: Any) -> tuple[int, str | None]:
    """Put a question through the proxy; return the status and which instance answered."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]} | fields
    body = json.dumps(asked).encode()
    request = urllib.request.Request(
        url + "/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
            return answer.status, answer.headers["x-zenlaunch-upstream"]
    except urllib.error.HTTPError as e:
        return e.code, None
    except OSError as e:
        return 0, str(e)


def engines() -> dict[int, list[int]]:
    """Return port -> pids of the engine processes that run, the main one first."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [ENGINE.encode()]:
            found.setdefault(int(words[words.index(b"--port") + 1]), []).append(int(folder.name))
    return {port: sorted(pids) for port, pids in found.items()}


def facts(pid: int) -> dict[str, Any]:
    """Return masks, thread masks, anonymous pages per node (kB) and policies of one process."""
    proc = Path(f"/proc/{pid}")
    pages: dict[str, int] = {}
    policies: set[str] = set()
    for line in (proc / "numa_maps").read_text().splitlines():
        if "anon=" not in line or "file=" in line:
            continue
        policies.add(line.split()[1])
        size = int(m[1]) if (m := re.search(r"kernelpagesize_kB=(\d+)", line)) else 4
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            pages[node] = pages.get(node, 0) + int(count) * size
    return {
        "cpus": field(proc / "status", "Cpus_allowed_list"),
        "mems": field(proc / "status", "Mems_allowed_list"),
        "threads": {
            t.name: field(t / "status", "Cpus_allowed_list") for t in (proc / "task").iterdir()
        },
        "anon_kb": pages,
        "policies": sorted(policies),
    }


def field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return line.partition(":")[2].strip()
    return ""


def save(name: str, value: Any) -> None:
    """Leave a JSON for the test outside."""
    (OUT / name).write_text(json.dumps(value, indent=1))
