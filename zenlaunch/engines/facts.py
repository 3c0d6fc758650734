"""EngineFacts: what is known of the machine that an engine will run on. Made by `probe.host`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zenlaunch.topology import Note


class VersionSource(StrEnum):
    """Where the engine's version comes from."""

    INSTALLED = "installed"
    NAMED = "named"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine's environment and the CPU, as far as they are known.

    `here`: the plan is for this machine. `version` is None when nothing is installed and none was
    named. `command` is the path of the `vllm` program, None where only the module form works.
    `tcmalloc` and `openmp` are paths that exist. `hide_zentorch` is a folder that, first on
    PYTHONPATH, makes `import zentorch` fail. `avx512`/`amd` are None where the CPU is not known.
    """

    here: bool = False
    version: str | None = None
    version_source: VersionSource = VersionSource.ASSUMED
    python: str | None = None
    command: str | None = None
    torch_version: str | None = None
    torch_cuda: bool = False
    zentorch_version: str | None = None
    torchvision_version: str | None = None
    tcmalloc: str | None = None
    openmp: str | None = None
    hide_zentorch: str | None = None
    amd: bool | None = None
    avx512: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What was decided once for all instances: the plan's engine label, and notes for people."""

    label: str
    title: str
    version: str | None = None
    zentorch: bool = False
    freezing: bool = False
    notes: tuple[Note, ...] = ()
