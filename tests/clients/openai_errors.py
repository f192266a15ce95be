"""OpenAI's client: which class of error each fault is, and what it carries."""

import openai
import pytest

from golden import ANSWER, MESSAGES
from server import DEADLINE, HTTP, MODEL


def chat(client, **arguments):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **arguments})


FAULTS = [
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "warm"}),
    ("top_p", {"top_p": 1.5}),
    ("n", {"n": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("frequency_penalty", {"frequency_penalty": 3}),
    ("presence_penalty", {"presence_penalty": -3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("stop[1]", {"stop": ["a", 5]}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("param", "arguments"), FAULTS)
def test_a_faulty_field_is_a_bad_request(client, param, arguments, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, stream=stream, **arguments)
    fault = raised.value
    assert (fault.status_code, fault.type) == (400, "invalid_request_error")
    assert fault.param.startswith(param)
    assert fault.body["message"].startswith(fault.param)
    assert fault.body["message"] in fault.message
    assert fault.response.headers["content-type"] == "application/json"


def test_a_picture_is_named_and_refused(client):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, messages=messages)
    assert raised.value.param.startswith("messages[0].content[1]")
    assert "image_url" in raised.value.message and "text only" in raised.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_has_its_code(client, stream):
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, messages=long, stream=stream)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(client, stream):
    with pytest.raises(openai.NotFoundError) as raised:
        chat(client, model="gpt-4o", stream=stream)
    fault = raised.value
    assert (fault.status_code, fault.code, fault.param) == (404, "model_not_found", "model")
    assert "gpt-4o" in fault.message


def test_an_unknown_route_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(model=MODEL, input="Hello")
    assert raised.value.code == "unknown_url"


def test_a_body_beyond_the_limit_is_refused(client):
    with pytest.raises(openai.APIStatusError) as raised:
        chat(client, messages=[{"role": "user", "content": "x" * (33 << 20)}])
    assert raised.value.status_code == 413


def test_bytes_that_are_no_json_are_refused(client):
    for body in (b'{"messages": [', b'{"messages": "\\ud800"}', b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(openai.BadRequestError) as raised:
            client.post("/chat/completions", cast_to=object, content=body)
        assert raised.value.type == "invalid_request_error"


def test_a_client_that_does_not_wait_raises_its_own_error(client):
    with pytest.raises(openai.APITimeoutError):
        chat(client, timeout=0.001)
    assert chat(client, temperature=0, max_tokens=20).choices[0].message.content == ANSWER


def test_what_cannot_be_mended_is_not_repeated():
    tried = []

    def count(request):
        tried.append(request.headers["x-stainless-retry-count"])

    transport = openai.DefaultHttpxClient(event_hooks={"request": [count]})
    with openai.OpenAI(
        base_url=f"{HTTP}/v1", api_key="none", max_retries=2, timeout=DEADLINE, http_client=transport
    ) as client:
        with pytest.raises(openai.BadRequestError):
            chat(client, temperature=3)
        with pytest.raises(openai.NotFoundError):
            chat(client, model="gpt-4o")
    assert tried == ["0", "0"]
