"""Clients that prove who they are, over TLS: curl as vLLM's page of MindIE's documents prints it, and others."""

import json
import os
import pathlib
import ssl
import subprocess

import grpc
import httpx2
import openai
import pytest
import requests

from golden import ANSWER, MESSAGES
from server import DEADLINE, GRPC, HTTP, MODEL

FOLDER = pathlib.Path(os.environ["BATON_CERTIFICATES"])
CA = str(FOLDER / "ca.pem")
CERT = str(FOLDER / "client.pem")
KEY = str(FOLDER / "client.key.pem")
PRINTED = pathlib.Path(__file__).parent / "printed/vllm_curl.sh"


def test_curl_as_printed():
    command = PRINTED.read_text()
    for theirs, ours in (
        ("/home/runs/static_conf/ca/ca.pem", CA),
        ("/home/runs/static_conf/cert/client.pem", CERT),
        ("/home/runs/static_conf/cert/client.key.pem", KEY),
        ("https://{ip}:{port}", HTTP),
    ):
        assert theirs in command
        command = command.replace(theirs, ours)
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=DEADLINE, check=True)
    parts = done.stdout.split(b"\0")
    assert parts.pop() == b""
    events = [json.loads(part) for part in parts]
    assert 1 <= len(events) <= 16
    assert all(list(event) == ["text"] and len(event["text"]) == 1 for event in events)


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_curl_speaks_both_versions(version):
    command = ["curl", "--silent", version, "--cacert", CA, "--cert", CERT, "--key", KEY]
    command += ["--max-time", str(DEADLINE), "-o", "/dev/null", "-w", "%{http_code} %{http_version}"]
    done = subprocess.run([*command, f"{HTTP}/health"], capture_output=True, text=True, timeout=2 * DEADLINE)
    assert done.stdout == {"--http1.1": "200 1.1", "--http2": "200 2"}[version]


STRANGER = ["--cert", str(FOLDER / "stranger.pem"), "--key", str(FOLDER / "stranger.key.pem")]


@pytest.mark.parametrize("proof", [[], STRANGER])
def test_who_does_not_prove_it_is_not_served(proof):
    command = ["curl", "--silent", "--cacert", CA, *proof, "--max-time", str(DEADLINE), f"{HTTP}/health"]
    done = subprocess.run(command, capture_output=True, timeout=2 * DEADLINE)
    # The handshake (35), or the first write (55) or read (56) after it, was ended by the other side.
    assert done.returncode in (35, 55, 56), done.returncode
    assert done.stdout == b""


def test_the_server_proves_itself():
    done = subprocess.run(["curl", "--silent", "--cert", CERT, "--key", KEY, f"{HTTP}/health"], timeout=DEADLINE)
    # 60: the server's certificate is of nobody whom curl knows.
    assert done.returncode == 60


def test_openai():
    context = ssl.create_default_context(cafile=CA)
    context.load_cert_chain(CERT, KEY)
    with openai.OpenAI(
        base_url=f"{HTTP}/v1",
        api_key="none",
        max_retries=0,
        timeout=DEADLINE,
        http_client=httpx2.Client(verify=context),
    ) as client:
        arguments = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
        assert client.chat.completions.create(**arguments).choices[0].message.content == ANSWER
        stream = client.chat.completions.create(stream=True, **arguments)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_requests():
    body = {"text_input": "x", "parameters": {"max_new_tokens": 2}}
    url = f"{HTTP}/v2/models/{MODEL}/generate"
    answer = requests.post(url, json=body, verify=CA, cert=(CERT, KEY), timeout=DEADLINE)
    assert answer.status_code == 200
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.post(url, json=body, verify=CA, timeout=DEADLINE)


def channel(proof):
    read = lambda path: pathlib.Path(path).read_bytes()
    key, cert = (read(KEY), read(CERT)) if proof else (None, None)
    return grpc.secure_channel(GRPC, grpc.ssl_channel_credentials(read(CA), key, cert))


def test_grpc():
    with channel(proof=True) as proved:
        # ServerLiveResponse { live: true }
        assert proved.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=DEADLINE) == b"\x08\x01"
    with channel(proof=False) as unproved, pytest.raises(grpc.RpcError) as raised:
        unproved.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=DEADLINE)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
