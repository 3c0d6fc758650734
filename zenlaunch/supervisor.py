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
import resource
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zenlaunch import checks, compiled
from zenlaunch import lifecycle as lc
from zenlaunch.child import become_subreaper
from zenlaunch.errors import LaunchError, ProxyError, ZenlaunchError
from zenlaunch.events import (
    AllReady,
    Event,
    Failed,
    Load,
    MemberStatus,
    Outcome,
    RollingEnded,
    StateChanged,
    Stopping,
    Waiting,
    Warned,
)
from zenlaunch.lifecycle import Member, Policy, Role, State, System
from zenlaunch.logs import LogFile
from zenlaunch.runs import Run, Surroundings
from zenlaunch.spec import LaunchSpec

PLENTY_OF_FILES = 4096
LATE_S = 2.0
LISTEN_S = 3.0
SIGNAL_EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `run` runs.

    `log_dir` gets NAME.log; `cache_dir` holds the stamps of filled compile caches. `admin_socket`
    is the proxy's, for drain and resume. `environ` is what the programs inherit, before each
    spec's `unset` and `env`. With `hangup_stops` SIGHUP ends everything (a foreground `up`).
    `memory_wait_s` is how long a start waits for a node's memory to become free.
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
    memory_wait_s: float = 30.0
    log_bytes: int = 64 << 20
    log_keep: int = 3


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
        self.rolling_failed: str | None = None  # who ended the last rolling restart
        self._observer = on_event
        self._specs = {s.name: s for s in deployment.instances}
        if deployment.proxy is not None:
            self._specs[deployment.proxy.name] = deployment.proxy
        if len(self._specs) != len(deployment.instances) + (deployment.proxy is not None):
            raise LaunchError("two members of the deployment have the same name")
        self._system = self._first_system()
        self._runs: dict[str, Run] = {}
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
        self._bug: BaseException | None = None
        self._waiting: dict[str, str] = {}
        environ = dict(os.environ if deployment.environ is None else deployment.environ)
        self._around = Surroundings(
            deployment=deployment.name,
            log_dir=deployment.log_dir,
            cache_dir=deployment.cache_dir,
            environ=environ,
            post=self._inbox.put_nowait,
            emit=on_event,
            chance=random.random,
            memory_wait_s=deployment.memory_wait_s,
            claimed=self._claimed_bytes,
            bind_memory=checks.memory_policy_allowed(),
        )

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

    def _emit(self, event: Event) -> None:
        """Tell the observer; whatever becomes of it, the deployment goes on.

        A terminal that is gone or a full disk must not keep a stop from happening.
        """
        try:
            self._observer(event)
        except Exception:
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()

    # -- commands ----------------------------------------------------

    def stop(self, *, exit_code: int = 0, why: str = "asked to", hurry: bool = False) -> None:
        """Stop everything; a second call, or `hurry`, kills what is left."""
        first = self._system.exit_code is None
        self._inbox.put_nowait(lc.Stop(exit_code, hurry=hurry))
        if first:
            self._emit(Stopping(why=why))

    def restart(self, name: str) -> None:
        """Drain, end and start again one member; raises KeyError."""
        self._inbox.put_nowait(lc.Restart(self._system.member(name).name))

    def roll(self) -> bool:
        """Restart all instances one after the other; returns whether that began."""
        if self._system.rolling or self._system.exit_code is not None:
            return False
        self.rolling_failed = None
        self._inbox.put_nowait(lc.Roll(tuple(s.name for s in self.deployment.instances)))
        return True

    def reload(self) -> None:
        """Have the proxy read its keys and options again."""
        proxy = self.deployment.proxy
        if proxy is not None and self._system.proxy_serves:
            self._runs[proxy.name].signal(signal.SIGHUP)

    @property
    def rolling(self) -> tuple[str, ...]:
        """The members that a rolling restart has still to do, the one under way first."""
        return self._system.rolling

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._begun

    @property
    def stopping(self) -> bool:
        return self._system.exit_code is not None

    @property
    def restarts(self) -> dict[str, int]:
        """How often each member was started again."""
        return {member.name: member.restarts for member in self._system.members}

    def status(self) -> tuple[MemberStatus, ...]:
        """Return what each member is doing now."""
        now = time.monotonic()
        rows = []
        for member in self._system.members:
            spec, run = self._specs[member.name], self._runs.get(member.name)
            alive = run is not None and run.child is not None and member.state in lc.ALIVE
            rows.append(
                MemberStatus(
                    name=member.name,
                    role=member.role,
                    state=member.state,
                    phase=self._waiting.get(member.name)
                    or (run.phase if run and member.state is State.STARTING else None),
                    pid=run.child.pid if alive and run and run.child else None,
                    session=run.child.shim_pid if alive and run and run.child else None,
                    resident_bytes=run.resident_bytes() if alive and run else None,
                    host=spec.host,
                    port=spec.port,
                    since_s=now - member.since,
                    restarts=member.restarts,
                    ready_seconds=run.ready_seconds if run else None,
                )
            )
        return tuple(rows)

    async def load(self) -> dict[str, Load]:
        """Ask every instance that serves how busy it is; the rate is since the last time asked."""
        serving = [
            m.name
            for m in self._system.members
            if m.role is Role.INSTANCE and m.state in (*lc.SERVING, State.DRAINING)
        ]
        loads = await asyncio.gather(*(self._runs[name].load() for name in serving))
        return dict(zip(serving, loads, strict=True))

    # -- the loop ----------------------------------------------------

    async def run(self) -> Outcome:
        """Run until the lifecycle says that it is finished; raises LaunchError for bad folders."""
        try:
            self.deployment.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise LaunchError(
                f"cannot make the folder {self.deployment.log_dir}: {e.strerror}",
                hint="set XDG_STATE_HOME to a folder that you may write",
            ) from e
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                if log.path.stat().st_size:
                    log.rotate()
        become_subreaper()
        _allow_files(64 + 16 * len(self._specs))
        if not self._around.bind_memory and any(
            s.self_bind and s.mem_nodes for s in self.deployment.instances
        ):
            text = (
                "the kernel does not permit memory policies here, so that only CPUs are bound "
                "(missing: CAP_SYS_NICE; in docker --cap-add SYS_NICE)"
            )
            self._emit(Warned(name=None, text=text))
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
        if self._error is not None and exit_code in (LaunchError.exit_code, ProxyError.exit_code):
            return Outcome(exit_code=exit_code, error=self._error)
        return Outcome(exit_code=exit_code)

    def _install_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        if not self.deployment.handle_signals:
            return []
        # What a parent left blocked or ignored would hide how a shim has ended, or our own end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # What is ignored stays so: `nohup`, and a job in the background of a script.
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in numbers:
            loop.add_signal_handler(number, self._signalled, number)
        return [int(n) for n in numbers]

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and not self.deployment.hangup_stops:
            self.reload()
        else:
            self.stop(exit_code=SIGNAL_EXIT[number], why=number.name)

    async def _loop(self) -> int:
        listen_until = 0.0
        while True:
            deadline = self._system.deadline
            event: lc.Event
            try:
                if deadline is not None:
                    deadline = max(deadline, listen_until)
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                # Not wait_for: before Python 3.12 it may swallow a cancellation.
                async with asyncio.timeout(wait):
                    event = await self._inbox.get()
            except TimeoutError:
                # Who was stopped (SIGSTOP, Ctrl-Z) first hears what has happened meanwhile: an
                # engine that became ready is not late.
                late_s = 0.0 if deadline is None else time.monotonic() - deadline
                if late_s > LATE_S and deadline != listen_until:
                    listen_until = time.monotonic() + LISTEN_S
                    continue
                event = lc.Tick()
            if self._bug is not None:
                raise self._bug
            before = self._system
            self._system, actions = lc.step(before, event, time.monotonic())
            self._tell(before, event)
            for action in actions:
                match action:
                    case lc.Spawn(name):
                        self._spawn(name)
                    case lc.Terminate(name):
                        self._runs[name].signal(signal.SIGTERM)
                    case lc.Kill(name):
                        self._runs[name].kill()
                    case lc.Drain(name):
                        self._go(self._drain(name))
                    case lc.Resume(name):
                        self._go(self._resume(name))
                    case lc.RollEnded(failed, left):
                        self.rolling_failed = failed
                        self._emit(RollingEnded(failed=failed, left=left))
                    case lc.GaveUp(name):
                        pass  # told with its failure
                    case lc.Finish(exit_code):
                        return exit_code

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task; a bug in it ends the deployment instead of being lost."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._bug = self._bug or task.exception()
                self._inbox.put_nowait(lc.Tick())

        self._tasks.add(task)
        task.add_done_callback(done)

    def _go(self, work: Coroutine[None, None, None]) -> None:
        self._keep(asyncio.get_running_loop().create_task(work))

    async def _end_all(self) -> None:
        running = {run.task for run in self._runs.values()}
        for task in self._tasks - running:
            task.cancel()
        for run in self._runs.values():
            if not run.task.done():
                run.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- telling -----------------------------------------------------

    def _tell(self, before: System, event: lc.Event) -> None:
        now = time.monotonic()
        for old, new in zip(before.members, self._system.members, strict=True):
            if isinstance(event, lc.Exited) and event.name == new.name and old.state in lc.ALIVE:
                failed = new.state in (State.BACKOFF, State.FAILED)
                stopped_by_itself = old.state in (*lc.SERVING, State.STARTING)
                if failed or stopped_by_itself or old.doomed:
                    ends_all = before.exit_code is None and self._system.exit_code is not None
                    self._tell_failure(old, new, now, ends_all=ends_all)
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

    def _tell_failure(self, old: Member, new: Member, now: float, *, ends_all: bool) -> None:
        failure = replace(self._runs[new.name].failure(old, new, now), ends_all=ends_all)
        self._emit(failure)
        if ends_all:
            self._error = _as_error(failure, new)
            self._emit(Stopping(why=failure.message))

    # -- runs --------------------------------------------------------

    def _spawn(self, name: str) -> None:
        spec = self._specs[name]
        run = Run(spec, self._around, self._logs[name], any_answer=spec is self.deployment.proxy)
        self._runs[name] = run
        self._keep(run.begin())

    def _claimed_bytes(self, spec: LaunchSpec, *, everywhere: bool = False) -> int:
        """Return what neighbours on the same nodes, that start too, have still to take."""
        claimed = 0
        for member in self._system.members:
            other, run = self._specs[member.name], self._runs.get(member.name)
            if (
                member.name != spec.name
                and member.state is State.STARTING
                and run is not None
                and run.admitted
                and other.memory_bytes is not None
                and (everywhere or not other.mem_nodes.isdisjoint(spec.mem_nodes))
            ):
                claimed += max(0, other.memory_bytes - run.resident_bytes())
        return claimed

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
        """Have the proxy use a member again, for as long as both are there.

        A proxy that does not answer now (stopped, say) may still hold it for drained.
        """
        while (
            self._admin is not None
            and self._system.proxy_serves
            and self._system.member(name).state in lc.SERVING
        ):
            answer = await self._admin.post(f"/zenlaunch/upstreams/{name}/resume")
            if answer is not None:
                return
            await asyncio.sleep(1.0)


def _allow_files(count: int) -> None:
    """Raise the limit of open files where it is low; raises LaunchError where that is not enough.

    Without a file to open neither an engine can be started nor its health be asked for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = hard != resource.RLIM_INFINITY
    if limited and hard < count:
        raise LaunchError(
            f"{hard} open files are allowed here, and this needs about {count}",
            hint="raise the limit: `ulimit -Hn`, LimitNOFILE= of a unit, docker --ulimit nofile",
        )
    plenty = min(PLENTY_OF_FILES, hard) if limited else PLENTY_OF_FILES
    if soft != resource.RLIM_INFINITY and soft < max(count, plenty):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, plenty), hard))


def _as_error(failure: Failed, member: Member) -> ZenlaunchError:
    if member.role is Role.PROXY:
        last = failure.log_tail[-1] if failure.log_tail else None
        return ProxyError(failure.message, hint=failure.advice or last)
    tail = failure.log_tail
    if failure.evidence and failure.evidence not in tail:
        tail = (failure.evidence, *tail)
    return LaunchError(failure.message, hint=failure.advice, log_tail=tail)
