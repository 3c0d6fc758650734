"""One run of a member: from the checks before its spawn to its last process gone.

Owns the process, the reading of its output (phases, failures, artifacts, the log file), and the
account of how it ended. Tells what it sees as lifecycle events and as reports; does not decide what
comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zenlaunch import checks, compiled, crash, procfs, watch
from zenlaunch import lifecycle as lc
from zenlaunch.blot import secrets_of
from zenlaunch.child import Child, describe_status, tree
from zenlaunch.cpuset import EMPTY
from zenlaunch.errors import LaunchError
from zenlaunch.events import (
    BecameReady,
    Event,
    Failed,
    Load,
    LogLines,
    PhaseReached,
    Spawned,
    Warned,
)
from zenlaunch.lifecycle import Member
from zenlaunch.logs import Lines, LogFile, short
from zenlaunch.spec import LaunchSpec, Signature
from zenlaunch.values import in_gib

TAIL_SHOWN = 20
LAST_WORDS_S = 1.0
LOAD_TIMEOUT_S = 2.0


# What numactl says when it ends before the program begins; believed before the engine's own words.
NUMACTL = (
    Signature(
        marker="set_mempolicy: Operation not permitted",
        cause="the kernel does not permit memory policies here",
        advice="give CAP_SYS_NICE (in docker: --cap-add SYS_NICE)",
    ),
    Signature(
        marker="libnuma: Warning: cpu argument",
        cause="numactl cannot use a CPU of the plan: it is offline, or a cpuset leaves it out",
        advice="see `zenlaunch probe` for the CPUs that are allowed here",
    ),
    Signature(
        marker="libnuma: Warning: node argument",
        cause="numactl cannot use a memory node of the plan: a cpuset leaves it out",
        advice="see `zenlaunch probe` for the nodes that are allowed here",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run needs from the deployment around it.

    `post` takes what the lifecycle must know, `emit` what people want to know, `chance` gives
    numbers in [0, 1), `claimed` the bytes of a spec's nodes (or `everywhere`) that starting
    neighbours will still take. Without `bind_memory` the kernel does not permit memory policies.
    """

    deployment: str
    log_dir: Path
    cache_dir: Path
    environ: Mapping[str, str]
    post: Callable[[lc.Event], None]
    emit: Callable[[Event], None]
    chance: Callable[[], float]
    memory_wait_s: float
    claimed: Callable[..., int]
    bind_memory: bool


