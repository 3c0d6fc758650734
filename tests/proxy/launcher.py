"""Start the proxy as a process of its own: launcher.py OPTIONS.json, re-read on SIGHUP."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

from zenlaunch.config import HalfClose, Policy
from zenlaunch.errors import ZenlaunchError
from zenlaunch.proxy.options import ProxyOptions
from zenlaunch.proxy.server import run

PATHS = {f.name for f in dataclasses.fields(ProxyOptions) if "Path" in str(f.type)}


def options_of(given: dict[str, object]) -> ProxyOptions:
    values: dict[str, object] = {}
    for name, value in given.items():
        if name in PATHS and value is not None:
            value = Path(str(value))
        elif name == "policy":
            value = Policy(str(value))
        elif name == "half_close":
            value = HalfClose(str(value))
        elif name == "upstreams":
            value = tuple((str(n), str(u)) for n, u in value)  # type: ignore[attr-defined]
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    return ProxyOptions(**values)  # type: ignore[arg-type]


def main() -> int:
    source = Path(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    try:
        return run(
            options_of(json.loads(source.read_text())),
            reload=lambda: options_of(json.loads(source.read_text())),
        )
    except ZenlaunchError as error:
        print(f"error: {error.message}\n  {error.hint}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
