"""litellm: chats, streams and a tool, by its OpenAI-compatible provider, and text by its Triton provider."""

import json

import litellm
import pytest

from golden import ANSWER, COMPLETION_TOKENS, MESSAGES, PROMPT_TOKENS
from server import DEADLINE, HTTP, MODEL

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "enum": ["Pittsburgh, PA", "Tokyo, JP"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the current weather in Tokyo?"}]


def chat(**arguments):
    arguments = {"messages": MESSAGES, "temperature": 0, **arguments}
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{HTTP}/v1",
        api_key="none",
        timeout=DEADLINE,
        max_retries=0,
        **arguments,
    )


def test_a_chat():
    answer = chat()
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, COMPLETION_TOKENS)


def test_a_stream():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    contents = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(contents) == ANSWER
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == ["stop"]
    assert chunks[-1].usage.completion_tokens == COMPLETION_TOKENS
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(stream):
    arguments = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100, "parallel_tool_calls": False}
    answer = chat(messages=ASK, stream=stream, **arguments)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASK)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    values = json.loads(call.function.arguments)
    assert values["location"] in ("Pittsburgh, PA", "Tokyo, JP")
    assert values["unit"] in ("celsius", "fahrenheit")
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "21 degrees"}
    again = chat(messages=[*ASK, choice.message, result], tools=[TOOL], tool_choice="none", max_tokens=8)
    assert again.choices[0].message.content


def test_faults_have_their_class():
    with pytest.raises(litellm.BadRequestError) as raised:
        chat(top_p=2)
    assert raised.value.status_code == 400 and "top_p" in raised.value.message
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/absent", messages=MESSAGES, api_base=f"{HTTP}/v1", api_key="none", max_retries=0
        )


@pytest.mark.parametrize("stream", [False, True])
def test_triton_generates(stream):
    answer = litellm.completion(
        model="triton/text",
        messages=[{"role": "user", "content": "The capital of Japan is"}],
        api_base=f"{HTTP}/v2/models/{MODEL}/generate",
        max_tokens=2,
        timeout=DEADLINE,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text == " Tokyo."
