"""A client that knows nothing but the address: services, methods and messages come by reflection."""

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from golden import FOX, FOX_TEXT, FOX_TOKENS
from server import DEADLINE, GRPC, MODEL

NATIVE = "baton.v1.GenerationService"
SERVED = {NATIVE, "grpc.health.v1.Health", "inference.GRPCInferenceService"}


class Reflected:
    """Methods found by name on a channel."""

    def __init__(self, channel):
        self.channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = DescriptorPool(self.database)

    def call(self, service, method, request):
        """Calls with a request of JSON's types; gives what comes back, in the same."""
        found = self.pool.FindServiceByName(service).FindMethodByName(method)
        message = json_format.ParseDict(request, GetMessageClass(found.input_type)())
        make = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        answer_type = GetMessageClass(found.output_type)
        call = make(
            f"/{service}/{method}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=answer_type.FromString,
        )
        answer = call(message, timeout=DEADLINE)
        as_dict = lambda item: json_format.MessageToDict(item, preserving_proto_field_name=True)
        return [as_dict(item) for item in answer] if found.server_streaming else as_dict(answer)


@pytest.fixture(scope="module")
def reflected():
    with grpc.insecure_channel(GRPC) as channel:
        yield Reflected(channel)


def test_exactly_what_is_served_is_listed(reflected):
    listed = set(reflected.database.get_services())
    assert {name for name in listed if not name.startswith("grpc.reflection.")} == SERVED


def test_every_message_of_every_service_is_found(reflected):
    for name in SERVED:
        for method in reflected.pool.FindServiceByName(name).methods:
            for message in (method.input_type, method.output_type):
                assert GetMessageClass(message)().SerializeToString() == b""


def test_a_text_is_continued(reflected):
    request = {"text": FOX["prompt"], "max_tokens": FOX_TOKENS}
    answer = reflected.call(NATIVE, "Generate", request)
    assert "".join(item.get("text", "") for item in answer) == FOX_TEXT
    tokens = [token for item in answer for token in item["tokens"]]
    assert [token["id"] for token in tokens] == FOX["greedy_ids"][:FOX_TOKENS]
    assert [token.get("index", "0") for token in tokens] == [str(index) for index in range(FOX_TOKENS)]
    assert tokens[0]["logprob"] == pytest.approx(FOX["last_top20"][0][1], abs=0.1)
    last = answer[-1]
    assert (last["finish"], last["generated_tokens"]) == ("FINISH_REASON_LENGTH", str(FOX_TOKENS))
    assert last["prompt_tokens"] == str(len(FOX["prompt_ids"]))
    assert all("finish" not in item for item in answer[:-1])
    assert {item["model"] for item in answer} == {MODEL}


def test_token_ids_are_continued_by_the_same(reflected):
    request = {"token_ids": {"ids": FOX["prompt_ids"]}, "max_tokens": FOX_TOKENS, "id": "mine"}
    answer = reflected.call(NATIVE, "Generate", request)
    assert "".join(item.get("text", "") for item in answer) == FOX_TEXT
    assert {item["id"] for item in answer} == {"mine"}


def test_models_and_health(reflected):
    assert reflected.call(NATIVE, "ListServedModels", {}) == {"models": [MODEL]}
    for service in ("", NATIVE):
        assert reflected.call("grpc.health.v1.Health", "Check", {"service": service}) == {"status": "SERVING"}
    with pytest.raises(grpc.RpcError) as raised:
        reflected.call("grpc.health.v1.Health", "Check", {"service": "absent"})
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "code", "word"),
    [
        ({"text": "x", "model": "absent"}, grpc.StatusCode.NOT_FOUND, "absent"),
        ({"text": "", "max_tokens": 1}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"text": "x", "max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"text": "x", "sampling": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"text": "x", "id": "no spaces"}, grpc.StatusCode.INVALID_ARGUMENT, "id"),
    ],
)
def test_a_fault_has_a_status_and_names_its_field(reflected, request_, code, word):
    with pytest.raises(grpc.RpcError) as raised:
        reflected.call(NATIVE, "Generate", request_)
    assert raised.value.code() == code
    assert word in raised.value.details()


def test_a_method_that_is_not_there_is_unimplemented(reflected):
    call = reflected.channel.unary_unary(f"/{NATIVE}/Absent")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=DEADLINE)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_ends_the_call(reflected):
    found = reflected.pool.FindServiceByName(NATIVE).FindMethodByName("Generate")
    message = GetMessageClass(found.input_type)(text="Once", max_tokens=4000, ignore_eos=True)
    call = reflected.channel.unary_stream(f"/{NATIVE}/Generate", lambda sent: sent.SerializeToString())
    with pytest.raises(grpc.RpcError) as raised:
        list(call(message, timeout=0.5))
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
