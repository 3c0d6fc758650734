"""The shell round `lifecycle`: processes, logs, health checks, signals, and the clock.

Owns the running of one deployment from the first spawn to the last process gone, and reports what
happens as events. Decides nothing about order, restarts or deadlines (lifecycle), knows nothing of
vLLM (markers and paths come in the LaunchSpec), prints nothing, and does not look into a process's
threads or pages (observe): `BecameReady` carries the pid for whoever does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zenlaunch import checks, compiled, watch
from zenlaunch import lifecycle as lc
from zenlaunch.child import Child, become_subreaper, describe_status, processes, tree
from zenlaunch.errors import LaunchError, ProxyError, ZenlaunchError
from zenlaunch.events import (
    AllReady,
    BecameReady,
    Event,
    Failed,
    LogLines,
    MemberStatus,
    Outcome,
    PhaseReached,
    RollingEnded,
    Spawned,
    StateChanged,
    Stopping,
    Waiting,
    Warned,
)
from zenlaunch.lifecycle import Member, Policy, Role, State, System
from zenlaunch.logs import Lines, LogFile, secrets_of
from zenlaunch.spec import LaunchSpec, Signature

TAIL_SHOWN = 20
MEMORY_WAIT_S = 30.0
SIGNAL_EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `run` runs.

    `log_dir` gets NAME.log; `cache_dir` holds the stamps of filled compile caches. `admin_socket`
    is the proxy's, for drain and resume. `environ` is what the programs inherit, before each
    spec's `unset` and `env`. With `hangup_stops` SIGHUP ends everything (a foreground `up`).
    """

    name: str
    instances: tuple[LaunchSpec, ...]
    proxy: LaunchSpec | None = None
    log_dir: Path
    cache_dir: Path
    admin_socket: Path | None = None
    environ: Mapping[str, str] | None = None
    policy: Policy = field(default_factory=Policy)
    handle_signals: bool = True
    hangup_stops: bool = True
    log_bytes: int = 64 << 20
    log_keep: int = 3


@dataclass(slots=True)
class _Run:
    """One run of a member, from the spawn action to its last process gone."""

    task: asyncio.Task[None] | None = None
    child: Child | None = None
    started: float = 0.0
    phase: str | None = None
    ready_seconds: float | None = None
    refused: str | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    lines: Lines = field(default_factory=Lines)


async def run(
    deployment: Deployment,
    *,
    on_event: Callable[[Event], None],
    on_start: Callable[[Supervisor], None] | None = None,
) -> Outcome:
    """Run a deployment until it is stopped or fails; nothing of it is left afterwards.

    `on_event` is called in the event loop and must not block. `on_start` gets the supervisor, to
    command it.
    """
    supervisor = Supervisor(deployment, on_event)
    if on_start is not None:
        on_start(supervisor)
    return await supervisor.run()


