"""`run`: open the door, keep it open, close it well.

Owns the listening sockets, the signals and the order of stopping. SIGTERM and SIGINT drain: no new
connections, answers under way finish within `drain_s`, what is left is ended honestly; a second
signal ends it at once. SIGHUP reads keys and upstreams again and reopens the access log; SIGUSR2
puts a successor in its place (`handover`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zenlaunch import notify
from zenlaunch.errors import ProxyError, ZenlaunchError
from zenlaunch.proxy.admin import Admin
from zenlaunch.proxy.downstream import ClientConnection
from zenlaunch.proxy.handover import Handover, Inherited, inherited
from zenlaunch.proxy.hub import Hub
from zenlaunch.proxy.options import ProxyOptions
from zenlaunch.proxy.pump import Pump
from zenlaunch.values import host_port

log = logging.getLogger("zenlaunch.proxy")

_BACKLOG = 4096
_HEARING_S = 0.1
_FIRST_PROBES_S = 0.5
_SPARE_FILES = 64  # for logs, sockets that listen, probes


def run(options: ProxyOptions, *, reload: Callable[[], ProxyOptions] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return 0 when every answer under way was finished.

    Otherwise 128 plus the signal's number: some answers were cut. Prints "listening on URL" to
    stderr once it listens. `reload` gives the options anew on SIGHUP; of these the upstreams are
    taken. Raises `ProxyError` when the address is taken, or a file it needs cannot be read.
    """
    max_connections = _raise_file_limit(options)
    before = inherited()
    sock = before.listening if before is not None else _listening_socket(options)
    admin_sock = before.admin if before is not None else None
    try:
        if options.admin_socket is not None and admin_sock is None:
            admin_sock = _admin_socket(options.admin_socket)
        handover = Handover(sock, admin_sock)
        pump = Pump()
        with asyncio.Runner(loop_factory=pump.event_loop) as runner:
            return runner.run(
                _serve(
                    options,
                    pump,
                    sock,
                    admin_sock,
                    handover,
                    before=before,
                    max_connections=max_connections,
                    reload=reload,
                )
            )
    finally:
        sock.close()
        if admin_sock is not None and options.admin_socket is not None:
            admin_sock.close()
            if not handover.done:
                options.admin_socket.unlink(missing_ok=True)


async def _serve(
    options: ProxyOptions,
    pump: Pump,
    sock: socket.socket,
    admin_sock: socket.socket | None,
    handover: Handover,
    *,
    before: Inherited | None,
    max_connections: int,
    reload: Callable[[], ProxyOptions] | None,
) -> int:
    loop = asyncio.get_running_loop()
    hub = Hub(options, loop, pump, max_connections=max_connections)
    admin = Admin(hub)
    stopping: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.put_nowait, signum)
    loop.add_signal_handler(signal.SIGHUP, _reload, hub, reload)
    loop.add_signal_handler(
        signal.SIGUSR2,
        lambda: hub.spawn(handover.go(stopping.put_nowait, drained=hub.balancer.drained())),
    )
    hub.start()
    for name in before.drained if before is not None else ():
        if name in hub.upstreams:
            hub.balancer.drain(name)
    await _know_upstreams(hub)
    door = pump.listen(sock, partial(ClientConnection, hub, admin, private=False))
    if admin_sock is not None:
        pump.listen(admin_sock, partial(ClientConnection, hub, admin, private=True))
    # What is there now stays; cycles are rare here, and a full collection would stall every stream.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    print(f"listening on {_url(sock)}", file=sys.stderr, flush=True)
    notify.start(loop)
    if before is not None:
        before.serving()
    try:
        signum = await stopping.get()
        log.info("%s: no new connections, %d answers to finish", signum.name, len(hub.exchanges))
        hub.draining = True
        door.close()
        # Who was accepted a moment ago has not been heard yet; closing now would refuse it.
        await asyncio.sleep(_HEARING_S)
        for client in list(hub.clients):
            client.close_when_idle()
        whole = await _finish(hub, stopping)
    finally:
        await hub.stop()
    return 0 if whole else 128 + signum


