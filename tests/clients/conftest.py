"""What the scripts share: clients of the server under test."""

import openai
import pytest

from server import DEADLINE, HTTP


@pytest.fixture(scope="module")
def client():
    """OpenAI's client, which here never repeats a call by itself."""
    with openai.OpenAI(base_url=f"{HTTP}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client
