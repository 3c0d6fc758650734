"""A stand-in engine that misbehaves on request.   engine.py PORT (0: any; printed on stdout)

What it does is told by the request's own JSON (`"do": {...}`) or, for the next requests whatever
they say, by POST /_do {"do": {...} | null, "times": n} straight to it; there too what it says at
/v1/models and /metrics instead of sense ({"/metrics": text}). GET /_seen: what it saw.

do: prefill_s (before anything), head_first (send the head, then prefill), status, headers, type,
events, gap_s, text, stamp (text is the time of writing), body_bytes, framing (chunked, length,
close), split (write events in halves), end (done, no-done, fin, rst, exit, half-event, hang,
engine-error), extra (bytes after the end), raw (latin-1 bytes instead of all this, then end).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from typing import Any

SEEN: dict[str, Any] = {
    "requests": 0, "running": 0, "cancelled": 0, "cancelled_at": 0.0, "heads": [], "bodies": [],
    "probes": 0, "connections": 0,
}  # fmt: skip
OVERRIDE: dict[str, Any] = {
    "do": None, "times": 0, "health": 200, "idle_s": None, "/v1/models": None, "/metrics": None,
}  # fmt: skip
MODEL = "tiny"
CONTROL = ("/_do", "/_seen", "/health", "/v1/models", "/metrics")


def event(i: int, text: str, chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        choice["delta"] = {"content": text} if i else {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion.chunk" if chat else "text_completion"
    data = {"id": f"r{i}", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class Engine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None
        SEEN["connections"] += 1
        self.idle()

    def idle(self) -> None:
        self.timer = None
        if OVERRIDE["idle_s"] is not None:
            self.timer = asyncio.get_running_loop().call_later(OVERRIDE["idle_s"], self.expire)

    def expire(self) -> None:
        if self.task is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.task is None:
            self.next()

    def next(self) -> None:
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        fields = {}
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip()
        size = int(fields.get(b"content-length", b"0"))
        if len(rest) < size:
            return
        body, self.buffer = rest[:size], rest[size:]
        if self.timer:
            self.timer.cancel()
        self.task = asyncio.get_running_loop().create_task(self.answer(head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        SEEN["connections"] -= 1
        if self.task is not None and not self.task.done():
            self.task.cancel()

    async def answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        if path == "/health" and OVERRIDE["health"] == 0:
            SEEN["probes"] += 1
            return  # silence, the connection stays
        if path in CONTROL and method != "OPTIONS":
            self.control(path, body, head)
        else:
            SEEN["requests"] += 1
            SEEN["heads"] = [*SEEN["heads"][-20:], head.decode("latin-1")]
            SEEN["bodies"] = [*SEEN["bodies"][-5:], len(body)]
            SEEN["running"] += 1
            try:
                await self.work(method, path, body, head)
            except asyncio.CancelledError:
                SEEN["cancelled"] += 1
                SEEN["cancelled_at"] = time.monotonic()
                return
            finally:
                SEEN["running"] -= 1
        self.task = None
        if self.transport.is_closing():
            return
        if b"connection: close" in head.lower():
            self.transport.close()
            return
        self.idle()
        if self.buffer:
            self.next()

    def control(self, path: str, body: bytes, head: bytes) -> None:
        status, out = 200, b"{}"
        if path == "/_do":
            OVERRIDE.update(json.loads(body))
        elif path == "/_seen":
            out = json.dumps(SEEN).encode()
        elif path == "/health":
            SEEN["probes"] += 1
            status = OVERRIDE["health"]
        elif OVERRIDE.get(path) is not None:
            out = OVERRIDE[path].encode("latin-1")
        elif path == "/v1/models":
            ids = [MODEL, *sys.argv[2:]]
            out = json.dumps(
                {"object": "list", "data": [{"id": i, "object": "model"} for i in ids]}
            )
            out = out.encode()
        else:
            out = (
                b"# HELP vllm:num_requests_running Running.\n"
                b"# TYPE vllm:num_requests_running gauge\n"
                b'vllm:num_requests_running{engine="0",model_name="tiny"} %d\n'
                b"# HELP vllm:ttft Time.\n# TYPE vllm:ttft histogram\n"
                b'vllm:ttft_bucket{le="+Inf"} 1\nvllm:ttft_sum 2\nvllm:ttft_count 1\n'
            ) % SEEN["running"]
        cors = b"access-control-allow-origin: *\r\n" if b"\r\norigin: " in head else b""
        self.transport.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
            % (status, cors, len(out))
            + out
        )

    async def work(self, method: str, path: str, body: bytes, head: bytes) -> None:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = {}
        if not isinstance(asked, dict):
            asked = {}
        do = asked.get("do") or {}
        if OVERRIDE["do"] is not None and OVERRIDE["times"] != 0:
            do = OVERRIDE["do"]
            OVERRIDE["times"] -= 1
        chat = "chat" in path
        stream = bool(asked.get("stream")) and "body_bytes" not in do
        write = self.transport.write
        if do.get("end") == "exit" and not do.get("events") and not do.get("head_first"):
            await asyncio.sleep(do.get("prefill_s", 0))
            os._exit(9)
        framing = do.get("framing", "chunked" if stream else "length")
        status = do.get("status", 200)
        if not do.get("head_first"):
            await asyncio.sleep(do.get("prefill_s", 0))
        if "raw" in do:
            write(do["raw"].encode("latin-1"))
            await self.finish(do.get("end", "keep"))
            return
        if stream and status == 200:
            payloads = [event(i, do.get("text", f" t{i}"), chat)
                        for i in range(do.get("events", asked.get("max_tokens", 3)))]  # fmt: skip
            kind = b"text/event-stream; charset=utf-8"
        else:
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": "hello"}
            if chat:
                choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            name = "chat.completion" if chat else "text_completion"
            text = {"id": "x", "object": name, "model": MODEL, "created": 1, "choices": [choice]}
            out = json.dumps(text).encode()
            if status >= 400:
                out = json.dumps({"error": {"message": "no", "type": "x", "code": status}}).encode()
            if "body_bytes" in do:
                out = b"x" * do["body_bytes"]
            payloads, kind = [out], b"application/json"
            if do.get("end") in ("fin", "rst", "exit", "hang") and len(out) > 1:
                payloads = [out[: len(out) // 2]]
        fields = b"content-type: %b\r\n" % (do["type"].encode() if "type" in do else kind)
        for name, value in do.get("headers", {}).items():
            fields += b"%b: %b\r\n" % (name.encode(), value.encode())
        echo = [v for v in head.split(b"\r\n") if v.lower().startswith(b"x-tag:")]
        fields += b"".join(v + b"\r\n" for v in echo)
        fields += b"x-peer: %d\r\n" % self.transport.get_extra_info("peername")[1]
        if framing == "chunked":
            fields += b"transfer-encoding: chunked\r\n"
        elif framing == "length":
            size = len(out) if not stream or status != 200 else sum(map(len, payloads)) + 14
            fields += b"content-length: %d\r\n" % size
        opening = b"HTTP/1.1 %d Told\r\n%b\r\n" % (status, fields)
        if do.get("head_first"):
            write(opening)
            opening = b""
            await asyncio.sleep(do.get("prefill_s", 0))
        if method == "HEAD":
            write(opening)
            return

        def frame(data: bytes) -> bytes:
            return b"%x\r\n%b\r\n" % (len(data), data) if framing == "chunked" else data

        end = do.get("end", "done")
        for payload in payloads:
            if do.get("stamp"):
                payload = event(0, repr(time.monotonic()), chat)
            if do.get("split") and len(payload) > 3:
                data = frame(payload)
                write(opening + data[: len(data) // 2])
                await asyncio.sleep(0.01)
                write(data[len(data) // 2 :])
            else:
                for at in range(0, len(payload), 262_144):
                    write(opening + frame(payload[at : at + 262_144]))
                    opening = b""
                    while self.transport.get_write_buffer_size() > 1_000_000:
                        await asyncio.sleep(0.005)
            opening = b""
            if do.get("gap_s"):
                await asyncio.sleep(do["gap_s"])
        tail = opening
        if end == "half-event":
            tail += frame(b'data: {"id": "half')
            end = "fin"
        elif end == "engine-error":
            error = {"error": {"message": "EngineCore encountered an issue", "code": 500}}
            tail += frame(b"data: " + json.dumps(error).encode() + b"\n\n")
            end = "done"
        if end == "done":
            if stream and status == 200:
                tail += frame(b"data: [DONE]\n\n")
            end = "keep"
        elif end == "no-done":
            end = "keep"
        if end == "keep" and framing == "chunked":
            tail += b"0\r\n\r\n"
        write(tail + do.get("extra", "").encode("latin-1"))
        await self.finish("fin" if end == "keep" and framing == "close" else end)

    async def finish(self, end: str) -> None:
        if end == "hang":
            await asyncio.sleep(3600)
        if end in ("fin", "rst", "exit"):
            while self.transport.get_write_buffer_size():
                await asyncio.sleep(0.002)
        if end == "fin":
            self.transport.close()
        elif end == "rst":
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif end == "exit":
            os._exit(9)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        Engine, "127.0.0.1", int(sys.argv[1]), backlog=4096, reuse_address=True
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
