"""OpenAI's client: models, and chats that are not streamed."""

import openai
import pytest

from golden import ANSWER, ANSWER_TOKENS, COMPLETION_TOKENS, FIRST_TOP, MESSAGES, PROMPT_TOKENS
from server import MODEL


def greedy(client, **arguments):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **arguments)


def test_models_are_listed_and_found(client):
    models = client.models.list()
    assert models.object == "list"
    (model,) = models.data
    assert (model.id, model.object) == (MODEL, "model")
    assert model.created > 1_700_000_000
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("meta-llama/Llama-3")
    assert (raised.value.code, raised.value.type) == ("model_not_found", "invalid_request_error")


def test_a_chat_is_answered_as_the_reference_does(client):
    answer = greedy(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    message = choice.message
    assert (message.role, message.content, message.refusal) == ("assistant", ANSWER, None)
    assert message.tool_calls is None
    usage = answer.usage
    assert usage.prompt_tokens == PROMPT_TOKENS
    assert usage.completion_tokens == COMPLETION_TOKENS
    assert usage.total_tokens == PROMPT_TOKENS + COMPLETION_TOKENS


def test_usage_tells_cached_tokens(client):
    greedy(client)
    # Whole blocks of 16 tokens are found again, and the last token is always computed.
    assert greedy(client).usage.prompt_tokens_details.cached_tokens == PROMPT_TOKENS // 16 * 16


def test_content_may_be_parts_and_roles_may_be_new(client):
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of Japan?"}]
    for role in ("system", "developer"):
        system = {"role": role, "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
        messages = [system, {"role": "user", "content": parts}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage.prompt_tokens == PROMPT_TOKENS


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_ends_the_answer(client, limit):
    answer = greedy(client, **{limit: 3})
    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", [" Tokyo", ["nothing", "n is To"]])
def test_a_stop_string_ends_the_answer_before_it(client, stop):
    choice = greedy(client, stop=stop).choices[0]
    expected = ANSWER[: ANSWER.index(stop if isinstance(stop, str) else stop[1])]
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")


def test_a_seed_decides(client):
    def ask(seed):
        arguments = {"temperature": 1, "seed": seed, "max_tokens": 8}
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **arguments)
        return answer.choices[0].message.content

    texts = [ask(seed) for seed in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_choices_are_counted_and_repeatable(client):
    def ask():
        arguments = {"temperature": 1, "seed": 5, "max_tokens": 6, "n": 3}
        return client.chat.completions.create(model=MODEL, messages=MESSAGES, **arguments)

    answer = ask()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.finish_reason in ("length", "stop") for choice in answer.choices)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in ask().choices]
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert 3 < answer.usage.completion_tokens <= 18
    same = greedy(client, n=2)
    assert [choice.message.content for choice in same.choices] == [ANSWER, ANSWER]
    assert same.usage.completion_tokens == 2 * COMPLETION_TOKENS


def test_log_probabilities_are_the_references(client):
    answer = greedy(client, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert [entry.token for entry in entries[:-1]] == ANSWER_TOKENS
    assert bytes(byte for entry in entries[:-1] for byte in entry.bytes).decode() == ANSWER
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True)
        assert (entry.top_logprobs[0].token, tops[0]) == (entry.token, entry.logprob)
    for top, (_, expected) in zip(entries[0].top_logprobs, FIRST_TOP):
        assert top.logprob == pytest.approx(expected, abs=0.1)
    alone = greedy(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in alone] == [[]] * len(entries)
    assert [entry.logprob for entry in alone] == [entry.logprob for entry in entries]


def test_a_bias_forbids_a_token(client):
    first = str(FIRST_TOP[0][0])
    answer = greedy(client, logit_bias={first: -100}, max_tokens=4, logprobs=True)
    assert answer.choices[0].logprobs.content[0].token != ANSWER_TOKENS[0]


def test_extras_of_vllm_are_understood(client):
    def ask(**extra):
        arguments = {"temperature": 1, "max_tokens": 12, "extra_body": extra}
        return client.chat.completions.create(model=MODEL, messages=MESSAGES, **arguments).choices[0]

    assert ask(top_k=1).message.content == ANSWER
    assert ask(min_p=1.0).message.content == ANSWER
    assert ask(top_k=1, ignore_eos=True).finish_reason == "length"
    assert ask(top_k=1, min_tokens=10, ignore_eos=False).message.content.startswith(ANSWER)
    stopped = ask(top_k=1, stop_token_ids=[19081])
    assert (stopped.message.content, stopped.finish_reason) == ("The capital of Japan is", "stop")
    included = ask(top_k=1, stop=" Tokyo", include_stop_str_in_output=True)
    assert included.message.content == "The capital of Japan is Tokyo"
    assert ask(guided_choice=["Osaka", "Kyoto"]).message.content in ("Osaka", "Kyoto")
    assert ask(structured_outputs={"regex": "[0-9]{3}"}).message.content.isdigit()


def test_what_a_text_model_cannot_honour_is_ignored(client):
    answer = greedy(
        client,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "x"},
        safety_identifier="s",
        prompt_cache_key="k",
        modalities=["text"],
    )
    assert answer.choices[0].message.content == ANSWER


def test_raw_responses_carry_headers(client):
    response = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_headers={"X-Request-Id": "named-by-me"}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "named-by-me"
    assert response.parse().choices[0].message.content == ANSWER
    drawn = client.models.with_raw_response.list().headers["x-request-id"]
    assert drawn and drawn != "named-by-me"
