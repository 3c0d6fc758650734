"""Escapes of units and environment files. What systemd makes of them is tested in the lab."""

from __future__ import annotations

import pytest

from zenlaunch.errors import RenderError
from zenlaunch.render.quoting import env_line, exec_line, paths, plain


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain-1.0_x@y+z=a:b,c/d", "plain-1.0_x@y+z=a:b,c/d"),
        ("", '""'),
        ("two words", '"two words"'),
        ("100%", '"100%%"'),
        ("%i", '"%%i"'),
        ("$HOME", '"$$HOME"'),
        ("${HOME}", '"$${HOME}"'),
        ("a'b", '"a\'b"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("ends in \\", '"ends in \\\\"'),
        (";", '";"'),
        ("#no comment", '"#no comment"'),
        ("a\tb", '"a\\tb"'),
        ("{a: 1}", '"{a: 1}"'),
        ("naïve", '"naïve"'),
    ],
)
def test_words(word: str, written: str) -> None:
    assert exec_line(["/bin/echo", word]) == f"/bin/echo {written}"


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b", "\x1b[0m", "\x7f", "\udc80"])
def test_what_a_unit_cannot_carry_is_refused(bad: str) -> None:
    for write in (
        lambda: exec_line(["/bin/echo", bad]),
        lambda: env_line("NAME", bad),
        lambda: plain(bad),
        lambda: paths([bad]),
    ):
        with pytest.raises(RenderError, match="cannot carry"):
            write()


def test_program() -> None:
    assert exec_line(["/opt/my engine/bin/serve"]) == '"/opt/my engine/bin/serve"'
    with pytest.raises(RenderError, match="whole path of 'vllm'"):
        exec_line(["vllm", "serve"])
    with pytest.raises(RenderError, match="in its path"):
        exec_line(["/opt/$x/serve"])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain", 'A="plain"'),
        ("", 'A=""'),
        ("100% $HOME `id`", 'A="100% \\$HOME \\`id\\`"'),
        ('"quoted" \\ back', 'A="\\"quoted\\" \\\\ back"'),
        ("# not a comment", 'A="# not a comment"'),
        ("it's", 'A="it\'s"'),
    ],
)
def test_env_lines(value: str, written: str) -> None:
    assert env_line("A", value) == written


def test_env_names() -> None:
    with pytest.raises(RenderError, match="not the name"):
        env_line("1A", "x")


def test_plain() -> None:
    assert plain("50% of node 0") == "50%% of node 0"
    with pytest.raises(RenderError, match="go on in the next line"):
        plain("ends in \\")
