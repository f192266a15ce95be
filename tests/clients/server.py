"""Where the server under test is: `tests/tests/clients.rs` starts it and says so."""

import os

# Base URL of its HTTP port, without a slash at the end.
HTTP = os.environ["BATON_HTTP"]

# `host:port` of its gRPC port.
GRPC = os.environ["BATON_GRPC"]

# The served model's public name.
MODEL = os.environ["BATON_MODEL"]

# Seconds that any call may take.
DEADLINE = 120
