"""Seeded damage to a tree of files or to a text: what a bad disk, an editor or a person does."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

# Values that parsers trip over.
JUNK = (
    "", "\n", " ", "-1\n", "(null)\n", "0-\n", "-\n", ",\n", "0,,1\n", "3-0\n", "0-4000000000\n",
    "99999999999999999999999\n", "9" * 5000 + "\n", "0-65535\n", "65536\n", "ffffffff\n", "0x\n",
    "0000000g\n", "0-63:2/0\n", "0-30:2/4\n", "nan\n", "1e9\n", "yes\n", "\0\0\0\0", "\0\n", "é√\n",
    "0\n1\n", "10 20\n", "Node 0 MemTotal: -1 kB\n", "Node 0 MemTotal: 99999999999999999999 kB\n",
    "processor : -1\n\nprocessor : 99999\n", "0::/../../..\n", "4:cpuset:/a/b/c\n", "{}", "[[[[",
    "x" * 70_000,
)  # fmt: skip


def damage_text(rng: random.Random, text: str) -> str:
    """Return the text with one to four injuries."""
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(_TEXT)(rng, text)
    return text


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(0, len(text))]


def _drop_lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    first = rng.randrange(len(lines))
    del lines[first : first + rng.randint(1, 5)]
    return "\n".join(lines)


def _repeat_lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    first = rng.randrange(len(lines))
    some = lines[first : first + rng.randint(1, 5)]
    at = rng.randrange(len(lines))
    return "\n".join([*lines[:at], *some, *lines[at:]])


def _swap_lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def _wrap_line(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + "\n" + text[at:]


def _change_letters(rng: random.Random, text: str) -> str:
    letters = list(text)
    for _ in range(rng.randint(1, 6)):
        if letters:
            letters[rng.randrange(len(letters))] = rng.choice('0123456789,-: \n\t\0{}[]"xé—')
    return "".join(letters)


def _change_number(rng: random.Random, text: str) -> str:
    places = [i for i, letter in enumerate(text) if letter.isdigit()]
    if not places:
        return text
    at = rng.choice(places)
    return text[:at] + rng.choice(["", "9", "-", "00", "65536", "9" * 30]) + text[at + 1 :]


def _insert_junk(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(JUNK) + text[at:]


def _double(rng: random.Random, text: str) -> str:
    return text + text


_TEXT: tuple[Callable[[random.Random, str], str], ...] = (
    *(_cut, _drop_lines, _repeat_lines, _swap_lines, _wrap_line, _change_letters, _change_letters),
    *(_change_number, _change_number, _insert_junk, _double),
)


class Damage:
    """Injuries to the files below a root, each undone by `heal`."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self.root, self.files = root, files
        self._undo: list[Callable[[], object]] = []

    def hurt(self, rng: random.Random) -> list[str]:
        """Do one to four injuries; returns what was done, for the message of a failure."""
        return [rng.choice(_TREE)(self, rng) for _ in range(rng.randint(1, 4))]

    def heal(self) -> None:
        while self._undo:
            self._undo.pop()()

    def pick(self, rng: random.Random) -> Path:
        """Choose a file, each kind of file as often as any other, not each CPU's."""
        kinds: dict[str, list[str]] = {}
        for rel in self.files:
            kinds.setdefault("".join(c for c in rel if not c.isdigit()), []).append(rel)
        return self.root / rng.choice(kinds[rng.choice(sorted(kinds))])

    def replace(self, path: Path, content: bytes) -> None:
        if not path.is_file() or path.is_symlink():
            return
        before = path.read_bytes()
        self._undo.append(lambda: path.write_bytes(before))
        path.write_bytes(content)

    def away(self, path: Path, instead: Callable[[], object] | None = None) -> None:
        """Move a file or folder out of the way, and put something else there."""
        if not os.path.lexists(path):
            return
        aside = path.with_name(f".aside-{len(self._undo)}-{path.name}")
        path.rename(aside)

        def back() -> None:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            aside.rename(path)

        self._undo.append(back)
        if instead is not None:
            instead()


def _junk(d: Damage, rng: random.Random) -> str:
    path, junk = d.pick(rng), rng.choice(JUNK)
    d.replace(path, junk.encode())
    return f"{path} = {junk[:30]!r}"


def _bytes(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    d.replace(path, rng.randbytes(rng.randint(1, 40)))
    return f"{path} = random bytes"


def _letters(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    if path.is_file():
        before = path.read_bytes().decode("utf-8", "replace")
        d.replace(path, damage_text(rng, before).encode("utf-8", "replace"))
    return f"{path} changed"


def _other(d: Damage, rng: random.Random) -> str:
    path, other = d.pick(rng), d.pick(rng)
    if other.is_file():
        d.replace(path, other.read_bytes())
    return f"{path} = {other}"


def _remove(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    d.away(path)
    return f"{path} removed"


def _remove_folder(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    for _ in range(rng.randint(1, 3)):
        path = path.parent if path.parent != d.root else path
    d.away(path)
    return f"{path} removed"


def _folder(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    d.away(path, path.mkdir)
    return f"{path} is a folder"


def _pipe(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    d.away(path, lambda: os.mkfifo(path))
    return f"{path} is a pipe"


def _loop(d: Damage, rng: random.Random) -> str:
    path = d.pick(rng)
    d.away(path, lambda: path.symlink_to(path.name))
    return f"{path} is a link to itself"


_TREE: tuple[Callable[[Damage, random.Random], str], ...] = (
    *(_junk, _junk, _junk, _bytes, _letters, _letters, _letters, _other, _other, _remove, _remove),
    *(_remove_folder, _folder, _pipe, _loop),
)
