"""The entry point: errors become messages and exit statuses here, and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO

BROKEN_PIPE = 141  # what a shell shows for a program that SIGPIPE ended
CANNOT_WRITE = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line (by default this process's own) and exit with its status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:  # answered before anything is imported
        from zenlaunch import __version__

        print(f"zenlaunch {__version__}")
        sys.exit(0)
    _make_streams_safe()
    from zenlaunch.errors import ZenlaunchError
    from zenlaunch.stdout import ReaderGoneError

    try:
        if argv[:1] == ["guard"]:  # asked in every start of a unit: without the option parser
            from zenlaunch.cli_guard import run
        else:
            from zenlaunch.cli import run

        status = run(argv)
        sys.stdout.flush()
    except ReaderGoneError:
        status = _cannot_write(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    except ZenlaunchError as e:
        from zenlaunch.output import make_console, print_error

        try:
            print_error(e, make_console(stderr=True))
        except (OSError, ReaderGoneError):  # the status tells it too
            _forget(sys.stderr)
        status = e.exit_code
    except KeyboardInterrupt:
        status = 130
    except OSError as e:
        status = _cannot_write(e)
    sys.exit(status)


def _make_streams_safe() -> None:
    """Have text that a terminal cannot show escaped, and streams that are closed ignored."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _cannot_write(error: OSError) -> int:
    """Return the status for an output that takes no more; any other OSError is a bug."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    _forget(sys.stdout)
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE
    with contextlib.suppress(OSError):
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
    return CANNOT_WRITE


def _forget(stream: TextIO) -> None:
    """Have what cannot be written go nowhere: Python would flush, and complain, once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
