"""What is a secret, by the name of a variable or of an option, and its blotting out.

Owns the names and where the values stand; who writes a log or a report asks here. A value that is
shorter than 8 characters is a word that occurs by chance: it is hidden where its name stands beside
it, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
LEAST = 8
# HF_TOKEN is one; --tokenizer, --max-num-batched-tokens and KEYBOARD are none.
_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|TOKEN_?\d*$|(^|_)KEY_?\d*$"
)
_PLACE = re.compile(r"_(FILE|PATH|DIR|FOLDER|ENV)$")  # where a secret is, which is none
_SETTING = re.compile(r"(?:--?[A-Za-z-]+=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Say whether a variable or an option of this name holds something to be kept quiet."""
    upper = name.strip("-").replace("-", "_").upper()
    return _NAME.search(upper) is not None and _PLACE.search(upper) is None


def secrets_of(environ: Mapping[str, str], argv: Sequence[str] = ()) -> tuple[bytes, ...]:
    """Return the values to be blotted out, the longest first; those of many lines line by line."""
    values = [v for k, v in environ.items() if is_secret(k)]
    values += [value for word, value in _marked(argv) if value]
    found = {line.encode(errors="surrogateescape") for v in values for line in v.splitlines()}
    return tuple(sorted((s for s in found if len(s) >= LEAST), key=len, reverse=True))


def blot(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return the bytes without any of the secrets."""
    for secret in secrets:
        if secret in data:
            data = data.replace(secret, HIDDEN.encode())
    return data


def environ_without(environ: Mapping[str, str], secrets: Sequence[bytes]) -> dict[str, str]:
    """Return the environment without secrets, sorted by name."""
    return {
        k: HIDDEN if is_secret(k) else _blot_text(v, secrets) for k, v in sorted(environ.items())
    }


def argv_without(argv: Sequence[str], secrets: Sequence[bytes] = ()) -> list[str]:
    """Return a command line without the values of options such as --hf-token."""
    return [
        word if not value else word.removesuffix(value) + HIDDEN
        for word, value in _marked([_blot_text(word, secrets) for word in argv])
    ]


def _marked(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Return each word with the part of it that is a secret's value, or "".

    An option may take several values (`--api-key A B`), or none where the next option follows; a
    word may set a variable (`--env HF_TOKEN=A`, or after `env`).
    """
    marked, hide = [], False
    for word in argv:
        setting = _SETTING.fullmatch(word)
        if setting is not None and is_secret(setting[1]):
            marked.append((word, setting[2]))
        elif word.startswith("-"):
            flag, equals, value = word.partition("=")
            hide = is_secret(flag)
            marked.append((word, value if hide and equals else ""))
        else:
            marked.append((word, word if hide else ""))
    return marked


def _blot_text(text: str, secrets: Sequence[bytes]) -> str:
    raw = text.encode(errors="surrogateescape")
    return blot(raw, secrets).decode(errors="surrogateescape")
