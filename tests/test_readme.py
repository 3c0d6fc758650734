"""The README is true: every command in it runs, and prints what it says.

```console blocks hold commands (`$ `) with their output; `...` stands for lines left out. Each is
run here in a folder with the machine of the examples, or named below with the test that runs it.
```sh blocks need the network or root: they must stand in the scripts that `make` uses.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Result

README = (ROOT / "README.md").read_text()
ELSEWHERE = {
    "make up": "tests/e2e/test_pair.py",
    "make test": "this is it",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[tuple[str, str]]:
    """Return (command, output) of every console block."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.mark.parametrize(("command", "output"), commands(), ids=lambda v: v[:60])
def test_command(
    command: str,
    output: str,
    zenlaunch: Callable[..., Result],
    trees: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command in ELSEWHERE:
        place = ELSEWHERE[command]
        assert place == "this is it" or (ROOT / place).is_file()
        return
    words = shlex.split(command)
    assert words[0] == "zenlaunch"
    if words[1] == "up":
        # The same start is made, and its screen looked at, by the end-to-end test.
        makefile = (ROOT / "Makefile").read_text()
        for word in words[2:]:
            assert word.strip('"') in makefile.replace("$(TINY)", ".cache/tiny-llama").replace(
                "$(VLLM)", ".venv-vllm"
            ).replace("$(CACHE)", ".cache"), word
        return
    probe = zenlaunch("probe", "--json", "--sysroot", str(trees("epyc-9755-2s")))
    (tmp_path / "turin.json").write_text(probe.out)
    monkeypatch.chdir(tmp_path)
    result = zenlaunch(*words[1:])
    said = [line.rstrip() for line in (result.out + result.err).splitlines()]
    at = 0
    for piece in re.split(r"^\.\.\.\n", output, flags=re.M):
        lines = piece.rstrip("\n").splitlines()
        while said[at : at + len(lines)] != lines:
            at += 1
            assert at < len(said), f"not printed:\n{piece}\n--- but:\n{result.out}{result.err}"
        at += len(lines)


def test_the_install_commands_are_those_of_the_script() -> None:
    text = "\n".join(blocks("sh"))
    script = (ROOT / "scripts" / "install_vllm.sh").read_text()
    for index in re.findall(r"https://\S+", text):
        assert index.replace("0.32.0", "$version") in script, index
    assert "vllm[zen]==0.32.0+cpu" in text
    assert '"vllm[zen]==$version+cpu"' in script
    makefile = (ROOT / "Makefile").read_text()
    for package in re.findall(r"apt install (.*)", text)[0].split():
        assert package in makefile


def test_the_config_example_is_valid(tmp_path: Path) -> None:
    from zenlaunch.config import load, validated

    for block in blocks("yaml"):
        assert validated(load(block, source="README.md")).model


def test_every_option_named_exists(zenlaunch: Callable[..., Result]) -> None:
    known = set()
    for command in ("probe", "plan", "up", "proxy", "logs", "restart", "status", "render systemd"):
        known |= set(re.findall(r"--[a-z][a-z-]*", zenlaunch(*command.split(), "--help").out))
    foreign = {
        "--physcpubind", "--membind", "--extra-index-url", "--max-model-len", "--cap-add",
        "--version", "--install-completion", "--served-model-name", "--rounds",
    }  # fmt: skip
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    unknown = {o for o in used - known - foreign if not o.startswith(("--kv-cache-mem", "--shut"))}
    assert unknown <= {"--host"}, unknown


def test_every_link_inside_goes_somewhere() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", README, flags=re.M)
    }
    for target in re.findall(r"\]\(#([^)]*)\)", README):
        assert target in anchors
    for path in re.findall(
        r"`((?:configs|scripts|benchmarks|zenlaunch|systemd|tests)/[\w./-]*)`", README
    ):
        assert (ROOT / path).exists(), path


def test_the_install_script_is_clean() -> None:
    for script in (ROOT / "scripts").glob("*.sh"):
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
        assert os.access(script, os.X_OK)