async def _know_upstreams(hub: Hub) -> None:
    """Give the first probes a moment: who waits in a socket held by systemd must not get a 503."""
    deadline = hub.loop.time() + _FIRST_PROBES_S
    while not hub.balancer.usable() and hub.loop.time() < deadline:
        await asyncio.sleep(0.01)


async def _finish(hub: Hub, stopping: asyncio.Queue[signal.Signals]) -> bool:
    """Wait for the answers under way; cut those that take too long. True when none was cut.

    A request that is still arriving counts: who sends it cannot know that the door is closing.
    """
    loop = hub.loop
    deadline = loop.time() + hub.options.drain_s

    def busy() -> bool:
        return bool(hub.exchanges) or any(client.busy for client in hub.clients)

    while busy() and loop.time() < deadline and stopping.empty():
        await asyncio.sleep(0.02)
    whole = not busy()
    for client in list(hub.clients):
        client.cut()
    flushed_by = loop.time() + 2.0
    while hub.clients and loop.time() < flushed_by:
        await asyncio.sleep(0.02)
    for client in list(hub.clients):
        client.abandon()
    return whole


def _reload(hub: Hub, reload: Callable[[], ProxyOptions] | None) -> None:
    """Read again what may change; where anything of it is wrong, all stays as it was."""
    try:
        options = reload() if reload is not None else None
        hub.load_secrets()
    except ZenlaunchError as error:
        hint = f" {error.hint}" if error.hint else ""
        log.error("reload: %s; nothing was changed.%s", error.message, hint)
    else:
        if options is not None:
            hub.set_upstreams(options)
        log.info("reload: keys and %d upstreams are as their files say", len(hub.upstreams))
    try:
        hub.log.reopen()
    except ZenlaunchError as error:
        log.error("reload: %s; lines go where they went", error.message)


def _listening_socket(options: ProxyOptions) -> socket.socket:
    fd = options.listen_fd
    if fd is not None:
        try:
            return socket.socket(fileno=fd)
        except OSError as error:
            raise ProxyError(f"file descriptor {fd} is not a socket: {error.strerror}") from error
    host, port = options.listen_host, options.listen_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ProxyError(f"cannot listen on {host}: {error.strerror}") from error
    family, kind, proto, _, address = found
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        hint = None
        if error.errno == errno.EADDRINUSE:
            hint = f"See who has it with `ss -ltnp 'sport = :{port}'`, or choose another --listen."
        elif error.errno == errno.EACCES:
            hint = "Ports below 1024 need privileges: choose a higher one."
        raise ProxyError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return sock


def _admin_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the socket is 0600 from its first moment
    try:
        with contextlib.suppress(FileNotFoundError):
            _remove_stale(path)
        sock.bind(str(path))
        sock.listen(16)
    except OSError as error:
        sock.close()
        raise ProxyError(
            f"cannot listen on the admin socket {path}: {error.strerror or error}"
        ) from (error)
    finally:
        os.umask(before)
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on; one that answers belongs to another proxy."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ProxyError(
        f"another proxy listens on the admin socket {path}",
        hint="Stop it first, or give this one another --admin-socket.",
    )


def _url(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{host_port(host, port)}"


def _raise_file_limit(options: ProxyOptions) -> int:
    """Raise the limit on open files as far as allowed; return how many clients fit into it.

    A proxied stream takes two files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    fits = max(1, (soft - _SPARE_FILES) // 2)
    if options.max_connections is not None:
        if options.max_connections > fits:
            raise ProxyError(
                f"{options.max_connections} connections need {options.max_connections * 2 + 64} "
                f"open files; the limit is {soft}",
                hint="Raise it: ulimit -n, or LimitNOFILE= in the unit.",
            )
        return options.max_connections
    if fits < 1024:
        log.warning("the limit on open files (%d) allows only %d connections", soft, fits)
    return fits