class Supervisor:
    """A running deployment; its methods are called from the event loop that runs it."""

    def __init__(self, deployment: Deployment, on_event: Callable[[Event], None]) -> None:
        self.deployment = deployment
        self._emit = on_event
        self._environ = dict(os.environ if deployment.environ is None else deployment.environ)
        self._secrets = secrets_of(self._environ)
        self._specs = {s.name: s for s in deployment.instances}
        if deployment.proxy is not None:
            self._specs[deployment.proxy.name] = deployment.proxy
        if len(self._specs) != len(deployment.instances) + (deployment.proxy is not None):
            raise LaunchError("two members of the deployment have the same name")
        self._system = self._first_system()
        self._runs: dict[str, _Run] = {name: _Run() for name in self._specs}
        self._logs = {
            name: LogFile(
                deployment.log_dir / f"{name}.log",
                most_bytes=deployment.log_bytes,
                keep=deployment.log_keep,
            )
            for name in self._specs
        }
        self._inbox: asyncio.Queue[lc.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._admin: checks.Http | None = None
        self._begun = time.monotonic()
        self._all_ready = False
        self._error: ZenlaunchError | None = None
        self._full: set[str] = set()
        self._waiting: dict[str, str] = {}

    def _first_system(self) -> System:
        members = [
            Member(
                name=s.name,
                cache_key=s.compile_cache.key if s.compile_cache else None,
                start_timeout_s=s.health.start_timeout_s,
                drain_s=s.drain_s,
            )
            for s in self.deployment.instances
        ]
        proxy = self.deployment.proxy
        if proxy is not None:
            members.append(
                Member(
                    name=proxy.name,
                    role=Role.PROXY,
                    start_timeout_s=proxy.health.start_timeout_s,
                    drain_s=proxy.drain_s,
                )
            )
        keys = {m.cache_key for m in members if m.cache_key is not None}
        cold = frozenset(k for k in keys if not compiled.is_warm(self.deployment.cache_dir, k))
        return System(members=tuple(members), policy=self.deployment.policy, cold=cold)

    # -- commands ----------------------------------------------------

    def stop(self, *, exit_code: int = 0, why: str = "asked to", hurry: bool = False) -> None:
        """Stop everything; a second call, or `hurry`, kills what is left."""
        if self._system.exit_code is None:
            self._emit(Stopping(why=why))
        self._inbox.put_nowait(lc.Stop(exit_code, hurry=hurry))

    def restart(self, name: str) -> None:
        """Drain, end and start again one member; raises KeyError."""
        self._inbox.put_nowait(lc.Restart(self._system.member(name).name))

    def roll(self) -> bool:
        """Restart all instances one after the other; returns whether that began."""
        if self._system.rolling or self._system.exit_code is not None:
            return False
        self._inbox.put_nowait(lc.Roll(tuple(s.name for s in self.deployment.instances)))
        return True

    def status(self) -> tuple[MemberStatus, ...]:
        """Return what each member is doing now."""
        now = time.monotonic()
        rows = []
        for member in self._system.members:
            spec, run = self._specs[member.name], self._runs[member.name]
            rows.append(
                MemberStatus(
                    name=member.name,
                    role=member.role,
                    state=member.state,
                    phase=self._waiting.get(member.name)
                    or (run.phase if member.state is State.STARTING else None),
                    pid=run.child.pid or None if run.child else None,
                    host=spec.host,
                    port=spec.port,
                    since_s=now - member.since,
                    restarts=member.restarts,
                    ready_seconds=run.ready_seconds,
                )
            )
        return tuple(rows)

    # -- the loop ----------------------------------------------------

    async def run(self) -> Outcome:
        """Run until the lifecycle says that it is finished; raises LaunchError for bad folders."""
        try:
            self.deployment.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise LaunchError(
                f"cannot make the folder {self.deployment.log_dir}: {e.strerror}"
            ) from e
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                if log.path.stat().st_size:
                    log.rotate()
        become_subreaper()
        loop = asyncio.get_running_loop()
        self._begun = time.monotonic()
        if self.deployment.admin_socket is not None:
            self._admin = checks.Http(socket_path=self.deployment.admin_socket)
        handled = self._install_signals(loop)
        self._inbox.put_nowait(lc.Begin())
        try:
            exit_code = await self._loop()
        finally:
            # Also when this task is cancelled: no tree may be left.
            await self._end_all()
            for number in handled:
                loop.remove_signal_handler(number)
            for log in self._logs.values():
                log.close()
            if self._admin is not None:
                await self._admin.close()
        if self._error is not None and exit_code in (LaunchError.exit_code, ProxyError.exit_code):
            return Outcome(exit_code=exit_code, error=self._error)
        return Outcome(exit_code=exit_code)

    def _install_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        if not self.deployment.handle_signals:
            return []
        numbers = [signal.SIGINT, signal.SIGTERM]
        if self.deployment.hangup_stops:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._signalled, number)
        return [int(n) for n in numbers]

    def _signalled(self, number: signal.Signals) -> None:
        self.stop(exit_code=SIGNAL_EXIT[number], why=number.name)

    async def _loop(self) -> int:
        while True:
            deadline = self._system.deadline
            event: lc.Event
            try:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = await asyncio.wait_for(self._inbox.get(), wait)
            except TimeoutError:
                event = lc.Tick()
            before = self._system
            self._system, actions = lc.step(before, event, time.monotonic())
            self._tell(before, event)
            for action in actions:
                match action:
                    case lc.Spawn(name):
                        self._spawn(name)
                    case lc.Terminate(name):
                        child = self._runs[name].child
                        if child is not None:
                            child.terminate()
                    case lc.Kill(name):
                        self._kill(name)
                    case lc.Drain(name):
                        self._go(self._drain(name))
                    case lc.Resume(name):
                        self._go(self._resume(name))
                    case lc.RollEnded(failed, left):
                        self._emit(RollingEnded(failed=failed, left=left))
                    case lc.GaveUp(name):
                        pass  # told with its failure
                    case lc.Finish(exit_code):
                        return exit_code

    def _go(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_all(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        for run in self._runs.values():
            if run.child is not None:
                run.child.kill()
            elif run.task is not None:
                run.task.cancel()
                tasks.append(run.task)
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            if run.task is not None:
                await asyncio.gather(run.task, return_exceptions=True)

    # -- telling -----------------------------------------------------

    def _tell(self, before: System, event: lc.Event) -> None:
        now = time.monotonic()
        for old, new in zip(before.members, self._system.members, strict=True):
            if isinstance(event, lc.Exited) and event.name == new.name and old.state in lc.ALIVE:
                failed = new.state in (State.BACKOFF, State.FAILED)
                stopped_by_itself = old.state in (*lc.SERVING, State.STARTING)
                if failed or stopped_by_itself or old.doomed:
                    self._tell_failure(old, new, now)
            if new.state is not old.state:
                self._emit(
                    StateChanged(
                        name=new.name, previous=old.state, state=new.state, reason=new.doomed
                    )
                )
        self._tell_waiting()
        if not self._all_ready and all(m.state is State.READY for m in self._system.members):
            self._all_ready = True
            self._emit(AllReady(seconds=now - self._begun))

    def _tell_waiting(self) -> None:
        for member in self._system.members:
            reason = None
            if member.state is State.STOPPED and self._system.exit_code is None:
                first = next(
                    (
                        m.name
                        for m in self._system.members
                        if m.cache_key == member.cache_key and m.state in lc.ALIVE
                    ),
                    None,
                )
                if first is not None:
                    reason = f"for {first}: the compile cache has no entry for this model yet"
            if reason is None:
                self._waiting.pop(member.name, None)
            elif self._waiting.get(member.name) != reason:
                self._waiting[member.name] = reason
                self._emit(Waiting(name=member.name, reason=reason))

    def _tell_failure(self, old: Member, new: Member, now: float) -> None:
        run = self._runs[new.name]
        starting = old.ready_at is None
        signature = self._signature(run, self._specs[new.name])
        what, how = "died", describe_status(run.child.status if run.child else None)
        if run.refused is not None:
            what, how = "was not started", run.refused
        elif old.doomed is not None:
            what, how = "was ended", old.doomed
        failure = Failed(
            name=new.name,
            what=what,
            how=how,
            starting=starting,
            seconds=now - run.started,
            cause=signature.cause if signature else None,
            evidence=run.evidence[signature.marker] if signature else None,
            advice=signature.advice if signature else None,
            log_tail=tuple(run.lines.tail)[-TAIL_SHOWN:],
            retry_s=None if new.deadline is None else new.deadline - now,
        )
        self._emit(failure)
        if new.state is State.FAILED and self._error is None:
            self._error = _as_error(failure, new)
            if self._system.exit_code is not None:
                self._emit(Stopping(why=failure.message))

    @staticmethod
    def _signature(run: _Run, spec: LaunchSpec) -> Signature | None:
        return next((s for s in spec.signatures if s.marker in run.evidence), None)

    # -- one run of a member -----------------------------------------

    def _spawn(self, name: str) -> None:
        run = _Run(started=time.monotonic())
        spec = self._specs[name]
        markers = [p.marker for p in spec.phases] + [s.marker for s in spec.signatures]
        if spec.compile_cache is not None:
            markers += spec.compile_cache.artifact_markers
        run.lines = Lines(markers=markers, secrets=self._secrets)
        self._runs[name] = run
        run.task = asyncio.get_running_loop().create_task(self._live(spec, run))

    def _kill(self, name: str) -> None:
        run = self._runs[name]
        if run.child is not None:
            run.child.kill()
        elif run.task is not None:
            run.task.cancel()

    async def _live(self, spec: LaunchSpec, run: _Run) -> None:
        """Check, start, watch, and report the end, whatever the end is."""
        watching: asyncio.Task[None] | None = None
        try:
            await self._wait_for_memory(spec, run)
            run.refused = checks.port_taken(spec.host, spec.port)
            if run.refused is not None:
                return
            run.started = time.monotonic()
            run.child = await Child.spawn(
                name=spec.name,
                marker=f"{self.deployment.name}/{spec.name}/{uuid.uuid4().hex}",
                argv=spec.argv,
                env=self.environment(spec),
                on_output=lambda data: self._output(spec, run, data),
                cpus=spec.cpus if spec.self_bind else None,
                mem_nodes=spec.mem_nodes if spec.self_bind else None,
            )
            self._emit(Spawned(name=spec.name, pid=run.child.pid))
            watching = asyncio.get_running_loop().create_task(self._watch(spec, run, run.child))
            await run.child.gone.wait()
        except LaunchError as e:
            run.refused = e.message
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            self._record(spec, run, *run.lines.flush())
            self._inbox.put_nowait(lc.Exited(spec.name, jitter=random.random()))

    def environment(self, spec: LaunchSpec) -> dict[str, str]:
        """Return the environment that a member's program gets."""
        env = dict(self._environ)
        for name in spec.unset:
            if name.endswith("*"):
                for key in [k for k in env if k.startswith(name[:-1])]:
                    del env[key]
            else:
                env.pop(name, None)
        return env | spec.env

    async def _wait_for_memory(self, spec: LaunchSpec, run: _Run) -> None:
        """Wait until the nodes have the memory, since pages of an ended run go away slowly.

        Raises LaunchError that says what is missing. Starting neighbours have not taken all of
        theirs yet: what they still will take is counted as gone.
        """
        if spec.memory_bytes is None or not spec.mem_nodes:
            return
        until = time.monotonic() + MEMORY_WAIT_S
        while True:
            known = [checks.node_free_bytes(n) for n in spec.mem_nodes]
            if None in known:
                return
            free = sum(k for k in known if k is not None)
            claimed = self._claimed_bytes(spec)
            if free - claimed >= spec.memory_bytes:
                return
            if time.monotonic() >= until:
                others = (
                    f", {_gib(claimed)} of it claimed by instances that start" if claimed else ""
                )
                raise LaunchError(
                    f"node {spec.mem_nodes} has {_gib(free)} free{others}; {spec.name} needs "
                    f"{_gib(spec.memory_bytes)}",
                    hint="see who holds it with `numastat -p`; or a smaller --kv-cache, or fewer "
                    "instances",
                )
            run.phase = f"waiting for {_gib(spec.memory_bytes)} on node {spec.mem_nodes}"
            await asyncio.sleep(0.5)

    def _claimed_bytes(self, spec: LaunchSpec) -> int:
        rows = None
        claimed = 0
        for member in self._system.members:
            other, run = self._specs[member.name], self._runs[member.name]
            if (
                member.name == spec.name
                or member.state is not State.STARTING
                or run.child is None
                or other.memory_bytes is None
                or other.mem_nodes.isdisjoint(spec.mem_nodes)
            ):
                continue
            rows = processes() if rows is None else rows
            resident = checks.resident_bytes(tree(run.child.pid, rows))
            claimed += max(0, other.memory_bytes - resident)
        return claimed

    # -- output ------------------------------------------------------

    def _output(self, spec: LaunchSpec, run: _Run, data: bytes) -> None:
        def found(marker: str, line: str) -> None:
            self._found(spec, run, marker, line)

        self._record(spec, run, *run.lines.feed(data, found=found))

    def _record(self, spec: LaunchSpec, run: _Run, raw: bytes, lines: tuple[str, ...]) -> None:
        if not lines:
            return
        error = self._logs[spec.name].write(raw)
        if error is not None and spec.name not in self._full:
            self._full.add(spec.name)
            self._emit(Warned(name=spec.name, text=f"its log cannot be written: {error.strerror}"))
        self._emit(LogLines(name=spec.name, lines=lines))

    def _found(self, spec: LaunchSpec, run: _Run, marker: str, line: str) -> None:
        starting = run.ready_seconds is None
        for phase in spec.phases:
            if starting and phase.marker == marker and run.phase != phase.name:
                run.phase = phase.name
                seconds = time.monotonic() - run.started
                self._emit(
                    PhaseReached(name=spec.name, phase=phase.name, line=line, seconds=seconds)
                )
        for signature in spec.signatures:
            if signature.marker == marker and marker not in run.evidence:
                run.evidence[marker] = line
                if signature.fatal:
                    self._inbox.put_nowait(lc.Doomed(spec.name, signature.cause))
        if spec.compile_cache is not None and marker in spec.compile_cache.artifact_markers:
            artifact = compiled.artifact_in(line, marker)
            if artifact is not None:
                run.artifacts.append(artifact)

    # -- health --------------------------------------------------------

    async def _watch(self, spec: LaunchSpec, run: _Run, child: Child) -> None:
        http = checks.Http(base=f"http://{_host(spec.host)}:{spec.port}")
        # The proxy says 503 until an engine is ready: for it, to answer is to be up.
        any_answer = spec is self.deployment.proxy
        try:
            await watch.until_ready(spec, http, any_answer=any_answer)
            other = checks.foreign_listener(spec.port, tree(child.pid))
            if other is not None:
                reason = (
                    f"port {spec.port} is answered by another process, pid {other} "
                    f"({checks.command_of(other)})"
                )
                self._inbox.put_nowait(lc.Doomed(spec.name, reason))
                return
            self._is_ready(spec, run, child)
            await watch.while_serving(spec, http, self._inbox.put_nowait, any_answer=any_answer)
        finally:
            await http.close()

    def _is_ready(self, spec: LaunchSpec, run: _Run, child: Child) -> None:
        run.ready_seconds = time.monotonic() - run.started
        if spec.compile_cache is not None:
            key, artifacts = spec.compile_cache.key, tuple(run.artifacts)
            compiled.remember(self.deployment.cache_dir, key, artifacts)
        self._inbox.put_nowait(lc.Ready(spec.name))
        self._emit(
            BecameReady(
                name=spec.name,
                pid=child.pid,
                seconds=run.ready_seconds,
                log=tuple(run.lines.tail),
            )
        )

    # -- the proxy ---------------------------------------------------

    async def _drain(self, name: str) -> None:
        """Take a member out of the proxy and wait until no answer of it is under way."""
        if self._admin is None:
            # Nobody to ask: the engine's own drain does what it can.
            self._inbox.put_nowait(lc.Drained(name))
            return
        answer = await self._admin.post(f"/zenlaunch/upstreams/{name}/drain")
        if answer is None or answer[0] >= 400:
            self._emit(Warned(name=name, text="the proxy did not take it out before the stop"))
            self._inbox.put_nowait(lc.Drained(name))
            return
        while self._system.member(name).state is State.DRAINING:
            status = await self._admin.get("/zenlaunch/status")
            left: int | None = None
            if status is not None and status[0] == 200:
                with contextlib.suppress(ValueError):
                    left = checks.in_flight(json.loads(status[1]), name)
            if not left:
                break
            await asyncio.sleep(0.1)
        self._inbox.put_nowait(lc.Drained(name))

    async def _resume(self, name: str) -> None:
        if self._admin is not None and self._system.proxy_serves:
            await self._admin.post(f"/zenlaunch/upstreams/{name}/resume")


def _host(host: str) -> str:
    """Return where to connect to reach a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _as_error(failure: Failed, member: Member) -> ZenlaunchError:
    if member.role is Role.PROXY:
        last = failure.log_tail[-1] if failure.log_tail else None
        return ProxyError(failure.message, hint=failure.advice or last)
    tail = failure.log_tail
    if failure.evidence and failure.evidence not in tail:
        tail = (failure.evidence, *tail)
    return LaunchError(failure.message, hint=failure.advice, log_tail=tail)
