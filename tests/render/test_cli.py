"""The commands `render systemd` and `render shell`: what they print, write and refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from zenlaunch.cli_render import _remake
from zenlaunch.config import Config

Run = Callable[..., Any]


@pytest.fixture
def wish(trees: Callable[[str], Path]) -> tuple[str, ...]:
    """Return options that plan one small engine for a machine that this one is not."""
    return (
        "--sysroot", str(trees("small-server")), "--engine", "command", "--instances", "1",
        "--kv-cache", "1G", "--weights", "1G",
    )  # fmt: skip


ENGINE = ("--", "/opt/engine", "--port", "{port}")


def test_prints_every_file(zenlaunch: Run, wish: tuple[str, ...]) -> None:
    done = zenlaunch("render", "systemd", *wish, *ENGINE)
    assert done.status == 0
    heads = [line for line in done.out.splitlines() if line.startswith("==> ")]
    assert "==> /etc/systemd/system/zenlaunch-i0.service (mode 0644)" in heads
    assert "==> /etc/zenlaunch/i0.env (mode 0600)" in heads
    assert "ExecStart=/opt/engine --port 8001" in done.out


def test_secrets_stand_where_they_must_only(
    zenlaunch: Run, wish: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("render", "systemd", *wish, "--env", "HF_TOKEN=hf_0123456789", "--output",
             str(tmp_path / "units"), *ENGINE)  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["zenlaunch", *words])
    done = zenlaunch(*words)
    assert done.status == 0, done.err
    assert "HF_TOKEN stands in the instances' environment files (0600)" in done.err
    holding = [p for p in (tmp_path / "units").rglob("*") if p.is_file()
               and "hf_0123456789" in p.read_text()]  # fmt: skip
    assert [(p.name, p.stat().st_mode & 0o777) for p in holding] == [("i0.env", 0o600)]
    script = tmp_path / "run.sh"
    words = ("render", "shell", *wish, "--env", "HF_TOKEN=hf_0123456789", "--output",
             str(script), *ENGINE)  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["zenlaunch", *words])
    done = zenlaunch(*words)
    assert "HF_TOKEN stands in this script as it is" in done.err
    assert script.stat().st_mode & 0o777 == 0o700
    assert script.read_text().count("hf_0123456789") == 1  # not in its header


def test_writes_to_a_folder(zenlaunch: Run, wish: tuple[str, ...], tmp_path: Path) -> None:
    done = zenlaunch("render", "systemd", *wish, "--output", str(tmp_path), *ENGINE)
    assert done.status == 0
    assert done.out == ""
    assert (tmp_path / "etc/zenlaunch/i0.env").stat().st_mode & 0o777 == 0o600
    unit = (tmp_path / "etc/systemd/system/zenlaunch-i0.service").read_text()
    assert str(tmp_path) not in unit


def test_what_cannot_be_combined(zenlaunch: Run, wish: tuple[str, ...]) -> None:
    for extra in (("--diff", "--install"), ("--machine", "x")):
        done = zenlaunch("render", "systemd", *wish, *extra, *ENGINE)
        assert done.status == 2
        assert "cannot be combined" in done.err


def test_nothing_is_installed_for_another_machine(zenlaunch: Run, wish: tuple[str, ...]) -> None:
    done = zenlaunch("render", "systemd", *wish, "--install", "--yes", *ENGINE)
    assert done.status == 5
    assert "this is not the machine of the plan, so nothing is installed" in done.err
    assert "Small Server" in done.err


def test_nothing_is_installed_without_sizes(zenlaunch: Run, trees: Callable[[str], Path]) -> None:
    root = str(trees("small-server"))
    done = zenlaunch("render", "systemd", "--sysroot", root, "--engine", "command", "--install",
                     "--yes", *ENGINE)  # fmt: skip
    assert done.status == 5
    assert "KV cache is not known" in done.err


def test_a_program_without_its_folder_is_refused(zenlaunch: Run, wish: tuple[str, ...]) -> None:
    done = zenlaunch("render", "systemd", *wish, "--", "engine", "{port}")
    assert done.status == 5
    assert "systemd needs the whole path of 'engine'" in done.err


def test_shell_to_stdout_and_to_a_file(
    zenlaunch: Run, wish: tuple[str, ...], tmp_path: Path
) -> None:
    done = zenlaunch("render", "shell", *wish, *ENGINE)
    assert done.out.startswith("#!/usr/bin/env bash\n")
    path = tmp_path / "serve.sh"
    zenlaunch("render", "shell", *wish, "--output", str(path), *ENGINE)
    assert path.read_text().splitlines()[4:] == done.out.splitlines()[4:]
    assert path.stat().st_mode & 0o111


def test_other_peoples_files_are_not_overwritten(
    zenlaunch: Run, wish: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("#!/bin/sh\necho mine\n")
    done = zenlaunch("render", "shell", *wish, "--output", str(path), *ENGINE)
    assert done.status == 5
    assert "was not made by zenlaunch" in done.err
    assert "mine" in path.read_text()
    for port in ("8000", "9000"):  # its own files are another matter
        done = zenlaunch("render", "systemd", *wish, "--output", str(tmp_path / "o"), "--port",
                         port, *ENGINE)  # fmt: skip
        assert done.status == 0
    socket = (tmp_path / "o/etc/systemd/system/zenlaunch-proxy.socket").read_text()
    assert "ListenStream=127.0.0.1:9000" in socket


def test_guard_is_a_command(zenlaunch: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    for question in ("check", "ready", "drain"):
        done = zenlaunch("guard", question, "--plan", path, "--instance", "i0")
        assert done.status == 2
        assert f"{path}: No such file" in done.err


def test_a_folder_that_the_user_may_not_enter_is_named(zenlaunch: Run) -> None:
    with TemporaryDirectory() as name:  # for its owner alone
        program = Path(name, "program")
        program.write_text(f"#!{sys.executable}\n")
        link = Path(name, "engine")
        link.symlink_to(program)
        done = zenlaunch("render", "systemd", "--engine", "command", "--instances", "1",
                         "--kv-cache", "16M", "--weights", "16M", "--overhead", "16M",
                         "--", str(link), "{port}")  # fmt: skip
        assert done.status == 0
        assert f"the user zenlaunch may not enter {name}, where {link} is" in done.err
        private = name.startswith(("/tmp/", "/var/tmp/"))
        assert (f"a /tmp of their own and will not see {link}" in done.err) == private


def test_a_file_named_from_this_folder_is_named(
    zenlaunch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.jinja").touch()
    monkeypatch.chdir(tmp_path)
    done = zenlaunch("render", "systemd", "--engine", "command", "--instances", "1", "--kv-cache",
                     "16M", "--weights", "16M", "--overhead", "16M", "--", "/bin/true", "{port}",
                     "--chat-template", "chat.jinja", "--name", "absent")  # fmt: skip
    assert done.status == 0
    assert f"the units run in another folder: write {tmp_path}/chat.jinja" in done.err
    assert "absent" not in done.err


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("z render systemd M --install --yes", "zenlaunch render systemd M"),
        ("z render systemd --output /x M --diff", "zenlaunch render systemd M"),
        ("z render systemd --output=/x M", "zenlaunch render systemd M"),
        ("z render systemd M -- --diff --yes", "zenlaunch render systemd M -- --diff --yes"),
    ],
)
def test_the_command_that_makes_it_again(given: str, kept: str) -> None:
    assert " ".join(_remake(given.split(), Config())) == kept
