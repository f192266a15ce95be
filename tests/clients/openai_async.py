"""OpenAI's asynchronous client: calls and streams at once on one event loop."""

import asyncio

import openai
import pytest

from golden import ANSWER, FOX, FOX_TEXT, FOX_TOKENS, MESSAGES
from server import DEADLINE, HTTP, MODEL


def run(work):
    """Runs `work(client)` on an event loop of its own, within the deadline."""

    async def within():
        async with openai.AsyncOpenAI(
            base_url=f"{HTTP}/v1", api_key="none", max_retries=0, timeout=DEADLINE
        ) as client:
            return await asyncio.wait_for(work(client), DEADLINE)

    return asyncio.run(within())


async def whole(client):
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    return answer.choices[0].message.content


async def streamed(client):
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def completed(client):
    answer = await client.completions.create(
        model=MODEL, prompt=FOX["prompt"], temperature=0, max_tokens=FOX_TOKENS
    )
    return answer.choices[0].text


def test_calls_and_streams_run_at_once():
    async def work(client):
        return await asyncio.gather(*(call(client) for call in [whole, streamed, completed] * 4))

    assert run(work) == [ANSWER, ANSWER, FOX_TEXT] * 4


def test_the_helper_streams():
    async def work(client):
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            return deltas, await stream.get_final_completion()

    deltas, final = run(work)
    assert "".join(deltas) == ANSWER
    assert (final.choices[0].message.role, final.choices[0].finish_reason) == ("assistant", "stop")


def test_models_are_listed():
    async def work(client):
        return [model.id async for model in client.models.list()]

    assert run(work) == [MODEL]


def test_a_cancelled_call_leaves_the_server_well():
    async def work(client):
        long = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        )
        started = asyncio.Event()

        async def read():
            async for _ in await long:
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await whole(client)

    assert run(work) == ANSWER


def test_faults_are_raised():
    async def work(client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_p=2, stream=True)
        return raised.value

    fault = run(work)
    assert (fault.status_code, fault.param) == (400, "top_p")
