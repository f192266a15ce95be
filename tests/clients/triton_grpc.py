"""tritonclient over gRPC: health, metadata, statistics, inference, and streams of many requests at once."""

import queue

import grpc
import numpy
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from golden import FOX, FOX_TEXT, FOX_TOKENS, case
from server import DEADLINE, GRPC, MODEL

GREEDY = {"max_tokens": FOX_TOKENS, "temperature": 0.0, "exclude_input_in_output": True}
STREAMED = {**GREEDY, "stream": True}
FRENCH = case("Les sanglots")


@pytest.fixture
def client():
    with triton.InferenceServerClient(GRPC) as client:
        yield client


def text_input(text):
    tensor = triton.InferInput("text_input", [1], "BYTES")
    return tensor.set_data_from_numpy(numpy.array([text.encode()], dtype=object))


def ids_input(ids):
    tensor = triton.InferInput("input0", [len(ids)], "UINT32")
    return tensor.set_data_from_numpy(numpy.array(ids, dtype=numpy.uint32))


def text_of(result):
    (text,) = result.as_numpy("text_output").tolist()
    return text.decode()


def is_final(response):
    return response.parameters["triton_final_response"].bool_param


class Answers:
    """What the callback of a stream or of a call was given, in order."""

    def __init__(self):
        self.queue = queue.Queue()

    def __call__(self, result, error):
        self.queue.put((result, error))

    def next(self):
        return self.queue.get(timeout=DEADLINE)

    def until_final(self, ids):
        """The results of these requests, by id, up to the last of each."""
        found = {id: [] for id in ids}
        order = []
        open_ids = set(ids)
        while open_ids:
            result, error = self.next()
            assert error is None
            response = result.get_response()
            found[response.id].append(result)
            order.append(response.id)
            if is_final(response):
                open_ids.remove(response.id)
        return found, order


def test_health(client):
    assert client.is_server_live(client_timeout=DEADLINE)
    assert client.is_server_ready(client_timeout=DEADLINE)
    assert client.is_model_ready(MODEL, client_timeout=DEADLINE)
    assert not client.is_model_ready("absent", client_timeout=DEADLINE)


def test_metadata_and_configuration(client):
    server = client.get_server_metadata(client_timeout=DEADLINE)
    assert server.name == "baton" and server.version
    model = client.get_model_metadata(MODEL, client_timeout=DEADLINE)
    assert (model.name, list(model.versions)) == (MODEL, ["1"])
    assert [(t.datatype, list(t.shape)) for t in model.inputs if t.name == "text_input"] == [("BYTES", [1])]
    assert [t.datatype for t in model.outputs if t.name == "text_output"] == ["BYTES"]
    config = client.get_model_config(MODEL, client_timeout=DEADLINE).config
    assert config.name == MODEL
    assert config.model_transaction_policy.decoupled
    index = client.get_model_repository_index(client_timeout=DEADLINE)
    assert [(m.name, m.version, m.state) for m in index.models] == [(MODEL, "1", "READY")]
    with pytest.raises(InferenceServerException) as raised:
        client.get_model_metadata("absent", client_timeout=DEADLINE)
    assert raised.value.status() == "StatusCode.NOT_FOUND"


def test_text_and_tokens_are_continued(client):
    result = client.infer(
        MODEL, [text_input(FOX["prompt"])], request_id="mine", parameters=GREEDY, client_timeout=DEADLINE
    )
    assert text_of(result) == FOX_TEXT
    assert (result.get_response().id, result.get_response().model_name) == ("mine", MODEL)
    parameters = {**GREEDY, "exclude_input_in_output": False}
    result = client.infer(MODEL, [text_input(FOX["prompt"])], parameters=parameters, client_timeout=DEADLINE)
    assert text_of(result) == FOX["prompt"] + FOX_TEXT
    outputs = [triton.InferRequestedOutput("output0")]
    result = client.infer(
        MODEL, [ids_input(FOX["prompt_ids"])], outputs=outputs, parameters=GREEDY, client_timeout=DEADLINE
    )
    assert result.as_numpy("output0").tolist() == [FOX["greedy_ids"][:FOX_TOKENS]]
    assert result.as_numpy("text_output") is None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_messages_may_be_compressed(client, algorithm):
    arguments = {"parameters": GREEDY, "compression_algorithm": algorithm, "client_timeout": DEADLINE}
    assert text_of(client.infer(MODEL, [text_input(FOX["prompt"])], **arguments)) == FOX_TEXT


def test_messages_may_be_large(client):
    # Beyond the 4 MiB that gRPC allows by default: it arrives, and is refused for its length in tokens.
    with pytest.raises(InferenceServerException) as raised:
        client.infer(MODEL, [text_input("word " * 1_200_000)], client_timeout=DEADLINE)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "text_input" in raised.value.message()


