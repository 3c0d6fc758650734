"""Rendered files against what is on disk: what would change, shown, then written.

Owns the comparison, the diff and the writing (each file whole or not at all, with its permissions
from its first moment). Units of an earlier plan that the new one does not have are part of the
comparison, so that fewer instances leave nothing behind. Does not decide whether to write.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zenlaunch.errors import RenderError
from zenlaunch.render import RenderedFile

MADE_BY = "# Made by zenlaunch "
SECRETS = "secrets.env"  # the administrator's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file that differs: `old` None where there is none yet, `new` None where it goes."""

    path: Path
    old: str | None
    new: str | None
    mode: int

    @property
    def foreign(self) -> bool:
        """Say whether what is there now was made by somebody else."""
        head = (self.old or "")[:400]
        return self.old is not None and MADE_BY not in head and '"zenlaunch": ' not in head

    @property
    def secret(self) -> bool:
        return self.mode & 0o077 == 0


def changes(files: Sequence[RenderedFile], root: Path, *, name: str) -> list[Change]:
    """Return what differs below `root`, files that are to go included.

    Raises RenderError for a file that is there and cannot be read.
    """
    found = []
    wanted = {root / f.path.lstrip("/"): f for f in files}
    for path, file in wanted.items():
        old = _read(path)
        mode = None if old is None else path.stat().st_mode & 0o777
        if old != file.text or mode != file.mode:
            found.append(Change(path=path, old=old, new=file.text, mode=file.mode))
    for path in sorted(_ours(root, name)):
        if path not in wanted:
            mode = path.stat().st_mode & 0o777
            found.append(Change(path=path, old=_read(path), new=None, mode=mode))
    return found


def _ours(root: Path, name: str) -> Iterator[Path]:
    # In full: a deployment `llama` has nothing to do with `llama-instruct-i0.service`.
    for folder, pattern in (
        ("etc/systemd/system", rf"{re.escape(name)}-i\d+\.service"),
        (f"etc/{name}", r"i\d+\.env"),
    ):
        for path in (root / folder).glob("*"):
            if not re.fullmatch(pattern, path.name) or not path.is_file():
                continue
            if (_read(path) or "").startswith(MADE_BY):
                yield path


def diff_text(found: Iterable[Change]) -> str:
    """Return a unified diff; what only its owner may read is named and not shown."""
    parts = []
    for change in found:
        if change.secret and change.old is not None:
            parts.append(f"--- {change.path}: differs, not shown (it may hold secrets)\n")
            continue
        if change.secret:
            parts.append(f"--- {change.path}: new, mode {change.mode:04o}, not shown\n")
            continue
        if change.old == change.new:
            parts.append(f"--- {change.path}: mode becomes {change.mode:04o}\n")
            continue
        parts += difflib.unified_diff(
            (change.old or "").splitlines(keepends=True),
            (change.new or "").splitlines(keepends=True),
            fromfile="/dev/null" if change.old is None else str(change.path),
            tofile="/dev/null" if change.new is None else str(change.path),
            n=1,
        )
    return "".join(parts)


def refuse_foreign(found: Iterable[Change]) -> None:
    """Raise RenderError when a file that zenlaunch did not make would be overwritten."""
    for change in found:
        if change.foreign:
            raise RenderError(
                f"{change.path} is there and was not made by zenlaunch, so nothing was written",
                hint="move it away, or name another place",
            )


def refuse_foreign_folder(root: Path, name: str) -> None:
    """Raise RenderError when the deployment's folder is somebody else's, such as /etc/default."""
    folder = root / "etc" / name
    if not folder.is_dir() or (folder / "plan.json").exists():
        return
    for path in sorted(folder.iterdir()):
        if path.name != SECRETS and not (_read(path) or "").startswith(MADE_BY):
            raise RenderError(
                f"{folder} is there and was not made by zenlaunch (it has {path.name}), so nothing "
                "was written",
                hint="choose another --name",
            )


def refuse_without_systemd(root: Path) -> None:
    """Raise RenderError unless systemd runs this machine, as sd_booted(3) asks."""
    if not (root / "run/systemd/system").is_dir():
        raise RenderError(
            "this machine is not run by systemd, so nothing was written",
            hint="--output DIR writes the units to a folder",
        )


def install_files(found: Iterable[Change], *, say: Callable[[str], None]) -> None:
    """Write and remove; raises RenderError that names the first file that failed."""
    for change in found:
        try:
            if change.new is None:
                change.path.unlink()
                say(f"removed {change.path}")
                continue
            change.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = change.path.with_name(f".{change.path.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, change.mode)
            with os.fdopen(fd, "w") as out:
                os.fchmod(fd, change.mode)
                out.write(change.new)
                out.flush()
                os.fsync(fd)
            fresh.replace(change.path)
            say(f"wrote {change.path}")
        except OSError as e:
            hint = "are you root? Or use --output" if isinstance(e, PermissionError) else None
            raise RenderError(f"cannot write {change.path}: {e.strerror}", hint=hint) from None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
        raise RenderError(f"cannot read {path}: {reason}", hint="are you root?") from None
