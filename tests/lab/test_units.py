"""The units of `render systemd` under a real systemd 252, on a machine with real nodes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from lab.image import Image, Unavailable
from lab.namespace import Running, start
from lab.test_plan_is_kernel import check_instance
from lab.vm import Result, boot

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def slow_death(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running | Unavailable]:
    """An engine that dies a minute after each start; its waiting passes beside the guest."""
    try:
        running = start(tmp_path_factory.mktemp("limit"), "limit.py")
    except Unavailable as reason:
        yield reason
        return
    yield running
    running.end()


@pytest.fixture(scope="module")
def guest(
    image: Image, tmp_path_factory: pytest.TempPathFactory, slow_death: Running | Unavailable
) -> Result:
    folder = tmp_path_factory.mktemp("units")
    result = boot(image, folder, "units.py", systemd=True, timeout_s=1500)
    print(result.log, result.seconds)
    assert result.rc == 0, result.log
    return result


def test_systemd_changes_no_word(guest: Result) -> None:
    seen = guest.json("quoting.json")
    assert seen["arguments"] == seen["words"]
    assert seen["values"] == seen["words"]


def test_install(guest: Result) -> None:
    seen = guest.json("install.json")
    assert seen["diff_before"] == 5
    assert seen["diff_after"] == [0, "what is installed is the same\n"]
    assert seen["verify"] == [0, ""]
    assert seen["env_mode"] == "0o600"
    figures = {
        unit: float(m[1]) for unit, line in seen["exposure"].items()
        if (m := re.search(r": (\d+\.\d+) ", line))
    }  # fmt: skip
    assert figures["zenlaunch-proxy.service"] <= 3.0
    assert figures["zenlaunch-i0.service"] <= 4.5


def test_start(guest: Result) -> None:
    seen = guest.json("start.json")
    assert set(seen["states"].values()) == {"active"}, seen
    for instance in seen["plan"]["instances"]:
        processes = seen["kernel"][str(instance["port"])]
        check_instance(instance, processes)
        for process in processes:
            assert process["mems"] == instance["mem_nodes"]
            assert process["policies"] == [f"bind:{instance['mem_nodes']}"]
    assert {name for _, name in seen["answers"]} == {"i0", "i1", "i2", "i3"}
    assert seen["proxy_cpus"] == seen["plan"]["proxy"]["cpus"]
    assert seen["journal"].count("like vLLM: all allowed") == 4


def test_kill_one(guest: Result) -> None:
    seen = guest.json("kill.json")
    assert {status for status, _ in seen["during"]} == {200}
    assert {name for _, name in seen["during"]} == {"i0", "i2", "i3"}
    hurt = "zenlaunch-i1.service"
    assert seen["after"].pop(hurt) != seen["before"].pop(hurt)
    assert seen["after"] == seen["before"]
    assert seen["restarts"].pop(hurt) == "1"
    assert set(seen["restarts"].values()) == {"0"}


def check_failed(statuses: list[int]) -> None:
    """Nothing was refused; one connection that was accepted and silent may have been closed.

    That takes a client that is slower than 0.1 s with its request, which happens under emulation.
    """
    assert statuses in ([], [0])


def test_proxy_reload_under_load(guest: Result) -> None:
    """A new proxy takes over: nobody waits for the old one's streams, which end whole."""
    seen = guest.json("reload.json")
    assert seen["load"]["streams"] == ["data: [DONE]"] * 2
    check_failed(seen["load"]["failed"])
    # Under emulation; on the machine itself tests/test_handover.py asks for less than a second.
    assert seen["load"]["longest_s"] < 5.0
    assert seen["unit"]["ActiveState"] == "active"
    assert seen["unit"]["NRestarts"] == "0"
    assert int(seen["unit"]["MainPID"]) != seen["before"]
    assert seen["now"][0] == 200


def test_proxy_restart_under_load(guest: Result) -> None:
    seen = guest.json("proxy.json")
    assert seen["rc"][0] == 0, seen
    assert seen["load"]["streams"] == ["data: [DONE]"] * 2
    check_failed(seen["load"]["failed"])


def test_commands(guest: Result) -> None:
    seen = guest.json("commands.json")
    status = seen["status"]
    assert status["state"] == "ready"
    assert [row["state"] for row in status["instances"]] == ["ready"] * 4
    assert [row["restarts"] for row in status["instances"]] == [0, 1, 0, 0]
    assert status["proxy"]["state"] == "ready"
    # Each unit is a cgroup of its own, whose pages the kernel adds up by node.
    assert all(row["remote_page_ratio"] <= 0.01 for row in status["instances"]), status
    assert [row["threads_off_plan"] for row in status["instances"]] == [0] * 4
    assert "4 of 4 ready" in seen["table"]
    assert seen["verify_rc"] == 0, seen["verify"]
    assert all(one["local_ratio"] >= 0.99 for one in seen["verify"].values())
    assert "like vLLM: all allowed" in seen["logs"]
    assert seen["restart"] == "restarted: i3\n"
    assert seen["new_process"]
    assert seen["unknown"][0] == 6


