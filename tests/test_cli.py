"""The command line as a user meets it: exit statuses, messages, nothing lost, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Result

from zenlaunch import __version__

Run = Callable[..., Result]
PROGRAM = ROOT / ".venv" / "bin" / "zenlaunch"


def test_version(zenlaunch: Run) -> None:
    for args in (["--version"], ["--version", "plan"]):
        result = zenlaunch(*args)
        assert (result.status, result.out.strip()) == (0, f"zenlaunch {__version__}")


def test_help_names_every_command(zenlaunch: Run) -> None:
    result = zenlaunch("--help")
    assert result.status == 0
    for command in ("probe", "plan", "up", "proxy", "config"):
        assert command in result.out
        assert zenlaunch(command, "--help").status == 0


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("plan",), 2, "no model is named"),
        (("plan", "m", "--layout", "diagonal"), 2, "'diagonal'"),
        (("plan", "m", "--bogus"), 2, "No such option"),
        (("bogus",), 2, "No such command"),
        (("plan", "m", "--instances", "0"), 2, "split.instances: must be at least 1"),
        (("plan", "m", "--instances", "1", "--instances-per-node", "1"), 2, "cannot be combined"),
        (("plan", "m", "--kv-cache", "lots"), 2, "memory.kv_cache: 'lots' is not a size"),
        (("plan", "m", "--config", "/no/such/file"), 2, "/no/such/file: No such file"),
        (("plan", "m", "--config", "/"), 2, "Is a directory"),
        (("plan", "m", "--port", "70000"), 2, "outside 1-65535"),
        (("plan", "m", "--listen", "nowhere"), 2, "proxy.listen"),
        (("plan", "m", "--engine", "tgi"), 2, "unknown engine 'tgi'"),
        (("plan", "m", "--engine", "command"), 2, "needs engine.args"),
        (("plan", "m", "--machine", "a", "--sysroot", "b"), 2, "cannot be combined"),
        (("plan", "m", "--sysroot", "/no/such/dir"), 3, "/no/such/dir is not a folder"),
        (("plan", "m", "--machine", "/no/such/file"), 3, "/no/such/file: No such file"),
        (("probe", "--from", "/dev/null"), 3, "/dev/null"),
        (("probe", "--sysroot", "/dev"), 3, "/dev"),
        (("plan", "m", "--vllm-version", "new"), 4, "'new' is not a vLLM version"),
        (("plan", "m", "--python", "/no/python"), 4, "/no/python cannot be run"),
        (("plan", "m", "--python", "/bin/false"), 4, "/bin/false does not answer"),
        (("proxy", "--upstream", "ftp://x", "--listen", "127.0.0.1:1"), 7, "ftp://x"),
        (("proxy", "--upstream", "http://127.0.0.1:1", "--listen", "x"), 2, "proxy.listen"),
        (("proxy",), 2, "no engine is named"),
        (("proxy", "--upstreams-file", "/no/such/file"), 2, "/no/such/file: No such file"),
        (("proxy", "--upstreams-file", "/dev/null"), 2, "/dev/null: it names no upstream"),
        (("proxy", "--upstream", "a=http://x y:1"), 2, "an address has no blanks"),
        (("status", "--name", "../x"), 2, "use letters, digits"),
        (("logs", "i0", "--name", "x" * 300), 2, "use letters, digits"),
        (("logs", "i0", "-n", "0"), 2, "is not in the range"),
        (("plan", "m", "--json", "--explain"), 2, "cannot be combined"),
        (("plan", "m", "--machine", ""), 2, "is empty"),
        (("plan", "--engine", "command", "--", "--x{port}"), 2, "begins with a program"),
        (("up", "/no/such/model"), 4, "/no/such/model does not exist"),
        (("plan", "./no/such/model"), 4, "./no/such/model does not exist"),
    ],
)
def test_mistakes(zenlaunch: Run, args: tuple[str, ...], status: int, message: str) -> None:
    result = zenlaunch(*args)
    assert result.status == status, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_results_go_to_stdout_and_talk_to_stderr(
    zenlaunch: Run, trees: Callable[[str], Path]
) -> None:
    tree = str(trees("epyc-9755-2s"))
    for args in (("probe", "--json"), ("plan", "m", "--json"), ("plan", "m"), ("probe",)):
        result = zenlaunch(*args, "--sysroot", tree)
        assert result.err == ""
        assert result.out


def test_a_plan_can_be_made_from_a_saved_probe(
    zenlaunch: Run, trees: Callable[[str], Path], tmp_path: Path
) -> None:
    tree = str(trees("epyc-9755-2s-smt"))
    saved = tmp_path / "probe.json"
    saved.write_text(zenlaunch("probe", "--json", "--sysroot", tree).out)
    wish = ("--weights", "15G", "--json")
    here = json.loads(zenlaunch("plan", "m", *wish, "--sysroot", tree).out)
    there = json.loads(zenlaunch("plan", "m", *wish, "--machine", str(saved)).out)
    assert here == there


def test_the_config_file_and_flags_say_the_same(
    zenlaunch: Run, trees: Callable[[str], Path], tmp_path: Path
) -> None:
    tree = str(trees("epyc-9755-2s"))
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nsplit: {layout: l3, instances_per_node: 4}\nmemory: {weights: 15G}\n"
        "proxy: {listen: 0.0.0.0:9000}\nengine: {version: 0.32.0, args: [--max-model-len, 4096],\n"
        "  env: {A: b=c}, drain_s: 60}\n"
    )
    by_file = zenlaunch("plan", "-f", str(file), "--json", "--sysroot", tree)
    by_flags = zenlaunch(
        "plan", "m", "--layout", "l3", "--instances-per-node", "4", "--weights", "15G",
        "--listen", "0.0.0.0:8000", "--port", "9000", "--vllm-version", "0.32.0", "--json",
        "--env", "A=b=c", "--drain-s", "60",
        "--sysroot", tree, "--", "--max-model-len", "4096",
    )  # fmt: skip
    assert by_file.status == 0, by_file.err
    assert by_file.out == by_flags.out


def test_up_refuses_another_machine(
    zenlaunch: Run, trees: Callable[[str], Path], tmp_path: Path
) -> None:
    """A probe of another machine is told apart, with what differs; this one's is not."""
    other, own = tmp_path / "other.json", tmp_path / "own.json"
    other.write_text(zenlaunch("probe", "--json", "--sysroot", str(trees("epyc-9755-2s"))).out)
    own.write_text(zenlaunch("probe", "--json").out)
    wish = ("--engine", "command", "--kv-cache", "1M", "--weights", "1M", "--overhead", "1M")
    result = zenlaunch("up", *wish, "--machine", str(other), "--dry-run", "--", "true", "{port}")
    assert result.status == 4
    assert f"this is not the machine of {other}" in result.err
    assert "AMD EPYC 9755" in result.err
    result = zenlaunch("up", *wish, "--machine", str(own), "--dry-run", "--", "true", "{port}")
    assert result.status == 0, result.err


