"""Where programs really lie, and who may get there: real trees of links, scripts, environments."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from zenlaunch.places import closed_to, places_of


def test_a_script_of_a_virtual_environment_leads_to_its_python(tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=False, symlinks=True)
    script = tmp_path / "v/bin/serve"
    script.write_text(f"#!{tmp_path}/v/bin/python -u\nprint()\n")
    link = tmp_path / "serve"
    link.symlink_to(script)
    found = places_of(str(link))
    assert str(script) in found
    assert f"{tmp_path}/v/bin/python" in found
    assert os.path.realpath(f"{sys.base_prefix}/bin/python3") in found  # the program itself
    home = next(
        line.partition("=")[2].strip()
        for line in (tmp_path / "v/pyvenv.cfg").read_text().splitlines()
        if line.startswith("home")
    )
    assert home in found


def test_what_leads_nowhere_else(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    assert places_of(str(program)) == ()
    assert places_of(str(tmp_path / "absent")) == ()
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert places_of(str(circle)) == ()
    program.write_text(f"#!{program}\n")
    assert places_of(str(program)) == ()
    program.write_text("#! \n")
    assert places_of(str(program)) == ()


def test_the_first_closed_folder_is_named() -> None:
    stranger = "zenlaunch-test-user"  # not there: owns nothing, is in no group
    with TemporaryDirectory() as name:
        closed, inner = Path(name), Path(name, "a/b")
        inner.mkdir(parents=True)
        assert closed_to(stranger, str(inner / "model")) == name
        assert closed_to("root", str(inner / "model")) is None
        for mode, expected in ((0o755, None), (0o750, f"{name}/a"), (0o711, None)):
            closed.chmod(0o755)
            (closed / "a").chmod(mode)
            assert closed_to(stranger, str(inner / "model")) == expected
        weights = inner / "weights"
        weights.touch(mode=0o600)
        assert closed_to(stranger, str(weights)) == str(weights)
        weights.chmod(0o644)
        assert closed_to(stranger, str(weights)) is None
    assert closed_to(stranger, "/nonexistent/x/y") is None
