"""The one tree of errors; each class is one exit status.

A message says what is wrong, where it was seen and what to do. The command line prints it and exits
with `exit_code`; nothing else in the package prints or exits. Exit statuses are part of the stable
interface (README, "Exit statuses").
"""

from __future__ import annotations


class ZenlaunchError(Exception):
    """A condition that the user can act upon.

    `hint` is what to type or change; it is printed on its own line below the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(ZenlaunchError):
    """The config file or the command line is wrong; lists every problem at once."""

    exit_code = 2


class TopologyError(ZenlaunchError):
    """The machine cannot be read, or what was read contradicts itself."""

    exit_code = 3


class PlanError(ZenlaunchError):
    """The wish does not fit the machine: cores, memory, or the engine's version."""

    exit_code = 4


class RenderError(ZenlaunchError):
    """A file cannot be rendered or written."""

    exit_code = 5


class LaunchError(ZenlaunchError):
    """An instance or the proxy did not start; `log_tail` holds its last log lines."""

    exit_code = 6

    def __init__(
        self, message: str, *, hint: str | None = None, log_tail: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.log_tail = log_tail


class ProxyError(ZenlaunchError):
    """The proxy cannot serve: its address is taken, its options contradict each other."""

    exit_code = 7
