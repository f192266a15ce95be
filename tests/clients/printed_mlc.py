"""The programs that MLC-LLM's documents print, run as they are against a server with `--dialect mlc`.

Only the server's address is put in the place of theirs; the model's path stays, as any name is taken.
"""

import ast
import pathlib
import subprocess
import sys

import pytest
import requests

from server import DEADLINE, HTTP

PRINTED = pathlib.Path(__file__).parent / "printed"
TOOL = "get_current_weather"


def printed_by(program):
    source = (PRINTED / program).read_text()
    for theirs in ("http://127.0.0.1:8080", "http://127.0.0.1:8000"):
        source = source.replace(theirs, HTTP)
    assert HTTP in source
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models():
    heading, models = printed_by("mlc_models.py").splitlines()
    assert heading == "Response:"
    models = ast.literal_eval(models)
    assert models["object"] == "list"
    assert [model["object"] for model in models["data"]] == ["model"]


def test_a_chat():
    text = printed_by("mlc_chat.py")
    assert text.endswith("\n\n") and text.strip()
    assert not text.startswith("None")


def test_a_streamed_chat():
    text = printed_by("mlc_stream.py")
    assert text.endswith("\n\n") and text.strip()
    assert "None" not in text


def test_a_tool_is_called():
    function = ast.literal_eval(printed_by("mlc_tools.py").strip())
    assert list(function) == ["name", "arguments"]
    assert function["name"] == TOOL
    # A model this small may ramble until it is cut; what then came is the beginning of an object, as text.
    if isinstance(function["arguments"], str):
        assert function["arguments"].startswith('{"location": "')
    else:
        check(function["arguments"])


def check(arguments):
    assert isinstance(arguments["location"], str)
    assert set(arguments) <= {"location", "unit"}
    assert arguments.get("unit", "celsius") in ("celsius", "fahrenheit")


def test_arguments_are_an_object():
    source = (PRINTED / "mlc_tools.py").read_text()
    printed = {}
    exec(source[: source.index("r = requests.post")], printed)
    body = {**printed["payload"], "temperature": 0}
    answer = requests.post(f"{HTTP}/v1/chat/completions", json=body, timeout=DEADLINE).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == TOOL
    check(call["function"]["arguments"])


def test_streamed_calls_are_text():
    text = printed_by("mlc_tools_stream.py")
    assert TOOL in text and "location" in text
    assert "None" not in text


@pytest.mark.parametrize("program", sorted(path.name for path in PRINTED.glob("*.py")))
def test_every_program_is_run(program):
    tests = pathlib.Path(__file__).read_text()
    assert f'printed_by("{program}")' in tests
