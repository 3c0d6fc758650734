"""What every renderer takes and gives, beside the plan: options in, text files out.

Owns the two values and the header that each file carries. Writes nothing: the command line does.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from zenlaunch import __version__
from zenlaunch.blot import is_secret
from zenlaunch.config import Config
from zenlaunch.errors import RenderError
from zenlaunch.plan import Plan
from zenlaunch.topology import Topology

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    """A text file: where it is to be (absolute), what is in it, its permissions."""

    path: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """What the files need to know beside the plan.

    `name` begins the name of every unit and folder; `program` is how zenlaunch is started there;
    `remake` is the command that makes the files again. `topology` is the machine of the plan, which
    the guard compares with the one it runs on. `model_folder` is the folder that holds the model,
    None for a name of the hub. `places` says where else than at its path a program (or the model
    folder) is read, where that is known.
    """

    name: str = "zenlaunch"
    program: tuple[str, ...] = ("/usr/local/bin/zenlaunch",)
    remake: tuple[str, ...] = ("zenlaunch", "render", "systemd")
    topology: Topology | None = None
    model_folder: str | None = None
    user: str = "zenlaunch"
    systemd_version: int = 252
    with_numactl: bool = False
    numactl: str = "/usr/bin/numactl"
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "default":
            raise RenderError(
                "`default` is what the commands call the deployment `zenlaunch`",
                hint="leave --name out, or choose another",
            )
        for key, value in (("name", self.name), ("user", self.user)):
            if _NAME.fullmatch(value) is None:
                raise RenderError(
                    f"the {key} {value!r} cannot be used in unit and file names",
                    hint="use small letters, digits and dashes, a letter first",
                )


def plan_digest(plan: Plan) -> str:
    """Return "sha256:..." of what a plan decides; its notes are talk and do not count."""
    decided = plan.to_dict() | {"notes": []}
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def secret_names(config: Config) -> tuple[str, ...]:
    """Return the variables and the engine's options of a config whose values are secrets."""
    options = (arg.partition("=")[0] for arg in config.engine.args if arg.startswith("-"))
    return tuple(name for name in (*config.engine.env, *options) if is_secret(name))


def header(plan: Plan, options: RenderOptions, *own: str) -> str:
    """Return the comment that opens a file: what made it, from what, and how to make it again."""
    lines = [
        f"Made by zenlaunch {__version__} from plan {plan_digest(plan)}",
        f"of a machine with topology {plan.topology_digest}",
        f"Make it again: {shlex.join(options.remake)}",
        *own,
    ]
    for line in lines:
        if not line.isprintable():
            raise RenderError(f"{line!r} cannot be written in a comment")
    return "".join(f"# {line}\n" for line in lines)
