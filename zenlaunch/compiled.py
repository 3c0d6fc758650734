"""Which compile caches are warm: a stamp per key, with the artifacts that a ready instance left.

Owns the stamp files. A cache is warm only while every artifact that was seen in the log still
exists; anything doubtful is cold, which costs one start alone and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path


def stamp_path(folder: Path, key: str) -> Path:
    """Return the stamp of a key; a key that is no file name is hashed."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum() and len(key) <= 100
    return folder / f"{key if plain else hashlib.sha256(key.encode()).hexdigest()}.json"


def is_warm(folder: Path, key: str) -> bool:
    """Say whether an earlier run with this key left artifacts that are all still there."""
    try:
        artifacts = json.loads(stamp_path(folder, key).read_text())["artifacts"]
        return bool(artifacts) and all(Path(a).exists() for a in artifacts)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def remember(folder: Path, key: str, artifacts: tuple[str, ...]) -> None:
    """Write the stamp; a folder that cannot be written leaves the cache cold next time."""
    if not artifacts:
        return
    path = stamp_path(folder, key)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps({"key": key, "artifacts": sorted(set(artifacts))}, indent=1))
        fresh.replace(path)


def artifact_in(line: str, marker: str) -> str | None:
    """Return the path that follows a marker in a log line, or None."""
    after = line.partition(marker)[2].strip().strip("'\"")
    path = after.split()[0].rstrip(",.;'\"") if after else ""
    return path if path.startswith("/") else None
