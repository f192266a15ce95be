"""langchain-openai: a chat with a tool, streams, and answers in the shape of a type."""

import asyncio
from typing import Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from golden import ANSWER, COMPLETION_TOKENS, FOX, FOX_TEXT, FOX_TOKENS, PROMPT_TOKENS, QUESTION
from server import DEADLINE, HTTP, MODEL

ASK = [HumanMessage("What is 2 plus 3?")]


@tool
def add(left: Literal[1, 2, 3], right: Literal[1, 2, 3]) -> int:
    """Add two numbers"""
    return left + right


def chat(**arguments):
    arguments = {"temperature": 0, "max_tokens": 100, **arguments}
    return ChatOpenAI(
        model=MODEL, base_url=f"{HTTP}/v1", api_key="none", timeout=DEADLINE, max_retries=0, **arguments
    )


def test_a_chat():
    answer = chat().invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert (usage["input_tokens"], usage["output_tokens"]) == (PROMPT_TOKENS, COMPLETION_TOKENS)


def test_a_stream():
    whole = None
    for chunk in chat(stream_usage=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == ANSWER
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] == COMPLETION_TOKENS


def test_chats_at_once():
    async def work():
        return await asyncio.wait_for(chat().abatch([QUESTION] * 3), DEADLINE)

    assert [answer.content for answer in asyncio.run(work())] == [ANSWER] * 3


@pytest.mark.parametrize("tool_choice", ["any", "add"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_answered(tool_choice, streamed):
    model = chat().bind_tools([add], tool_choice=tool_choice, parallel_tool_calls=False)
    if streamed:
        asked = None
        for chunk in model.stream(ASK):
            asked = chunk if asked is None else asked + chunk
    else:
        asked = model.invoke(ASK)
    assert asked.invalid_tool_calls == []
    (call,) = asked.tool_calls
    assert call["name"] == "add" and call["id"]
    result = add.invoke(call)
    assert isinstance(result, ToolMessage) and result.tool_call_id == call["id"]
    again = chat(max_tokens=8).bind_tools([add], tool_choice="none").invoke([*ASK, asked, result])
    assert again.content and again.tool_calls == []


class Person(BaseModel):
    """A person"""

    name: Literal["Ann", "Bob"]
    adult: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_the_shape_of_a_type(method):
    person = chat().with_structured_output(Person, method=method).invoke("Describe a person")
    assert isinstance(person, Person)


def test_log_probabilities():
    content = chat(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(content) == COMPLETION_TOKENS
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_a_plain_completion():
    arguments = {"temperature": 0, "max_tokens": FOX_TOKENS, "timeout": DEADLINE, "max_retries": 0}
    model = OpenAI(model=MODEL, base_url=f"{HTTP}/v1", api_key="none", **arguments)
    assert model.invoke(FOX["prompt"]) == FOX_TEXT
    assert "".join(model.stream(FOX["prompt"])) == FOX_TEXT


def test_faults_have_their_class():
    with pytest.raises(openai.BadRequestError) as raised:
        chat(top_p=2).invoke(QUESTION)
    assert raised.value.param == "top_p"
