"""The entry point: errors become messages and exit statuses here, and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line (by default this process's own) and exit with its status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:  # answered before anything is imported
        from zenlaunch import __version__

        print(f"zenlaunch {__version__}")
        sys.exit(0)
    from zenlaunch.errors import ZenlaunchError

    try:
        if argv[:1] == ["guard"]:
            from zenlaunch.cli_guard import run
        else:
            from zenlaunch.cli import run

        sys.exit(run(argv))
    except ZenlaunchError as e:
        from zenlaunch.output import make_console, print_error

        print_error(e, make_console(stderr=True))
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has gone (`| head`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
