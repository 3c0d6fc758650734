"""Results on standard output, and what it means when nobody reads them any more."""

from __future__ import annotations

import select
import sys


class ReaderGoneError(Exception):
    """The reader of our output has ended (`| head`): no error of ours, and nothing to say.

    Not an OSError: the option parser would take a broken pipe for itself and exit with 1.
    """


def write_line(text: str) -> None:
    """Print one result, at once; raises ReaderGoneError."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ReaderGoneError from None


def reader_is_gone() -> bool:
    """Say whether nobody reads our output any more, for who has nothing to write just now."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
