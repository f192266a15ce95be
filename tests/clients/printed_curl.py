"""curl: the request bodies that MindIE's documents print, sent as they are."""

import json
import pathlib
import subprocess

import pytest

from server import DEADLINE, HTTP, MODEL

PRINTED = pathlib.Path(__file__).parent / "printed"
PROMPT = "My name is Olivier and I"
# Of an event, in the order printed; `finish_reason` is in the last alone, before the others.
EVENT = ["id", "model_name", "model_version", "text_output", "details", "prefill_time", "decode_time"]
DETAILS = ["generated_tokens", "first_token_cost", "decode_cost", "batch_size", "queue_wait_time"]


def curl(path, body):
    """Posts a printed body; gives status, content type and what came."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", str(DEADLINE)]
    command += ["-H", "Accept: application/json", "-H", "Content-type: application/json", "-X", "POST"]
    command += ["-d", (PRINTED / body).read_text(), f"{HTTP}{path}"]
    command += ["-w", "\n%{http_code} %{content_type}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, check=True)
    came, _, last = done.stdout.rpartition("\n")
    status, _, content_type = last.partition(" ")
    return int(status), content_type, came


def test_triton_streams_text():
    status, content_type, came = curl(f"/v2/models/{MODEL}/generate_stream", "triton_text.json")
    assert status == 200
    assert content_type.startswith("text/event-stream")
    parts = came.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data:{") for part in parts)
    events = [json.loads(part.removeprefix("data:")) for part in parts]
    assert 1 <= len(events) <= 5
    for index, event in enumerate(events):
        last = index + 1 == len(events)
        assert list(event) == EVENT
        assert (event["id"], event["model_name"], event["model_version"]) == ("a123", MODEL, None)
        assert isinstance(event["text_output"], str)
        details = event["details"]
        assert list(details) == (["finish_reason"] if last else []) + DETAILS
        assert details["generated_tokens"] == index + 1
        assert details["first_token_cost"] is None and details["decode_cost"] is None
        assert details["batch_size"] >= 1
        assert isinstance(details["queue_wait_time"], int) and details["queue_wait_time"] >= 0
        (first, later) = (event["prefill_time"], event["decode_time"])
        assert (first if index == 0 else later) >= 0
        assert (later if index == 0 else first) is None
    expected = "length" if len(events) == 5 else "eos_token"
    assert events[-1]["details"]["finish_reason"] == expected


def test_a_seed_makes_triton_repeat_itself():
    def texts():
        _, _, came = curl(f"/v2/models/{MODEL}/generate_stream", "triton_text.json")
        return [json.loads(part.removeprefix("data:"))["text_output"] for part in came.split("\n\n") if part]

    assert texts() == texts()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (f"/v2/models/{MODEL}/generate_stream", "triton_picture.json", "text_input[1]"),
        (f"/v2/models/{MODEL}/generate", "triton_picture.json", "text_input[1]"),
        ("/generate", "vllm_picture.json", "prompt[1]"),
    ],
)
def test_a_picture_is_named_and_refused(path, body, field):
    status, content_type, came = curl(path, body)
    assert (status, content_type) == (422, "application/json")
    fault = json.loads(came)
    assert list(fault) == ["error", "error_type"]
    assert fault["error_type"] == "Input Validation Error"
    assert fault["error"].startswith(field)
    assert "image_url" in fault["error"] and "text only" in fault["error"]


def test_vllm_answers_whole():
    status, content_type, came = curl("/generate", "vllm_text.json")
    assert (status, content_type) == (200, "application/json")
    answer = json.loads(came)
    assert list(answer) == ["text"]
    assert len(answer["text"]) == 2
    assert all(text.startswith(f"{PROMPT} ") for text in answer["text"])


def test_vllm_streams_objects_that_end_with_nul():
    status, content_type, came = curl("/generate", "vllm_stream.json")
    assert status == 200
    assert content_type.startswith("text/event-stream")
    parts = came.split("\0")
    assert parts.pop() == ""
    events = [json.loads(part) for part in parts]
    assert 1 <= len(events) <= 40
    assert all(list(event) == ["text"] and len(event["text"]) == 2 for event in events)
    texts = ["".join(event["text"][index] for event in events) for index in (0, 1)]
    assert all(texts) and not any(PROMPT in text for text in texts)