def test_calls_run_at_once_and_can_be_cancelled(client):
    answers = Answers()
    long = {"max_tokens": 4000, "ignore_eos": True}
    running = client.async_infer(
        MODEL, [text_input("Once")], answers, request_id="long", parameters=long, client_timeout=DEADLINE
    )
    client.async_infer(
        MODEL, [text_input(FOX["prompt"])], answers, request_id="short", parameters=GREEDY, client_timeout=DEADLINE
    )
    result, error = answers.next()
    assert error is None
    assert (result.get_response().id, text_of(result)) == ("short", FOX_TEXT)
    running.cancel()
    result, error = answers.next()
    assert result is None
    assert error.status() == "StatusCode.CANCELLED"
    assert text_of(client.infer(MODEL, [text_input(FOX["prompt"])], parameters=GREEDY)) == FOX_TEXT


def test_a_stream_carries_many_requests(client):
    answers = Answers()
    client.start_stream(answers, stream_timeout=DEADLINE)
    prompts = {"a": FOX, "b": FRENCH, "c": FOX, "d": FRENCH}
    for id, prompt in prompts.items():
        parameters = {**STREAMED, "max_tokens": 24, "ignore_eos": True}
        client.async_stream_infer(MODEL, [text_input(prompt["prompt"])], request_id=id, parameters=parameters)
    found, order = answers.until_final(prompts)
    client.stop_stream()
    for id, prompt in prompts.items():
        text = "".join(text_of(result) for result in found[id])
        assert text and prompt["greedy_text"].startswith(text[:20])
        assert [is_final(result.get_response()) for result in found[id]] == [False] * (len(found[id]) - 1) + [True]
        assert len(found[id]) > 3
    assert "".join(map(text_of, found["a"])) == "".join(map(text_of, found["c"]))
    assert "".join(map(text_of, found["b"])) == "".join(map(text_of, found["d"]))
    # Nobody waits for the request before: answers of one come between those of another.
    changes = sum(before != after for before, after in zip(order, order[1:]))
    assert changes > len(prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_can_be_told(client, stream):
    answers = Answers()
    client.start_stream(answers, stream_timeout=DEADLINE)
    client.async_stream_infer(
        MODEL,
        [text_input(FOX["prompt"])],
        request_id="e",
        parameters={**GREEDY, "stream": stream},
        enable_empty_final_response=True,
    )
    found, _ = answers.until_final(["e"])
    client.stop_stream()
    # After the one that says it is the last, the stream ended: nothing else came.
    assert answers.queue.empty()
    assert len(found["e"]) == (FOX_TOKENS if stream else 1)
    assert "".join(map(text_of, found["e"])) == FOX_TEXT


def test_a_fault_leaves_the_stream_open(client):
    answers = Answers()
    client.start_stream(answers, stream_timeout=DEADLINE)
    for model, parameters in ((MODEL, {"top_p": 2.0}), ("absent", {}), (MODEL, STREAMED)):
        client.async_stream_infer(model, [text_input(FOX["prompt"])], request_id="x", parameters=parameters)
    errors, texts = [], []
    while len(errors) < 2 or not texts or not is_final(texts[-1].get_response()):
        result, error = answers.next()
        (texts if error is None else errors).append(result if error is None else error.message())
    client.stop_stream()
    assert "".join(map(text_of, texts)) == FOX_TEXT
    assert any("top_p" in message for message in errors) and any("absent" in message for message in errors)


def test_a_stream_can_be_cancelled(client):
    answers = Answers()
    client.start_stream(answers, stream_timeout=DEADLINE)
    long = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    for id in ("1", "2"):
        client.async_stream_infer(MODEL, [text_input("Once")], request_id=id, parameters=long)
    result, error = answers.next()
    assert error is None and not is_final(result.get_response())
    client.stop_stream(cancel_requests=True)
    while error is None:
        result, error = answers.next()
    assert error.status() == "StatusCode.CANCELLED"
    assert text_of(client.infer(MODEL, [text_input(FOX["prompt"])], parameters=GREEDY)) == FOX_TEXT


def test_a_deadline_ends_a_call(client):
    long = {"max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(InferenceServerException) as raised:
        client.infer(MODEL, [text_input("Once")], parameters=long, client_timeout=0.5)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_statistics_count(client):
    def successes():
        (statistics,) = client.get_inference_statistics(MODEL, client_timeout=DEADLINE).model_stats
        assert (statistics.name, statistics.version) == (MODEL, "1")
        return statistics.inference_stats.success.count

    before = successes()
    client.infer(MODEL, [text_input(FOX["prompt"])], parameters=GREEDY, client_timeout=DEADLINE)
    assert successes() == before + 1


@pytest.mark.parametrize(
    ("model", "parameters", "code", "word"),
    [
        ("absent", {}, grpc.StatusCode.NOT_FOUND, "absent"),
        (MODEL, {"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (MODEL, {"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ],
)
def test_faults_have_their_status(client, model, parameters, code, word):
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [text_input("x")], parameters=parameters, client_timeout=DEADLINE)
    assert raised.value.status() == str(code)
    assert word in raised.value.message()


def test_what_a_text_model_has_not_is_unimplemented_by_name(client):
    for call, name in (
        (lambda: client.load_model(MODEL, client_timeout=DEADLINE), "RepositoryModelLoad"),
        (lambda: client.get_system_shared_memory_status(client_timeout=DEADLINE), "SystemSharedMemoryStatus"),
        (lambda: client.get_cuda_shared_memory_status(client_timeout=DEADLINE), "CudaSharedMemoryStatus"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            call()
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
        assert name in raised.value.message()
