"""tritonclient over HTTP: health, metadata, statistics and inference, in JSON and in binary; text by `requests`."""

import json

import numpy
import pytest
import requests
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from golden import FOX, FOX_TEXT, FOX_TOKENS
from server import DEADLINE, HTTP, MODEL

GREEDY = {"max_tokens": FOX_TOKENS, "temperature": 0.0, "exclude_input_in_output": True}


@pytest.fixture(scope="module")
def client():
    address = HTTP.removeprefix("http://")
    with triton.InferenceServerClient(address, connection_timeout=DEADLINE, network_timeout=DEADLINE) as client:
        yield client


def text_input(text, binary):
    tensor = triton.InferInput("text_input", [1], "BYTES")
    return tensor.set_data_from_numpy(numpy.array([text.encode()], dtype=object), binary_data=binary)


def ids_input(ids, binary):
    tensor = triton.InferInput("input0", [len(ids)], "UINT32")
    return tensor.set_data_from_numpy(numpy.array(ids, dtype=numpy.uint32), binary_data=binary)


def test_health(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("absent")


def test_metadata(client):
    server = client.get_server_metadata()
    assert server["name"] == "baton"
    assert {"binary_tensor_data", "parameters", "statistics", "model_configuration"} <= set(server["extensions"])
    model = client.get_model_metadata(MODEL)
    assert (model["name"], model["versions"]) == (MODEL, ["1"])
    inputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in model["inputs"]}
    outputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in model["outputs"]}
    assert inputs["text_input"] == ("BYTES", [1])
    assert outputs["text_output"][0] == "BYTES"
    with pytest.raises(InferenceServerException) as raised:
        client.get_model_metadata("absent")
    assert "absent" in raised.value.message()


def test_configuration(client):
    config = client.get_model_config(MODEL)
    assert config["name"] == MODEL
    assert {tensor["name"] for tensor in config["input"]} >= {"text_input"}
    assert config["model_transaction_policy"]["decoupled"] is True


@pytest.mark.parametrize("binary", [True, False])
def test_text_is_continued(client, binary):
    outputs = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    result = client.infer(
        MODEL, [text_input(FOX["prompt"], binary)], outputs=outputs, request_id="mine", parameters=GREEDY
    )
    # The client gives elements of JSON as they are, and elements of bytes as bytes.
    assert result.as_numpy("text_output").tolist() == [FOX_TEXT.encode() if binary else FOX_TEXT]
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("mine", MODEL)
    assert result.as_numpy("absent") is None


def test_every_output_comes_when_none_is_named(client):
    result = client.infer(MODEL, [text_input(FOX["prompt"], True)], parameters=GREEDY)
    named = {tensor["name"] for tensor in result.get_response()["outputs"]}
    assert "text_output" in named
    assert result.as_numpy("text_output").tolist() == [FOX_TEXT.encode()]


@pytest.mark.parametrize("binary", [True, False])
def test_tokens_are_continued(client, binary):
    outputs = [triton.InferRequestedOutput("output0", binary_data=binary)]
    result = client.infer(MODEL, [ids_input(FOX["prompt_ids"], binary)], outputs=outputs, parameters=GREEDY)
    assert result.as_numpy("output0").tolist() == [FOX["greedy_ids"][:FOX_TOKENS]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed(client, algorithm):
    result = client.infer(
        MODEL,
        [text_input(FOX["prompt"], True)],
        parameters=GREEDY,
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert result.as_numpy("text_output").tolist() == [FOX_TEXT.encode()]


def test_requests_run_at_once():
    address = HTTP.removeprefix("http://")
    with triton.InferenceServerClient(address, concurrency=4, network_timeout=DEADLINE) as client:
        pending = [
            client.async_infer(MODEL, [text_input(FOX["prompt"], True)], request_id=f"r{index}", parameters=GREEDY)
            for index in range(4)
        ]
        results = [request.get_result(timeout=DEADLINE) for request in pending]
    assert [result.get_response()["id"] for result in results] == ["r0", "r1", "r2", "r3"]
    assert {result.as_numpy("text_output")[0] for result in results} == {FOX_TEXT.encode()}


def test_statistics_count(client):
    def successes():
        (statistics,) = client.get_inference_statistics(MODEL)["model_stats"]
        assert (statistics["name"], statistics["version"]) == (MODEL, "1")
        return statistics["inference_stats"]["success"]["count"]

    before = successes()
    client.infer(MODEL, [text_input(FOX["prompt"], True)], parameters=GREEDY)
    assert successes() == before + 1


@pytest.mark.parametrize(
    ("model", "parameters", "word"),
    [
        ("absent", {}, "absent"),
        (MODEL, {"max_tokens": 0}, "max_tokens"),
        (MODEL, {"top_p": 2.0}, "top_p"),
        (MODEL, {"temperature": -1.0}, "temperature"),
    ],
)
def test_faults_are_raised(client, model, parameters, word):
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [text_input("x", True)], parameters=parameters)
    assert word in raised.value.message()
    assert raised.value.status().startswith("4")


def test_a_missing_input_and_a_wrong_type_are_named(client):
    with pytest.raises(InferenceServerException) as raised:
        other = triton.InferInput("other", [1], "INT32")
        client.infer(MODEL, [other.set_data_from_numpy(numpy.array([1], dtype=numpy.int32))])
    assert "text_input" in raised.value.message()
    with pytest.raises(InferenceServerException) as raised:
        wrong = triton.InferInput("text_input", [1], "INT32")
        client.infer(MODEL, [wrong.set_data_from_numpy(numpy.array([1], dtype=numpy.int32))])
    assert "BYTES" in raised.value.message()


def post(path, body, **arguments):
    # Triton's own tests send no content type.
    return requests.post(f"{HTTP}/v2/models/{MODEL}{path}", data=json.dumps(body), timeout=DEADLINE, **arguments)


@pytest.mark.parametrize("body", [{"parameters": {"max_tokens": FOX_TOKENS}}, {"max_tokens": FOX_TOKENS}])
def test_text_is_generated(body):
    answer = post("/generate", {"text_input": FOX["prompt"], **body})
    assert answer.status_code == 200
    answer = answer.json()
    assert (answer["text_output"], answer["model_name"]) == (FOX_TEXT, MODEL)
    with post("/generate_stream", {"text_input": FOX["prompt"], "stream": True, **body}, stream=True) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix(b"data:")) for line in stream.iter_lines() if line]
    assert len(events) == FOX_TOKENS
    assert "".join(event["text_output"] for event in events) == FOX_TEXT


def test_generate_faults_are_objects():
    for path in ("/generate", "/generate_stream"):
        fault = post(path, {"text_input": "x", "parameters": {"top_p": 2}})
        assert fault.status_code == 422
        assert fault.json()["error"].startswith("parameters.top_p")
