"""What is on disk against what would be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from zenlaunch.errors import RenderError
from zenlaunch.installed import (
    changes,
    diff_text,
    install_files,
    refuse_foreign_folder,
    refuse_without_systemd,
)
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


def test_a_name_that_begins_like_ours_is_not_ours(tmp_path: Path) -> None:
    """`gemma` is planned anew; `gemma-it` beside it stays whole."""
    for name in ("gemma", "gemma-it", "gemma-i2"):
        for unit in (f"{name}-i0.service", f"{name}-i1.service", f"{name}-proxy.service"):
            other = RenderedFile(path=f"/etc/systemd/system/{unit}", text=UNIT.text)
            install_files(changes((other,), tmp_path, name="none"), say=lambda _: None)
    kept = RenderedFile(path="/etc/systemd/system/gemma-i0.service", text=UNIT.text)
    found = changes((kept,), tmp_path, name="gemma")
    assert [c.path.name for c in found] == ["gemma-i1.service"]


def test_somebody_elses_folder_is_not_taken(tmp_path: Path) -> None:
    refuse_foreign_folder(tmp_path, "z")
    folder = tmp_path / "etc/z"
    folder.mkdir(parents=True)
    (folder / "secrets.env").write_text("HF_TOKEN=x\n")
    refuse_foreign_folder(tmp_path, "z")
    (folder / "cron").write_text("READ_ENV=yes\n")
    with pytest.raises(RenderError, match="was not made by zenlaunch \\(it has cron\\)"):
        refuse_foreign_folder(tmp_path, "z")
    (folder / "plan.json").touch()
    refuse_foreign_folder(tmp_path, "z")


def test_nothing_is_installed_where_systemd_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="not run by systemd, so nothing was written"):
        refuse_without_systemd(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    refuse_without_systemd(tmp_path)


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