def test_rolling_restart(guest: Result) -> None:
    """One at a time, each drained and ready before the next; it stops at one that does not return.

    That all come back, in turn, is shown by test_install without emulation.
    """
    seen = guest.json("rolling.json")
    rc, said = seen["said"]
    assert rc == 6
    assert said.startswith("restarted: i0\nrestarted: i1\n")
    assert "i2 did not become ready again" in said
    units = [f"zenlaunch-i{k}.service" for k in range(4)]
    assert seen["away"] == [[unit] for unit in units[:3]]
    before, after = seen["before"], seen["after"]
    assert after[units[0]] not in (before[units[0]], 0)
    assert after[units[1]] not in (before[units[1]], 0)
    assert after[units[3]] == before[units[3]]
    assert seen["load"]["streams"] == ["data: [DONE]"] * 4
    check_failed(seen["load"]["failed"])
    assert seen["mended"] == [0, "restarted: i2\n"]


def test_changed_cpuset_loses_pins(guest: Result) -> None:
    """The hazard that the README names: `verify` notices it, a restart mends it."""
    seen = guest.json("cpuset.json")
    pins = [
        sorted(set(processes[1]["threads"].values()))
        for processes in (seen["before"], seen["after"], seen["mended"])
    ]
    assert pins[0] == pins[2]
    assert pins[1] != pins[0]
    rc, said = seen["verify"]
    assert rc == 6
    found = json.loads(said)
    assert [name for name, one in found.items() if not one["ok"]] == ["i2"]
    assert found["i2"]["problems"]


def test_stop_leaves_nothing(guest: Result) -> None:
    seen = guest.json("stop.json")
    assert seen["left"] == ""
    assert set(seen["states"].values()) == {"inactive"}


def test_first_instance_fills_a_cold_cache(guest: Result) -> None:
    seen = guest.json("cache.json")
    assert seen["cold"]["i1"] == "activating"
    assert seen["warm"]["i1"] in ("activating", "active")
    waiting = "the compile cache is cold: waiting for zenlaunch-i0.service"
    assert waiting in seen["cold"]["journal"]
    assert waiting not in seen["warm"]["journal"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another machine", "not the planned machine: model: planned for another CPU"),
        ("no such CPU", "unbound: Cpus_allowed_list is 0-7"),
        ("no such node", "status=242/NUMA_POLICY"),
        ("wrong CPUs", "unbound: Cpus_allowed_list is 7"),
        ("port taken", "port 8001"),
    ],
)
def test_refuses(guest: Result, name: str, said: str) -> None:
    seen = guest.json("refusals.json")[name]
    assert seen["rc"] != 0
    assert seen["ActiveState"] == "failed"
    assert said in seen["journal"]
    assert seen["running"] == []


def test_refuses_to_start_over_leftovers(guest: Result) -> None:
    seen = guest.json("leftovers.json")
    assert seen["rc"] != 0
    said = f"pid {seen['worker']} is left of an earlier run in zenlaunch-i0.service"
    assert said in seen["journal"]
    assert seen["alive"] == [seen["worker"]]  # nothing was started beside it
    assert seen["then"] == 0


def test_install_refuses_another_machine(guest: Result) -> None:
    seen = guest.json("refusals.json")["install"]
    assert seen["rc"] == 5
    assert "not the machine of the plan" in seen["said"]
    assert seen["untouched"]


def test_start_limit(guest: Result) -> None:
    seen = guest.json("limit.json")
    assert seen["unit"]["ActiveState"] == "failed"
    assert seen["again"] != 0
    assert seen["usable"] == ["i1"]
    assert [status for status, _ in seen["answers"]] == [200] * 4


def test_start_limit_trips_for_an_engine_that_dies_after_a_minute(
    slow_death: Running | Unavailable,
) -> None:
    """In full: five starts of 60 s, with the unit's own pauses between them."""
    try:
        if isinstance(slow_death, Unavailable):
            raise slow_death
        result = slow_death.result(timeout_s=700)
    except Unavailable as reason:
        pytest.skip(str(reason))
    print(result.log, result.seconds)
    assert result.rc == 0, result.log
    seen = result.json("limit.json")
    starts = [
        float(line.split()[0]) for line in seen["journal"].splitlines()
        if line.endswith("Application startup complete.")
    ]  # fmt: skip
    assert len(starts) == 5
    assert all(75 <= b - a < 90 for a, b in itertools.pairwise(starts)), starts
    assert seen["unit"] == {"ActiveState": "failed", "Result": "exit-code"}
    assert "Start request repeated too quickly" in seen["journal"]
    assert seen["again"][0] != 0
    # What is left goes on, and status says which is gone.
    assert set(seen["others"].values()) == {"active"}
    assert [row["state"] for row in seen["status"]["instances"]] == ["failed", "ready"]
    assert seen["status"]["state"] == "degraded"
    assert seen["answers"] == [[200, "i1"]] * 4
    # By hand it starts again.
    assert seen["mended"] == [0, "restarted: i0\n"]
    assert {name for _, name in seen["after"]} == {"i0", "i1"}


def test_reboot(guest: Result) -> None:
    seen = guest.json("reboot.json")
    assert set(seen["states"].values()) == {"active"}
    assert {name for _, name in seen["answers"]} == {"i0", "i1", "i2", "i3"}
    assert len(seen["kernel"]) == 4


def test_down(guest: Result) -> None:
    seen = guest.json("down.json")
    assert seen["down"] == [0, "zenlaunch is down\n"]
    assert set(seen["states"].values()) == {"inactive"}
    assert seen["left"] == {}
