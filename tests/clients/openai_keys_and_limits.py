"""A gateway that wants a key and lets one request run at a time: which errors clients see."""

import os

import grpc
import openai
import pytest
import requests

from golden import ANSWER, MESSAGES
from server import DEADLINE, GRPC, HTTP, MODEL

KEY = os.environ["BATON_KEY"]


def client_with(key, **arguments):
    arguments = {"max_retries": 0, "timeout": DEADLINE, **arguments}
    return openai.OpenAI(base_url=f"{HTTP}/v1", api_key=key, **arguments)


def chat(client, **arguments):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **arguments)


def test_the_key_opens():
    with client_with(KEY) as client:
        assert chat(client).choices[0].message.content == ANSWER
        assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
def test_another_key_does_not(stream):
    with client_with("another") as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            chat(client, stream=stream)
        assert raised.value.status_code == 401
        assert raised.value.type == "invalid_request_error"
        assert raised.value.code == "invalid_api_key"
        assert KEY not in raised.value.message
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_other_routes_want_it_too():
    routes = {
        "/generate": {"prompt": "x", "max_tokens": 1},
        f"/v2/models/{MODEL}/generate": {"text_input": "x", "parameters": {"max_new_tokens": 1}},
    }
    for route, body in routes.items():
        refused = requests.post(HTTP + route, json=body, timeout=DEADLINE)
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str)
        headers = {"Authorization": f"Bearer {KEY}"}
        assert requests.post(HTTP + route, json=body, headers=headers, timeout=DEADLINE).status_code == 200
    assert requests.get(f"{HTTP}/v2/health/ready", timeout=DEADLINE).status_code == 200


def test_so_does_grpc():
    with grpc.insecure_channel(GRPC) as channel:
        call = channel.unary_unary("/baton.v1.GenerationService/ListServedModels")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=DEADLINE)
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        named = [("authorization", f"Bearer {KEY}")]
        assert MODEL.encode() in call(b"", timeout=DEADLINE, metadata=named)


def test_one_too_many_is_told_to_come_again():
    tried = []
    transport = openai.DefaultHttpxClient(
        event_hooks={"request": [lambda request: tried.append(request.headers["x-stainless-retry-count"])]}
    )
    with client_with(KEY) as client, client_with(KEY, max_retries=1, http_client=transport) as patient:
        long = {"stream": True, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        with chat(client, **long) as running:
            next(iter(running))
            with pytest.raises(openai.RateLimitError) as raised:
                chat(client)
            assert raised.value.status_code == 429
            assert int(raised.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError):
                chat(patient)
        assert tried == ["0", "1"]
