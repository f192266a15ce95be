"""OpenAI's client: streams, by `create(stream=True)` and by the `.stream()` helper."""

import pytest
from pydantic import BaseModel

from golden import ANSWER, COMPLETION_TOKENS, MESSAGES, PROMPT_TOKENS
from server import MODEL

USAGE = (PROMPT_TOKENS, COMPLETION_TOKENS, PROMPT_TOKENS + COMPLETION_TOKENS)


def chunks(client, **arguments):
    arguments = {"temperature": 0, "messages": MESSAGES, **arguments}
    return list(client.chat.completions.create(model=MODEL, stream=True, **arguments))


def totals(usage):
    return (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def test_a_stream_is_role_contents_and_finish(client):
    stream = chunks(client)
    first = stream[0]
    assert first.id.startswith("chatcmpl-")
    assert {(chunk.id, chunk.created, chunk.model) for chunk in stream} == {(first.id, first.created, MODEL)}
    assert {chunk.object for chunk in stream} == {"chat.completion.chunk"}
    assert [chunk.usage for chunk in stream] == [None] * len(stream)
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert len(choices) == len(stream)
    assert {choice.index for choice in choices} == {0}
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert [choice.delta.role for choice in choices[1:]] == [None] * (len(choices) - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_usage_comes_last_when_asked_for(client):
    *before, last = chunks(client, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in before] == [None] * len(before)
    assert all("usage" in chunk.model_fields_set for chunk in before)
    assert (last.choices, totals(last.usage)) == ([], USAGE)


def test_each_choice_finishes_once(client):
    stream = chunks(client, n=2, temperature=1, seed=3, max_tokens=6, stream_options={"include_usage": True})
    choices = [choice for chunk in stream for choice in chunk.choices]
    for index in (0, 1):
        mine = [choice for choice in choices if choice.index == index]
        assert [choice.delta.role for choice in mine if choice.delta.role] == ["assistant"]
        finishes = [choice.finish_reason for choice in mine if choice.finish_reason]
        assert len(finishes) == 1 and mine[-1].finish_reason == finishes[0]
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, temperature=1, seed=3, max_tokens=6
    )
    streamed = ["".join(c.delta.content or "" for c in choices if c.index == index) for index in (0, 1)]
    assert streamed == [choice.message.content for choice in whole.choices]
    assert totals(stream[-1].usage) == totals(whole.usage)


def test_log_probabilities_are_those_of_the_whole(client):
    arguments = {"logprobs": True, "top_logprobs": 2}
    stream = chunks(client, **arguments)
    streamed = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **arguments)
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == COMPLETION_TOKENS
    assert stream[-1].choices[0].finish_reason == "stop"


def test_stop_strings_leave_no_trace(client):
    stream = chunks(client, stop="is Tokyo")
    contents = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(contents) == "The capital of Japan "
    assert stream[-1].choices[0].finish_reason == "stop"


def test_the_helper_puts_an_answer_together(client):
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == ANSWER
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.content == ANSWER
    logprobs = [entry for event in events if event.type == "logprobs.content.delta" for entry in event.content]
    assert len(logprobs) == COMPLETION_TOKENS
    (choice,) = final.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.finish_reason, totals(final.usage)) == ("stop", USAGE)


class City(BaseModel):
    name: str
    inhabitants: int


def test_the_helper_parses_json(client):
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, response_format=City, max_tokens=60
    ) as stream:
        for event in stream:
            pass
        final = stream.get_final_completion()
    parsed = final.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert parsed == City.model_validate_json(final.choices[0].message.content)


def test_a_stream_can_be_left(client):
    for _ in range(3):
        with client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        ) as stream:
            next(iter(stream))
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == ANSWER


def test_a_raw_stream_is_an_event_stream(client):
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("include_usage", [False, True])
def test_obfuscation_is_an_option_without_effect(client, include_usage):
    options = {"include_usage": include_usage, "include_obfuscation": False}
    stream = chunks(client, stream_options=options)
    contents = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(contents) == ANSWER
