"""The real `openai` client against the proxy: whole, streamed, sync, async, left, timed out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from .harness import Engine, Proxy, until

Pair = tuple[Proxy, list[Engine]]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(shared: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{shared[0].port}/v1", api_key="x",
                       max_retries=0) as one:  # fmt: skip
        yield one


def running(engines: list[Engine]) -> int:
    return sum(int(engine.seen()["running"]) for engine in engines)


def test_models_and_whole_answers(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == "hello"
    assert chat._request_id
    text = client.completions.create(model="tiny", prompt="p")
    assert text.choices[0].text == "hello"


def test_streams(client: openai.OpenAI) -> None:
    for _ in range(3):
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True,
                                              max_tokens=5)  # type: ignore[call-overload]  # fmt: skip
        assert "".join(c.choices[0].delta.content or "" for c in chat) == " t0 t1 t2 t3 t4"
        text = client.completions.create(model="tiny", prompt="p", stream=True, max_tokens=5)
        assert "".join(c.choices[0].text for c in text) == " t0 t1 t2 t3 t4"


def test_a_broken_stream_raises(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="p", stream=True,
        extra_body={"do": {"events": 2, "end": "rst", "gap_s": 0.01}},
    )  # fmt: skip
    texts = []
    with pytest.raises(openai.APIError, match="ended before its end"):
        texts.extend(chunk.choices[0].text for chunk in stream)


def test_a_broken_whole_answer_is_an_internal_server_error(client: openai.OpenAI) -> None:
    do = {"raw": "HTTP/1.1 200 OK\r\n", "end": "fin"}
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="p", extra_body={"do": do})
    assert caught.value.status_code == 502


@pytest.mark.parametrize("stream", [True, False])
def test_timed_out_in_prefill(shared: Pair, client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="tiny", prompt="p", stream=stream, extra_body={"do": {"prefill_s": 60}})  # type: ignore[call-overload]  # fmt: skip
    until(lambda: running(shared[1]) == 0, within_s=1)


def test_stream_closed_early(shared: Pair, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="p", stream=True, extra_body={"do": {"events": 9999, "gap_s": 0.01}}
    )
    next(iter(stream))
    stream.close()
    until(lambda: running(shared[1]) == 0, within_s=1)


def test_async_many_at_once_and_cancelled(shared: Pair) -> None:
    proxy, engines = shared

    async def main() -> None:
        base = f"http://127.0.0.1:{proxy.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as one:

            async def ask(at: int) -> str:
                stream = await one.completions.create(
                    model="tiny", prompt="p", stream=True, max_tokens=4,
                    extra_body={"do": {"text": f"<{at}>", "gap_s": 0.005}},
                )  # fmt: skip
                return "".join([chunk.choices[0].text async for chunk in stream])

            answers = await asyncio.gather(*(ask(at) for at in range(50)))
            assert answers == [f"<{at}>" * 3 for at in range(50)] or answers == [
                f"<{at}>" * 4 for at in range(50)]  # fmt: skip
            tasks = [asyncio.create_task(one.completions.create(
                model="tiny", prompt="p", extra_body={"do": {"prefill_s": 60}}))
                for _ in range(10)]  # fmt: skip
            while running(engines) < 10:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            until(lambda: running(engines) == 0, within_s=1)

    asyncio.run(main())
