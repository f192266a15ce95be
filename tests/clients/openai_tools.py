"""OpenAI's client: tools, and answers that are parsed into types."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from golden import MESSAGES
from server import MODEL


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: Literal["Pittsburgh, PA", "Tokyo, JP"]
    unit: Literal["celsius", "fahrenheit"]


class Add(BaseModel):
    """Add two numbers"""

    left: Literal[1, 2, 3]
    right: Literal[1, 2, 3]


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
ADD = openai.pydantic_function_tool(Add, name="add")
TYPES = {"get_weather": GetWeather, "add": Add}
NAMED = {"type": "function", "function": {"name": "add"}}
ASK = [{"role": "user", "content": "What is the current weather in Pittsburgh, PA in fahrenheit?"}]


def chat(client, **arguments):
    arguments = {"messages": ASK, "tools": [WEATHER, ADD], "temperature": 0, "max_tokens": 100, **arguments}
    return client.chat.completions.create(model=MODEL, **arguments)


def checked(call):
    """The call's name, once its arguments are what the tool takes."""
    assert call.type == "function"
    assert call.id
    TYPES[call.function.name].model_validate_json(call.function.arguments)
    return call.function.name


def test_a_required_tool_is_called(client):
    choice = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert checked(call) in TYPES


def test_a_named_tool_is_called(client):
    choice = chat(client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert checked(call) == "add"


def test_no_tool_is_called_when_none_may_be(client):
    choice = chat(client, tool_choice="none", messages=MESSAGES, max_tokens=12).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")


def test_auto_is_text_or_calls(client):
    for arguments in ({}, {"tool_choice": "auto"}):
        choice = chat(client, **arguments).choices[0]
        if choice.finish_reason == "tool_calls":
            assert {checked(call) for call in choice.message.tool_calls} <= set(TYPES)
        else:
            assert choice.message.tool_calls is None
            assert choice.message.content


def test_several_calls_have_ids_of_their_own(client):
    choice = chat(client, tool_choice="required", temperature=1, seed=1, max_tokens=300).choices[0]
    calls = choice.message.tool_calls
    if choice.finish_reason == "tool_calls":
        assert all(checked(call) in TYPES for call in calls)
    assert len({call.id for call in calls}) == len(calls) >= 1


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_streamed_calls_are_those_of_the_whole(client, tool_choice):
    arguments = {"tool_choice": tool_choice, "parallel_tool_calls": False}
    whole = chat(client, **arguments)
    stream = list(chat(client, stream=True, stream_options={"include_usage": True}, **arguments))
    choices = [choice for chunk in stream for choice in chunk.choices]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    first, *rest = deltas
    assert (first.type, first.function.arguments) == ("function", "")
    assert first.id
    assert all((delta.id, delta.function.name) == (None, None) for delta in rest)
    assert len(rest) > 1, "arguments come piece by piece"
    (expected,) = whole.choices[0].message.tool_calls
    assert first.function.name == expected.function.name
    assert "".join(delta.function.arguments for delta in rest) == expected.function.arguments
    assert not any(choice.delta.content for choice in choices)
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    finishes = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert finishes == [whole.choices[0].finish_reason]
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_results_go_back_to_the_model(client):
    call = chat(client, tool_choice=NAMED).choices[0].message.tool_calls[0]
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]
    answer = chat(client, messages=messages, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content
    shorter = chat(client, messages=ASK, tool_choice="none", max_tokens=8)
    assert answer.usage.prompt_tokens > shorter.usage.prompt_tokens


def test_the_helper_streams_calls(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[ADD], tool_choice="required", temperature=0, max_tokens=100
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert final.choices[0].message.role == "assistant"
    assert isinstance(call.function.parsed_arguments, Add)
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta" and e.index == 0]
    assert "".join(event.arguments_delta for event in deltas) == call.function.arguments
    done = [e for e in events if e.type == "tool_calls.function.arguments.done" and e.index == 0]
    assert [event.arguments for event in done] == [call.function.arguments]


def test_parse_gives_typed_arguments(client):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


class Address(BaseModel):
    street: Literal["Main Street", "Side Street"]
    number: Literal[1, 2, 3]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    adult: bool
    addresses: tuple[Address, Address]


def test_parse_gives_a_typed_answer(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, temperature=1, seed=3, max_tokens=200
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)
    assert choice.message.parsed == Person.model_validate_json(choice.message.content)


def test_parse_raises_when_the_answer_is_cut(client):
    with pytest.raises(openai.LengthFinishReasonError) as raised:
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=3)
    assert raised.value.completion.usage.completion_tokens == 3


def test_json_object_is_an_object(client):
    text = '{"type": "json_object"} with one key'
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


@pytest.mark.parametrize(
    ("param", "arguments"),
    [
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "absent"}}}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("tools[0]", {"tools": [{"type": "function"}]}),
        ("tools[0].type", {"tools": [{"type": "browser", "function": {"name": "x"}}]}),
        ("response_format", {"tools": [], "response_format": NONSENSE}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_faulty_field_is_a_bad_request(client, param, arguments, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, stream=stream, **arguments)
    assert raised.value.param.startswith(param)
