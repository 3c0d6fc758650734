"""Session: one running `up`, from the claim of its name to the last process gone.

Joins the supervisor (processes), placement (where the kernel has them), the control socket
(commands of other zenlaunch processes) and a screen. Decides nothing about processes. The kernel's
view is taken in full once at each ready, then cheaply from time to time; a drift is told once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from zenlaunch import commands, control, events, observe, supervisor
from zenlaunch.deployments import Claim
from zenlaunch.lifecycle import SERVING, State
from zenlaunch.placement import Placement, prove
from zenlaunch.screens import UpScreen
from zenlaunch.spec import LaunchSpec
from zenlaunch.supervisor import Deployment, Supervisor


class Session:
    """A claimed deployment that runs; `run` returns when nothing of it is left.

    `url` is where clients reach the proxy. `question`, if any, is put to it once all is ready.
    """

    def __init__(
        self,
        deployment: Deployment,
        claim: Claim,
        *,
        url: str,
        screen: UpScreen,
        question: str | None = None,
        look_every_s: float,
    ) -> None:
        self._deployment = deployment
        self._claim = claim
        self._url = url
        self._screen = screen
        self._question = question
        self._look_every_s = look_every_s
        self._specs = {spec.name: spec for spec in deployment.instances}
        self._ready: dict[str, events.BecameReady] = {}
        self._placement = Placement(self._specs)
        self._held: list[Supervisor] = []
        self._cut_off = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> events.Outcome:
        """Run until stopped or failed."""
        async with control.control(self._claim.control_socket, self._handle):
            watching = asyncio.get_running_loop().create_task(self._watch())
            try:
                return await supervisor.run(
                    self._deployment, on_event=self._on_event, on_start=self._held.append
                )
            finally:
                watching.cancel()
                await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    # -- what happens ------------------------------------------------

    def _on_event(self, event: events.Event) -> None:
        self._screen.handle(event)
        match event:
            case events.Spawned():
                self._claim.remember_session(event.session)
            case events.BecameReady(name=name) if name in self._specs:
                self._ready[name] = event
                self._go(self._prove(event))
            case events.AllReady(seconds=seconds):
                self._go(self._announce(seconds))
            case events.StateChanged(name=name, state=state) if name in self._specs:
                if state not in (*SERVING, State.DRAINING):
                    self._ready.pop(name, None)
                    self._placement.forget(name)
                self._export()
            case _:
                pass

    async def _prove(self, event: events.BecameReady) -> None:
        spec = self._specs[event.name]
        proof = await self._proof(spec, event)
        if self._ready.get(event.name) is not event:  # it has ended meanwhile
            return
        self._placement.proved(event.name, proof)
        self._export()
        self._screen.show_proof(event.name, proof, spec.mem_nodes)

    async def _proof(self, spec: LaunchSpec, ready: events.BecameReady) -> observe.Verification:
        environ = self._deployment.environ
        return await prove(spec, ready.pid, ready.log, os.environ if environ is None else environ)

    async def _announce(self, seconds: float) -> None:
        """Say where it serves, after the proofs that are under way."""
        me = asyncio.current_task()
        await asyncio.gather(*(t for t in self._tasks if t is not me), return_exceptions=True)
        self._screen.settle()
        self._screen.say(f"ready after {seconds:.0f} s: {self._url}/v1   (Ctrl-C stops everything)")
        if self._question is not None:
            self._screen.say(await asyncio.to_thread(ask, self._url, self._question))

    async def _watch(self) -> None:
        """Look at each ready instance from time to time; tell what became worse."""
        while True:
            await asyncio.sleep(self._look_every_s)
            for name, event in list(self._ready.items()):
                spec = self._specs[name]
                look = await asyncio.to_thread(observe.look, spec, event.pid)
                if self._ready.get(name) is not event:
                    continue
                worse = self._placement.looked(name, look)
                if worse is not None:
                    self._screen.say(f"warning  {name}: {worse}", "yellow")
            self._export()

    def _export(self) -> None:
        """Let the proxy tell Prometheus. A full disk costs the figures, not the engines."""
        if not self._held:
            return
        try:
            self._placement.write(self._claim.metrics_file, self._held[0].restarts)
        except FileNotFoundError:
            if not self._cut_off:
                self._cut_off = True
                self._screen.say(
                    f"warning  the runtime folder {self._claim.folder} has gone: no command "
                    f"reaches this deployment any more; `kill {os.getpid()}` ends it",
                    "yellow",
                )
        except OSError:
            pass

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what others ask ---------------------------------------------

    async def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("do") == "verify":
            return {"verify": await self._verify()}
        about = {"name": self._deployment.name, "url": self._url, "pid": os.getpid()}
        return await commands.answer(self._held[0], request, about=about, seen=self._placement.seen)

    async def _verify(self) -> dict[str, Any]:
        """Compare each ready instance with its spec, now and in full."""
        ready = {
            row.name: row
            for row in self._held[0].status()
            if row.state in (State.READY, State.UNREADY, State.DRAINING)
        }

        async def one(name: str, spec: LaunchSpec) -> dict[str, Any]:
            event = self._ready.get(name)
            if name not in ready or event is None:
                return {"ok": False, "problems": [f"{name} is not ready"]}
            return (await self._proof(spec, event)).to_dict()

        found = await asyncio.gather(*(one(*item) for item in self._specs.items()))
        return dict(zip(self._specs, found, strict=True))


def ask(url: str, question: str) -> str:
    """Put one chat question through the proxy; return the answer, or what went wrong."""
    import httpx

    try:
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            answer = client.post(
                "/v1/chat/completions",
                json={
                    "model": model,
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": 32,
                },
            ).raise_for_status()
            text = answer.json()["choices"][0]["message"]["content"]
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as e:
        return f"no answer to {question!r}: {e}"
    return f"{question!r} -> {answer.headers.get('x-zenlaunch-upstream', '?')}: {text!r}"