def test_every_key_has_a_flag(zenlaunch: Run) -> None:
    """By its own name; the few that have another one are listed."""
    from dataclasses import fields, is_dataclass

    from zenlaunch.config import Config

    other = {
        "name": "engine", "version": "vllm-version", "margin": "memory-margin", "args": "",
        "model": "",
    }  # fmt: skip
    shown = zenlaunch("up", "--help").out
    for field in fields(Config):
        value = getattr(Config(), field.name)
        keys = [f.name for f in fields(value)] if is_dataclass(value) else [field.name]
        for key in keys:
            flag = other.get(key, key.replace("_", "-"))
            assert f"--{flag}" in shown, f"{field.name}.{key}"


def test_schema(zenlaunch: Run) -> None:
    assert json.loads(zenlaunch("config", "schema").out)["title"] == "Config"


def test_explain_counts_the_steps(zenlaunch: Run, trees: Callable[[str], Path]) -> None:
    result = zenlaunch("plan", "m", "--explain", "--sysroot", str(trees("epyc-9755-2s")))
    assert [line for line in result.out.splitlines() if line[:2] == "1."]
    assert "   i3       129,131,133" in result.out
    assert "   spare    126,254-255   (3)" in result.out


def test_shell_completion() -> None:
    done = subprocess.run(
        [PROGRAM],
        env=os.environ
        | {"_ZENLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": "zenlaunch pl", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.split() == ["plan"]


def test_a_reader_that_goes_is_no_error(trees: Callable[[str], Path]) -> None:
    done = subprocess.run(
        f"{PROGRAM} plan m --sysroot {trees('epyc-9755-2s')} --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirect", "status", "said"),
    [
        (">/dev/full", 5, "cannot write the output: No space left"),
        (">&-", 0, ""),
        ("2>&- >/dev/null", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
@pytest.mark.parametrize("output", ["--json", ""])
def test_output_that_takes_no_more(
    redirect: str, status: int, said: str, output: str, trees: Callable[[str], Path]
) -> None:
    # Many instances, so that the text is larger than what a pipe holds.
    wish = f"--cores-per-instance 2 --sysroot {trees('epyc-9755-2s')} {output}"
    done = subprocess.run(
        ["bash", "-c", f"{PROGRAM} plan m {wish} {redirect}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_knows_ascii_only(trees: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [PROGRAM, "plan", "ünï😀", "--sysroot", trees("epyc-9755-2s")],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"\\xfcn\\xef" in done.stdout


def test_a_pipe_without_a_writer(zenlaunch: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for args, status in ((("probe", "--from"), 3), (("plan", "m", "-f"), 2)):
        result = zenlaunch(*args, str(pipe))
        assert result.status == status
        assert "nobody writes to this pipe" in result.err


def test_process_substitution(trees: Callable[[str], Path]) -> None:
    tree = trees("epyc-9755-2s")
    done = subprocess.run(
        ["bash", "-c", f"{PROGRAM} probe --json --from <({PROGRAM} probe --json --sysroot {tree})"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout)["online"] == "0-255"


def test_a_file_without_end(zenlaunch: Run) -> None:
    result = zenlaunch("probe", "--from", "/dev/zero")
    assert result.status == 3
    assert "larger than 64 MiB" in result.err


def test_standard_input(trees: Callable[[str], Path], zenlaunch: Run) -> None:
    probe = zenlaunch("probe", "--json", "--sysroot", str(trees("epyc-9755-2s"))).out
    done = subprocess.run(
        [PROGRAM, "plan", "m", "--machine", "-", "--json"],
        input=probe,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert json.loads(done.stdout)["instances"][0]["cpus"].startswith("0,2,4")
