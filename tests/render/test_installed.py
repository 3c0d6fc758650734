"""What is on disk against what would be written."""

from __future__ import annotations

from pathlib import Path

from zenlaunch.installed import changes, diff_text, install_files
from zenlaunch.render import RenderedFile

UNIT = RenderedFile(path="/etc/systemd/system/z-i0.service", text="# Made by zenlaunch 1\na=1\n")
ENV = RenderedFile(path="/etc/z/i0.env", text="# Made by zenlaunch 1\nTOKEN=x\n", mode=0o600)


def test_new_files_are_written_with_their_mode(tmp_path: Path) -> None:
    found = changes((UNIT, ENV), tmp_path, name="z")
    lines: list[str] = []
    install_files(found, say=lines.append)
    assert len(lines) == 2
    env = tmp_path / "etc/z/i0.env"
    assert env.read_text() == ENV.text
    assert env.stat().st_mode & 0o777 == 0o600
    assert changes((UNIT, ENV), tmp_path, name="z") == []


def test_diff_shows_units_and_hides_secrets(tmp_path: Path) -> None:
    install_files(changes((UNIT, ENV), tmp_path, name="z"), say=lambda _: None)
    unit = RenderedFile(path=UNIT.path, text=UNIT.text.replace("a=1", "a=2"))
    env = RenderedFile(path=ENV.path, text=ENV.text.replace("x", "y"), mode=0o600)
    text = diff_text(changes((unit, env), tmp_path, name="z"))
    assert "-a=1\n+a=2\n" in text
    assert "TOKEN" not in text
    assert "i0.env: differs, not shown" in text


def test_mode_alone_is_a_change(tmp_path: Path) -> None:
    install_files(changes((ENV,), tmp_path, name="z"), say=lambda _: None)
    (tmp_path / "etc/z/i0.env").chmod(0o644)
    found = changes((ENV,), tmp_path, name="z")
    assert [c.mode for c in found] == [0o600]
    install_files(found, say=lambda _: None)
    assert (tmp_path / "etc/z/i0.env").stat().st_mode & 0o777 == 0o600


def test_instances_of_an_earlier_plan_go_and_foreign_files_stay(tmp_path: Path) -> None:
    more = RenderedFile(path="/etc/systemd/system/z-i1.service", text=UNIT.text)
    install_files(changes((UNIT, more), tmp_path, name="z"), say=lambda _: None)
    foreign = tmp_path / "etc/systemd/system/z-i7.service"
    foreign.write_text("[Service]\n")
    found = changes((UNIT,), tmp_path, name="z")
    assert [(c.path.name, c.new) for c in found] == [("z-i1.service", None)]
    assert "+++ /dev/null" in diff_text(found)
    install_files(found, say=lambda _: None)
    assert foreign.exists()
    assert not (tmp_path / "etc/systemd/system/z-i1.service").exists()
