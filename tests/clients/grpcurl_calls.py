"""grpcurl: lists, describes and calls by reflection alone."""

import json
import pathlib
import subprocess
import sys

from golden import FOX, FOX_TEXT, FOX_TOKENS
from server import DEADLINE, GRPC, MODEL

GRPCURL = pathlib.Path(sys.executable).parent / "grpcurl"
NATIVE = "baton.v1.GenerationService"
KSERVE = "inference.GRPCInferenceService"


def grpcurl(*arguments, request=None, fails=False):
    """What it prints; with `fails`, what it says of its failure."""
    request = [] if request is None else ["-d", json.dumps(request)]
    command = [GRPCURL, "-plaintext", "-max-time", str(DEADLINE), *request, GRPC, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def values(text):
    """JSON values that stand one after the other."""
    decoder = json.JSONDecoder()
    found = []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def test_services_are_listed():
    listed = grpcurl("list").split()
    assert {NATIVE, KSERVE, "grpc.health.v1.Health"} <= set(listed)
    assert not {"baton.v1.Router", "baton.v1.Prefill", "baton.v1.Decode"} & set(listed)


def test_methods_and_messages_are_described():
    assert set(grpcurl("list", NATIVE).split()) >= {f"{NATIVE}.Generate", f"{NATIVE}.ListServedModels"}
    described = grpcurl("describe", "baton.v1.GenerateRequest")
    assert "message GenerateRequest {" in described
    assert "repeated string stop" in described
    assert "rpc ModelStreamInfer" in grpcurl("describe", KSERVE)


def test_a_text_is_continued():
    answer = values(grpcurl(f"{NATIVE}/Generate", request={"text": FOX["prompt"], "maxTokens": FOX_TOKENS}))
    assert "".join(item.get("text", "") for item in answer) == FOX_TEXT
    assert answer[-1]["finish"] == "FINISH_REASON_LENGTH"


def test_an_empty_request_and_health():
    assert values(grpcurl(f"{NATIVE}/ListServedModels")) == [{"models": [MODEL]}]
    assert values(grpcurl("grpc.health.v1.Health/Check")) == [{"status": "SERVING"}]
    assert values(grpcurl(f"{KSERVE}/ServerReady")) == [{"ready": True}]


def test_a_fault_has_code_and_message():
    said = grpcurl(f"{NATIVE}/Generate", request={"text": "x", "model": "absent"}, fails=True)
    assert "Code: NotFound" in said and "absent" in said
