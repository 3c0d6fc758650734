"""What systemd's words become in `status`. The commands themselves run in the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from render.examples import EXAMPLES, ROOT, composed
from zenlaunch.errors import ConfigError, LaunchError
from zenlaunch.units import Units, _member, _overall, find, log_command, spec_of


@pytest.fixture
def deployment() -> Units:
    found = find("default", ROOT / "systemd" / EXAMPLES[0])
    assert found is not None
    return found


def test_finds_what_is_installed(deployment: Units, tmp_path: Path) -> None:
    assert [i.instance.name for i in deployment.instances] == ["i0", "i1", "i2", "i3"]
    assert deployment.unit("i2") == "zenlaunch-i2.service"
    assert find("default", tmp_path) is None
    assert find("other", ROOT / "systemd" / EXAMPLES[0]) is None
    with pytest.raises(LaunchError, match="no member 'i9'"):
        deployment.unit("i9")


def test_a_damaged_plan_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc/zenlaunch").mkdir(parents=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/zenlaunch.target").touch()
    for text in ("", "{", "[]", '{"schema": 1}'):
        (tmp_path / "etc/zenlaunch/plan.json").write_text(text)
        with pytest.raises(ConfigError, match=r"plan\.json is no plan file"):
            find("default", tmp_path)


def test_the_spec_for_verify_is_that_of_the_plan(deployment: Units) -> None:
    for one, spec in zip(deployment.instances, composed(EXAMPLES[0]).specs, strict=True):
        again = spec_of(one)
        assert again.cpus == spec.cpus
        assert again.engine_cpus == spec.engine_cpus
        assert again.mem_nodes == spec.mem_nodes
        assert again.evidence == spec.evidence
        assert one.launch.health == spec.health


def test_logs(deployment: Units) -> None:
    words = log_command(deployment, "proxy", lines=7, follow=True)
    assert words[0] == "journalctl"
    assert words[-4:] == ["7", "-f", "-u", "zenlaunch-proxy.service"]


@pytest.mark.parametrize(
    ("active", "sub", "state"),
    [
        ("active", "running", "ready"),
        ("activating", "start-pre", "starting"),
        ("activating", "start-post", "starting"),
        ("activating", "auto-restart", "backoff"),
        ("deactivating", "stop", "draining"),
        ("deactivating", "stop-sigterm", "stopping"),
        ("reloading", "reload", "ready"),
        ("failed", "failed", "failed"),
        ("inactive", "dead", "stopped"),
    ],
)
def test_states(active: str, sub: str, state: str) -> None:
    values = {
        "ActiveState": active,
        "SubState": sub,
        "MainPID": "0",
        "NRestarts": "2",
        "StateChangeTimestampMonotonic": "0",
        "ActiveEnterTimestampMonotonic": "9000000",
        "ExecMainStartTimestampMonotonic": "4000000",
    }
    row = _member("i0", 8001, values)
    assert row["state"] == state
    assert row["restarts"] == 2
    assert row["ready_seconds"] == 5.0
    assert row["pid"] is None


@pytest.mark.parametrize(
    ("states", "word"),
    [
        ({"ready"}, "ready"),
        ({"stopped"}, "stopped"),
        ({"ready", "starting"}, "starting"),
        ({"ready", "failed"}, "degraded"),
        ({"ready", "backoff"}, "degraded"),
        ({"ready", "draining"}, "stopping"),
    ],
)
def test_overall(states: set[str], word: str) -> None:
    assert _overall(states) == word
