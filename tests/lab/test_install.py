"""`render systemd --install` where units run: what it asks, refuses, stops and leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.image import Unavailable
from lab.namespace import start

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        running = start(tmp_path_factory.mktemp("install"), "install.py")
        result = running.result(timeout_s=240)
    except Unavailable as reason:
        pytest.skip(str(reason))
    print(result.log, result.seconds)
    assert not running.group.exists()
    assert str(running.folder) not in Path("/proc/self/mountinfo").read_text()
    assert result.rc == 0, result.log
    found: dict[str, Any] = result.json("install.json")
    return found


def test_nothing_is_written_without_a_yes(seen: dict[str, Any]) -> None:
    rc, said = seen["no"]
    assert rc == 5
    assert "+++ /etc/systemd/system/zenlaunch-i1.service" in said
    assert "nothing was written" in said
    assert seen["untouched"]


def test_other_peoples_units_stay(seen: dict[str, Any]) -> None:
    rc, said = seen["foreign"]
    assert rc == 5
    assert "zenlaunch-proxy.socket is there and was not made by zenlaunch" in said


def test_installed_and_not_started(seen: dict[str, Any]) -> None:
    assert seen["install"][0] == 0
    assert "systemctl enable --now zenlaunch.target" in seen["install"][1]
    assert seen["before"]["status"][0] == 0
    assert "stopped" in seen["before"]["status"][1]
    assert seen["before"]["verify"][0] == 6
    assert "i0  it is stopped" in seen["before"]["verify"][1]
    assert seen["before"]["logs i0"][0] == 0
    assert seen["before"]["down"] == [0, "zenlaunch is down\n"]


def test_without_rights(seen: dict[str, Any]) -> None:
    """Who may only look is told so, not that something is wrong with the instances."""
    assert seen["nobody"]["status"][0] == 0
    for word, said in [
        ("verify", "this user may not look into the processes of i0"),
        ("restart i0", "systemd did not restart i0"),
        ("down", "systemctl stop ended with"),
    ]:
        rc, text = seen["nobody"][word]
        assert rc == 6
        assert said in text
        assert f"it needs root: sudo zenlaunch {word}" in text


def test_all_restarted_under_load(seen: dict[str, Any]) -> None:
    """In turn, and the proxy too: no request is refused, no stream cut, none waits for long."""
    roll = seen["roll"]
    assert roll["said"] == [
        [0, "restarted: i0\nrestarted: i1\n"],
        [0, "restarted: proxy\n"],
    ]
    assert roll["anew"] == [True, True, True]
    assert roll["load"]["streams"] == ["data: [DONE]"] * 4
    assert roll["load"]["failed"] == []
    assert roll["load"]["longest_s"] < 1.0
    assert seen["logged"] > 4


def test_a_plan_with_fewer_instances(seen: dict[str, Any]) -> None:
    """The instance that goes is stopped; the others are not touched, and that is said."""
    rc, said = seen["diff"]
    assert rc == 5
    assert "--- /etc/systemd/system/zenlaunch-i1.service\n+++ /dev/null" in said
    rc, said = seen["fewer"]
    assert rc == 0, said
    assert "stopping zenlaunch-i1.service" in said
    assert "what runs goes on as it was" in said
    assert seen["gone"] == ["inactive", False]
    assert seen["same"]
    assert [row["name"] for row in seen["status"]["instances"]] == ["i0"]
    assert seen["again"] == [0, "what is installed is the same\n"]


def test_a_damaged_plan_file(seen: dict[str, Any]) -> None:
    rc, said = seen["damaged"]
    assert rc == 2
    assert "/etc/zenlaunch/plan.json is no plan file" in said
