"""The rendered units: the shipped examples, what each promises, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from render.examples import EXAMPLES, ROOT, composed, render
from zenlaunch.errors import RenderError
from zenlaunch.guard import read_plan_file
from zenlaunch.render import RENDERERS, RenderedFile, RenderOptions, plan_digest


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> tuple[str, tuple[RenderedFile, ...]]:
    return request.param, render(request.param)


def of(files: tuple[RenderedFile, ...], name: str) -> str:
    return next(f.text for f in files if f.path.endswith(f"/{name}"))


def keys(text: str) -> dict[str, list[str]]:
    """Return the directives of a unit, comments left out."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_shipped_units_are_what_render_gives(
    example: tuple[str, tuple[RenderedFile, ...]],
) -> None:
    name, files = example
    folder = ROOT / "systemd" / name
    shipped = {f"/{p.relative_to(folder)}": p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert shipped == {f.path: f.text for f in files}, "run: python tests/render/examples.py"


def test_every_file_says_what_made_it(example: tuple[str, tuple[RenderedFile, ...]]) -> None:
    name, files = example
    digest = plan_digest(composed(name).plan)
    for file in files:
        if file.path.endswith(".json"):
            data = json.loads(file.text)
            assert data["plan_digest"] == digest
            assert data["remake"] == f"zenlaunch render systemd -f configs/{name}.yaml"
            assert data["plan"]["topology_digest"]
            continue
        assert file.text.startswith("# Made by zenlaunch ")
        assert digest in file.text
        assert f"zenlaunch render systemd -f configs/{name}.yaml" in file.text


def test_instances_are_bound_and_guarded(example: tuple[str, tuple[RenderedFile, ...]]) -> None:
    name, files = example
    for instance in composed(name).plan.instances:
        unit = keys(of(files, f"zenlaunch-{instance.name}.service"))
        assert unit["AllowedCPUs"] == [str(instance.cpus)]
        assert unit["AllowedMemoryNodes"] == [str(instance.mem_nodes)]
        assert unit["NUMAPolicy"] == ["bind"]
        assert unit["NUMAMask"] == [str(instance.mem_nodes)]
        assert "CPUAffinity" not in unit
        assert "numactl" not in unit["ExecStart"][0]
        assert (
            f"guard check --plan /etc/zenlaunch/plan.json --instance {instance.name}"
            in (unit["ExecStartPre"][0])
        )
        assert unit["Restart"] == ["always"]
        assert unit["KillMode"] == ["mixed"]
        assert int(unit["TimeoutStopSec"][0]) > 120
        assert "/srv/models" in unit["RequiresMountsFor"][0]
        assert "Requires" not in unit
        assert "BindsTo" not in unit


@pytest.mark.parametrize("version", [252, 254])
def test_start_limit_can_trip(version: int) -> None:
    for file in render("epyc-9755-2s", systemd_version=version):
        if not re.search(r"-i\d\.service$", file.path):
            continue
        unit = keys(file.text)
        pause = unit.get("RestartMaxDelaySec") or unit["RestartSec"]
        longest = int(unit["TimeoutStartSec"][0]) + int(pause[0])
        assert int(unit["StartLimitIntervalSec"][0]) > int(unit["StartLimitBurst"][0]) * longest
        assert ("RestartSteps" in unit) == (version >= 254)


def test_secrets_stay_out_of_what_all_can_read() -> None:
    made = composed("small-server")
    spec = replace(made.specs[0], env={**made.specs[0].env, "HF_TOKEN": "s3cret"})
    files = RENDERERS["systemd"](
        made.plan, (spec,), made.config, RenderOptions(topology=made.topology)
    )
    holders = [f for f in files if "s3cret" in f.text]
    assert [(f.path, f.mode) for f in holders] == [("/etc/zenlaunch/i0.env", 0o600)]


def test_options_change_names_and_paths() -> None:
    files = render("small-server", name="llama", user="serving", program=("/opt/z/bin/zenlaunch",))
    assert all("zenlaunch" not in f.path for f in files)
    unit = keys(of(files, "llama-i0.service"))
    assert unit["User"] == ["serving"]
    assert unit["PartOf"] == ["llama.target"]
    assert unit["ExecStartPre"][0].startswith("/opt/z/bin/zenlaunch guard check --plan /etc/llama/")
    with pytest.raises(RenderError, match="cannot be used in unit"):
        RenderOptions(name="../x")
    with pytest.raises(RenderError, match="what the commands call the deployment `zenlaunch`"):
        RenderOptions(name="default")


def test_numactl_on_request() -> None:
    unit = keys(of(render("epyc-9755-2s", with_numactl=True), "zenlaunch-i0.service"))
    assert unit["ExecStart"][0].startswith("/usr/bin/numactl --physcpubind=0,2,4,")
    assert " --membind=0 /opt/vllm/bin/vllm serve " in unit["ExecStart"][0]


@pytest.mark.parametrize(
    ("host", "listens"),
    [("localhost", "127.0.0.1:8000"), ("::1", "[::1]:8000"), ("0.0.0.0", "0.0.0.0:8000")],
)
def test_socket_address(host: str, listens: str) -> None:
    made = composed("small-server")
    plan = replace(made.plan, proxy=replace(made.plan.proxy, host=host))
    files = RENDERERS["systemd"](plan, made.specs, made.config, RenderOptions())
    assert keys(of(files, "zenlaunch-proxy.socket"))["ListenStream"] == [listens]
    local = "IPAddressDeny" in keys(of(files, "zenlaunch-proxy.service"))
    assert local == (host != "0.0.0.0")


def test_socket_refuses_a_name() -> None:
    made = composed("small-server")
    plan = replace(made.plan, proxy=replace(made.plan.proxy, host="serving.example"))
    with pytest.raises(RenderError, match="needs an address"):
        RENDERERS["systemd"](plan, made.specs, made.config, RenderOptions())


def test_guard_reads_what_render_wrote(tmp_path: Path) -> None:
    made = composed("epyc-9755-2s")
    path = tmp_path / "plan.json"
    path.write_text(of(render("epyc-9755-2s"), "plan.json"))
    guarded = read_plan_file(path, "i2")
    assert guarded.instance == made.plan.instances[2]
    assert guarded.machine is not None
    assert guarded.machine.digest == made.plan.topology_digest
    assert guarded.launch.port == made.specs[2].port


def test_exposure(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine; the lab shows the same figures")
    for name, limit in (("zenlaunch-i0.service", 4.5), ("zenlaunch-proxy.service", 3.0)):
        path = tmp_path / name
        path.write_text(of(render("epyc-9755-2s"), name))
        said = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        figure = re.search(r"exposure level for \S+: (\d+\.\d+)", said)
        assert figure is not None
        assert float(figure[1]) <= limit


def test_homes_are_read_where_a_program_really_lies() -> None:
    """/opt/vllm may be a link, its Python may be of pyenv or uv: hidden, it would not start."""
    for places, expected in (
        ({}, "yes"),
        ({"/opt/vllm/bin/vllm": ("/usr/bin/python3",)}, "yes"),
        ({"/opt/vllm/bin/vllm": ("/usr/bin/x", "/home/me/.local/python")}, "read-only"),
        ({"/srv/models/Llama-3.2-1B-Instruct": ("/home/me/models",)}, "read-only"),
    ):
        files = render("small-server", places=places)
        assert keys(of(files, "zenlaunch-i0.service"))["ProtectHome"] == [expected]
        assert keys(of(files, "zenlaunch-proxy.service"))["ProtectHome"] == ["yes"]
    own = {"/usr/local/bin/zenlaunch": ("/root/z/bin/python",)}
    files = render("small-server", places=own)
    assert keys(of(files, "zenlaunch-proxy.service"))["ProtectHome"] == ["read-only"]


def test_files_of_the_proxy() -> None:
    """Its keys are read where homes are hidden, its log is written where all is read-only."""
    made = composed("small-server")

    def unit(**fields: str) -> dict[str, list[str]]:
        config = replace(made.config, proxy=replace(made.config.proxy, **fields))
        files = RENDERERS["systemd"](made.plan, made.specs, config, RenderOptions())
        return keys(of(files, "zenlaunch-proxy.service"))

    assert unit(api_keys_file="/etc/keys")["ProtectHome"] == ["yes"]
    assert unit(api_keys_file="/home/me/keys")["ProtectHome"] == ["read-only"]
    assert unit(admin_keys_file="/root/keys")["ProtectHome"] == ["read-only"]
    assert unit(access_log="-")["ReadWritePaths"] == ["/run/zenlaunch"]
    assert unit(access_log="/var/log/zenlaunch/access")["LogsDirectory"] == ["zenlaunch"]
    own = unit(access_log="/srv/my logs/access")["ReadWritePaths"]
    assert own == ["/run/zenlaunch", '"/srv/my logs"']
    for fields in ({"api_keys_file": "keys"}, {"access_log": "log/access"}):
        with pytest.raises(RenderError, match=f"proxy.{next(iter(fields))}: the unit runs in ano"):
            unit(**fields)
