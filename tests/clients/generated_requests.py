"""schemathesis: requests generated from the server's own description, valid and invalid, all answered as it says."""

import json
import pathlib
import subprocess
import sys

import requests

from server import DEADLINE, HTTP

# What must hold of every answer: no 5xx, and status, type, headers and body as described; a method that is not
# described is refused with the list of those that are.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
]

# Requests that must be generated at least, and examples of each operation that bring that many.
REQUESTS_MIN = 2000
EXAMPLES = 200


def test_every_generated_request_is_answered_as_described(tmp_path):
    described = requests.get(f"{HTTP}/openapi.json", timeout=DEADLINE).json()
    assert described["openapi"].startswith("3.")
    operations = sum(len(methods) for methods in described["paths"].values())
    command = [
        pathlib.Path(sys.executable).parent / "python",
        *["-m", "schemathesis.cli", "run", f"{HTTP}/openapi.json"],
        *["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--mode", "all"],
        *["--max-examples", str(EXAMPLES), "--seed", "1", "--generation-deterministic", "--continue-on-failure", "--no-shrink"],
        *["--request-timeout", str(DEADLINE), "--workers", "2", "--warnings", "off", "--no-color"],
        *["--report", "json", "--report-json-path", "report.json"],
    ]
    # The reports' folder and the database of examples are left behind in a folder of their own.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    report = json.loads((tmp_path / "report.json").read_text())
    print(report["test_cases"])
    assert report["complete"] and not report["failures"] and not report["errors"]
    assert report["operations"]["tested"] == operations
    assert report["test_cases"]["generated"] >= REQUESTS_MIN
