"""The example configs rendered for the machines that they were written for.

`python tests/render/examples.py` (from the checkout) writes `systemd/` anew.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from machines.build import build  # noqa: E402 - the tests' own packages are found by now

from zenlaunch.compose import Composed, compose  # noqa: E402
from zenlaunch.config import load, validated  # noqa: E402
from zenlaunch.probe.sysfs import read_sysfs  # noqa: E402
from zenlaunch.render import RENDERERS, RenderedFile, RenderOptions  # noqa: E402

EXAMPLES = ("epyc-9755-2s", "small-server")  # configs/NAME.yaml, tests/machines/NAME.yaml


@functools.cache
def composed(name: str) -> Composed:
    """Return the plan of one example on its machine."""
    path = ROOT / "configs" / f"{name}.yaml"
    config = validated(load(path.read_text(), source=path.name), source=path.name)
    with tempfile.TemporaryDirectory() as folder:
        topology = read_sysfs(build(name, Path(folder)), live=False)
    return compose(config, topology, here=False)


def render(example: str, **options: object) -> tuple[RenderedFile, ...]:
    """Return the units of one example."""
    made = composed(example)
    remake = ("zenlaunch", "render", "systemd", "-f", f"configs/{example}.yaml")
    fields = {"remake": remake, "topology": made.topology, "model_folder": made.config.model}
    return RENDERERS["systemd"](
        made.plan,
        made.specs,
        made.config,
        RenderOptions(**(fields | options)),  # type: ignore[arg-type]
    )


def main() -> None:
    for name in EXAMPLES:
        for file in render(name):
            path = ROOT / "systemd" / name / file.path.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)


if __name__ == "__main__":
    main()
