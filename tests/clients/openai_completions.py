"""OpenAI's client: raw completions."""

import openai
import pytest

from golden import FOX, FOX_TEXT, FOX_TOKENS
from server import MODEL

PROMPT = FOX["prompt"]
PROMPT_IDS = FOX["prompt_ids"]


def complete(client, prompt=PROMPT, **arguments):
    arguments = {"temperature": 0, "max_tokens": FOX_TOKENS, **arguments}
    return client.completions.create(model=MODEL, prompt=prompt, **arguments)


def test_a_completion_is_the_references(client):
    answer = complete(client)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, FOX_TEXT, "length")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT_IDS), FOX_TOKENS)
    assert usage.total_tokens == len(PROMPT_IDS) + FOX_TOKENS


def test_token_prompts_are_taken_as_they_are(client):
    answer = complete(client, PROMPT_IDS)
    assert answer.choices[0].text == FOX_TEXT
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)


@pytest.mark.parametrize("prompts", [[PROMPT, "A B C D"], [PROMPT_IDS, PROMPT_IDS[:5]]])
def test_prompts_times_n_are_numbered_prompt_by_prompt(client, prompts):
    answer = complete(client, prompts, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    assert FOX_TEXT.startswith(texts[0])
    alone = [complete(client, prompt, max_tokens=4) for prompt in prompts]
    assert texts[::2] == [answer.choices[0].text for answer in alone]
    assert answer.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert answer.usage.completion_tokens == 16


def test_sixteen_tokens_by_default(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_echo_and_suffix_stand_around_the_text(client):
    assert complete(client, echo=True).choices[0].text == PROMPT + FOX_TEXT
    assert complete(client, suffix=" END").choices[0].text == FOX_TEXT + " END"


def test_log_probabilities(client):
    logprobs = complete(client, logprobs=3).choices[0].logprobs
    assert "".join(logprobs.tokens) == FOX_TEXT
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == FOX_TOKENS
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert len(top) == 3 and max(top.values()) == top[token] == logprob
    expected = FOX["last_top20"]
    assert logprobs.token_logprobs[0] == pytest.approx(expected[0][1], abs=0.1)
    starts = [len("".join(logprobs.tokens[:index])) for index in range(FOX_TOKENS)]
    assert logprobs.text_offset == starts


def test_a_prompt_is_scored(client):
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert answer.usage.completion_tokens == 0
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == PROMPT
    assert len(logprobs.token_logprobs) == len(PROMPT_IDS)
    assert logprobs.token_logprobs[0] is None
    mean = -sum(logprobs.token_logprobs[1:]) / (len(PROMPT_IDS) - 1)
    assert mean == pytest.approx(FOX["mean_nll"], abs=0.05)


def test_best_of_keeps_the_likeliest(client):
    def ask(**arguments):
        return complete(client, "Once upon a time", temperature=1, seed=9, max_tokens=5, **arguments)

    def likelihood(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    all_four = ask(n=4, best_of=4, logprobs=0)
    best = ask(n=1, best_of=4, logprobs=0)
    assert len(best.choices) == 1
    expected = max(all_four.choices, key=likelihood)
    assert best.choices[0].text == expected.text
    assert best.usage.completion_tokens == all_four.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as raised:
        ask(n=3, best_of=2)
    assert raised.value.param == "best_of"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_whole_in_pieces(client, echo):
    arguments = {"echo": echo, "logprobs": 1, "suffix": " END"}
    whole = complete(client, **arguments)
    stream = list(complete(client, stream=True, stream_options={"include_usage": True}, **arguments))
    assert len({chunk.id for chunk in stream}) == 1
    assert stream[-1].choices == []
    assert stream[-1].usage == whole.usage
    choices = [choice for chunk in stream[:-1] for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    pieces = [choice.logprobs for choice in choices if choice.logprobs]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for piece in pieces for item in getattr(piece, field)]
        assert joined == getattr(whole.choices[0].logprobs, field), field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("param", "arguments"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [1, 2, 10_000_000]}),
        ("max_tokens", {"max_tokens": -1}),
        ("logprobs", {"logprobs": 6}),
        ("best_of", {"best_of": 21}),
        ("n", {"n": 129}),
    ],
)
def test_a_faulty_field_is_a_bad_request(client, param, arguments, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, stream=stream, **arguments)
    assert raised.value.param.startswith(param)


def test_guided_text(client):
    for extra in ({"guided_regex": "[a-c]{5}"}, {"structured_outputs": {"regex": "[a-c]{5}"}}):
        text = complete(client, temperature=1, extra_body=extra).choices[0].text
        assert len(text) == 5 and set(text) <= set("abc")