def environment(spec: LaunchSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a spec's program gets."""
    env = dict(inherited)
    for name in spec.unset:
        if name.endswith("*"):
            for key in [k for k in env if k.startswith(name[:-1])]:
                del env[key]
        else:
            env.pop(name, None)
    return env | spec.env


class Run:
    """One run; `begin` it once. `any_answer`: to answer at all is to be ready (the proxy)."""

    def __init__(
        self, spec: LaunchSpec, around: Surroundings, log: LogFile, *, any_answer: bool = False
    ) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.phase: str | None = None
        self.admitted = False  # past the memory gate: what it needs is taken, or will be
        self.ready_seconds: float | None = None
        self.task: asyncio.Task[None]
        self._around = around
        self._log = log
        self._log_failed = False
        self._http = checks.Http(host=checks.connect_host(spec.host), port=spec.port)
        self._tokens: tuple[float, float] | None = None
        self._any_answer = any_answer
        self._started = time.monotonic()
        self._refused: str | None = None
        self._refused_hint: str | None = None
        self._oom = crash.oom_count()
        self._evidence: dict[str, str] = {}
        self._artifacts: list[str] = []
        by_numactl = spec.argv[0].rpartition("/")[2] == "numactl"
        self._signatures = (*(NUMACTL if by_numactl else ()), *spec.signatures)
        markers = [p.marker for p in spec.phases] + [s.marker for s in self._signatures]
        if spec.compile_cache is not None:
            markers += spec.compile_cache.artifact_markers
        secrets = secrets_of(environment(spec, around.environ), spec.argv)
        self._lines = Lines(markers=markers, secrets=secrets)

    def begin(self) -> asyncio.Task[None]:
        """Start; the task ends when nothing of the run is left, after `Exited` was posted."""
        self.task = asyncio.get_running_loop().create_task(self._live())
        self.task.add_done_callback(self._over)
        return self.task

    def _over(self, task: asyncio.Task[None]) -> None:
        # Not in the task itself: one that is cancelled before its first step runs nothing.
        self._record(*self._lines.flush())
        self._around.post(lc.Exited(self.spec.name, jitter=self._around.chance()))

    def signal(self, number: int) -> None:
        if self.child is not None:
            self.child.signal(number)

    def kill(self) -> None:
        """SIGKILL the tree, or leave off starting it."""
        if self.child is not None:
            self.child.kill()
        else:
            self.task.cancel()

    async def load(self) -> Load:
        """Ask the engine how busy it is."""
        health = self.spec.health
        if health.metrics_path is None:
            return Load()
        answer = await self._http.get(health.metrics_path, timeout_s=LOAD_TIMEOUT_S)
        if answer is None or answer[0] != 200:
            return Load()
        now, text = time.monotonic(), answer[1]
        tokens = checks.metric(text, health.tokens_metric)
        rate = None
        if tokens is not None:
            if self._tokens is not None and tokens >= self._tokens[1] and now > self._tokens[0]:
                rate = (tokens - self._tokens[1]) / (now - self._tokens[0])
            self._tokens = (now, tokens)
        return Load(
            running=checks.metric(text, health.running_metric),
            waiting=checks.metric(text, health.waiting_metric),
            kv_usage=checks.metric(text, health.kv_metric),
            tokens_per_second=rate,
        )

    def resident_bytes(self) -> int:
        return checks.resident_bytes(tree(self.child.shim_pid)[1:]) if self.child else 0

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._lines.tail)

    async def _live(self) -> None:
        watching: asyncio.Task[None] | None = None
        spec, around = self.spec, self._around
        try:
            await self._wait_for_memory()
            self.admitted, self.phase = True, None
            self._refused = _not_online(spec) or checks.port_taken(spec.host, spec.port)
            if self._refused is not None:
                return
            self._started = time.monotonic()
            self.child = await Child.spawn(
                name=spec.name,
                marker=f"{around.deployment}/{spec.name}/{uuid.uuid4().hex}",
                argv=spec.argv,
                env=environment(spec, around.environ),
                on_output=self._output,
                cpus=spec.cpus if spec.self_bind else None,
                mem_nodes=spec.mem_nodes if spec.self_bind and around.bind_memory else None,
            )
            around.emit(Spawned(name=spec.name, pid=self.child.pid, session=self.child.shim_pid))
            watching = asyncio.get_running_loop().create_task(self._watch(self.child))
            await self._until_gone(self.child, watching)
        except LaunchError as e:
            self._refused, self._refused_hint = e.message, e.hint
        except OSError as e:
            self._refused = f"zenlaunch could not look at the machine: {e.strerror or e}"
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    @staticmethod
    async def _until_gone(child: Child, watching: asyncio.Task[None]) -> None:
        """Wait for the end of the tree; a bug in the watching ends it and is raised here."""
        gone = asyncio.get_running_loop().create_task(child.gone.wait())
        try:
            await asyncio.wait({gone, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and watching.exception() is not None:
                child.kill()
            await gone
        finally:
            gone.cancel()
        if watching.done():
            watching.result()

    async def _wait_for_memory(self) -> None:
        """Wait until the nodes have the memory, since pages of an ended run go away slowly.

        Raises LaunchError that says what is missing. Starting neighbours have not taken all of
        theirs yet: what they still will take is counted as gone.
        """
        spec = self.spec
        if spec.memory_bytes is None or not spec.mem_nodes:
            return
        until = time.monotonic() + self._around.memory_wait_s
        while (lack := self._lack_of_memory(spec.memory_bytes)) is not None:
            if time.monotonic() >= until:
                raise lack
            self.phase = f"waiting for {in_gib(spec.memory_bytes)} on node {spec.mem_nodes}"
            await asyncio.sleep(0.5)

    def _lack_of_memory(self, needed: int) -> LaunchError | None:
        """Return what is missing, on the nodes or in the cgroup; None when there is enough."""

        def lack(who: str, free: int | None, claimed: int, advice: str) -> LaunchError | None:
            if free is None or free - claimed >= needed:
                return None
            others = f", {in_gib(claimed)} of it claimed by others that start" if claimed else ""
            return LaunchError(
                f"{who} has {in_gib(max(0, free))} free{others}; it needs {in_gib(needed)}",
                hint=f"{advice}; or a smaller --kv-cache, or fewer instances",
            )

        spec, claimed = self.spec, self._around.claimed
        known = [checks.node_free_bytes(n) for n in spec.mem_nodes]
        free = None if None in known else sum(k for k in known if k is not None)
        return lack(
            f"node {spec.mem_nodes}", free, claimed(spec), "see who holds it with `numastat -p`"
        ) or lack(
            "the memory cgroup of zenlaunch",
            checks.group_free_bytes(),
            claimed(spec, everywhere=True),
            "raise its limit (docker --memory, MemoryMax= of a unit)",
        )

    # -- output ------------------------------------------------------

    def _output(self, data: bytes) -> None:
        self._record(*self._lines.feed(data, found=self._found))

    def _record(self, raw: bytes, lines: tuple[str, ...]) -> None:
        if not lines:
            return
        error = self._log.write(raw)
        if error is not None and not self._log_failed:
            self._log_failed = True
            text = f"its log cannot be written: {error.strerror}"
            self._around.emit(Warned(name=self.spec.name, text=text))
        self._around.emit(LogLines(name=self.spec.name, lines=lines))

    def _found(self, marker: str, line: str) -> None:
        spec = self.spec
        for phase in spec.phases:
            fresh = self.ready_seconds is None and self.phase != phase.name
            if fresh and phase.marker == marker:
                self.phase = phase.name
                seconds = time.monotonic() - self._started
                self._around.emit(
                    PhaseReached(name=spec.name, phase=phase.name, line=line, seconds=seconds)
                )
        for signature in self._signatures:
            if signature.marker == marker and marker not in self._evidence:
                self._evidence[marker] = short(line)
                if signature.fatal:
                    self._doom_soon(signature.cause)
        if spec.compile_cache is not None and marker in spec.compile_cache.artifact_markers:
            artifact = compiled.artifact_in(line, marker)
            if artifact is not None:
                self._artifacts.append(artifact)

    def _doom_soon(self, cause: str) -> None:
        """End a run that said something fatal, when it had time to say more or to end itself."""

        def now() -> None:
            if not self.task.done():
                self._around.post(lc.Doomed(self.spec.name, cause))

        asyncio.get_running_loop().call_later(LAST_WORDS_S, now)

    # -- health ------------------------------------------------------

    async def _watch(self, child: Child) -> None:
        spec, post = self.spec, self._around.post
        await watch.until_ready(spec, self._http, any_answer=self._any_answer)
        # All below the shim: a listener that was forked twice is no child of the main process.
        other = None
        with contextlib.suppress(OSError):
            other = checks.foreign_listener(spec.port, tree(child.shim_pid))
        if other is not None:
            reason = (
                f"port {spec.port} is answered by another process, pid {other} "
                f"({checks.command_of(other)})"
            )
            post(lc.Doomed(spec.name, reason))
            return
        self._is_ready(child)
        await watch.while_serving(spec, self._http, post, any_answer=self._any_answer)

    def _is_ready(self, child: Child) -> None:
        spec = self.spec
        self.ready_seconds = time.monotonic() - self._started
        if spec.compile_cache is not None:
            key = spec.compile_cache.key
            compiled.remember(self._around.cache_dir, key, tuple(self._artifacts))
        self._around.post(lc.Ready(spec.name))
        self._around.emit(
            BecameReady(name=spec.name, pid=child.pid, seconds=self.ready_seconds, log=self.tail)
        )

    # -- the end -----------------------------------------------------

    def failure(self, old: Member, new: Member, now: float) -> Failed:
        """Say how this run failed, and write its crash report.

        `old` and `new` are the member before and after the step that saw its end.
        """
        what, how = "died", describe_status(self.child.status if self.child else None)
        if self._refused is not None:
            what, how = "was not started", self._refused
        elif old.doomed is not None:
            what, how = "was ended", old.doomed
        found = self._signature()
        cause, advice = (found.cause, found.advice) if found else (None, self._refused_hint)
        oom = crash.oom_count().rose_since(self._oom) if what == "died" else None
        if oom is not None:
            cause = f"the kernel killed for lack of memory ({oom})"
            advice = "a smaller --kv-cache, or fewer instances"
        failure = Failed(
            name=new.name,
            what=what,
            how=how,
            starting=old.ready_at is None,
            seconds=now - self._started,
            cause=cause,
            evidence=self._evidence[found.marker] if found else None,
            advice=advice,
            log_tail=self.tail[-TAIL_SHOWN:],
            retry_s=None if new.deadline is None else new.deadline - now,
            report=self._report(what, how, cause, oom, new) if self.child else None,
        )
        return failure

    def _signature(self) -> Signature | None:
        """Return the first signature, in the spec's order of belief, that the log holds."""
        return next((s for s in self._signatures if s.marker in self._evidence), None)

    def _report(
        self, what: str, how: str, cause: str | None, oom: str | None, member: Member
    ) -> Path | None:
        facts = {
            "name": member.name,
            "what": what,
            "how": how,
            "ready_seconds": self.ready_seconds,
            "seconds": round(time.monotonic() - self._started, 3),
            "cause": cause,
            "evidence": list(self._evidence.values()),
            "oom_evidence": oom,
            "restarts": member.restarts,
            "pid": self.child.pid if self.child else None,
        }
        return crash.write_report(
            self._around.log_dir,
            self.spec,
            facts=facts,
            environ=environment(self.spec, self._around.environ),
            log=self.tail,
        )


def _not_online(spec: LaunchSpec) -> str | None:
    """Say which CPUs of the spec are offline: numactl leaves them out without a word."""
    offline = spec.cpus - procfs.online_cpus() if spec.cpus else EMPTY
    return f"CPUs {offline} of the plan are not online" if offline else None
