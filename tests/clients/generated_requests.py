"""schemathesis: requests generated from the server's own description, valid and invalid, all answered as it says."""

import json
import subprocess
import sys

import requests

from server import DEADLINE, HTTP

# What must hold of every answer: no 5xx; status, type, headers and body as described; what the description rules out
# is refused, and so is a method that it does not name, with the list of those that it does.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
]

# Requests that must be generated at least, and the most examples of each operation besides those that cover its
# description.
REQUESTS_MIN = 2000
EXAMPLES = 100

GENERATING = [
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v2/models/{model}/generate",
    "/v2/models/{model}/generate_stream",
]


def test_every_generated_request_is_answered_as_described(tmp_path):
    described = requests.get(f"{HTTP}/openapi.json", timeout=DEADLINE).json()
    operations = sum(len(methods) for methods in described["paths"].values())
    command = [
        *[sys.executable, "-m", "schemathesis.cli", "run", f"{HTTP}/openapi.json"],
        *["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--mode", "all"],
        *["--max-examples", str(EXAMPLES), "--generation-deterministic"],
        *["--continue-on-failure", "--no-shrink", "--request-timeout", str(DEADLINE), "--workers", "1"],
        *["--warnings", "off", "--no-color", "--report", "json", "--report-json-path", "report.json"],
    ]
    # What it leaves behind lies in a folder of its own.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] and report["failures"] == report["errors"] == []
    assert report["operations"]["tested"] == operations
    generated = report["test_cases"]["generated"]
    print(f"{generated} requests of {operations} operations")
    assert generated >= REQUESTS_MIN
    # Not only refusals: every route that generates has answered some of them.
    for route in GENERATING:
        phases = report["valid_rates"][f"POST {route}"].values()
        assert sum(phase["accepted"] for phase in phases) > 10, route
