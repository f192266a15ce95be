"""Prompts whose greedy continuation, tokens and log-probabilities a float32 reference has told.

Cases are those of `engine/testdata/smollm2-visible.json` in which the reference is sure of every token used here: the
best is ahead of the second best by more than any rounding.
"""

import json
import pathlib

_FILE = pathlib.Path(__file__).parents[2] / "engine/testdata/smollm2-visible.json"
_CASES = {case["prompt"]: case for case in json.loads(_FILE.read_text())["cases"]}


def case(start):
    """The one case whose prompt contains this text."""
    (found,) = [case for prompt, case in _CASES.items() if start in prompt]
    return found


# A chat of one question. The answer ends with the model's end-of-sequence token, which counts as generated.
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
ANSWER_TOKENS = ["The", " capital", " of", " Japan", " is", " Tokyo", "."]
_question = case(QUESTION)
MESSAGES = [{"role": "user", "content": QUESTION}]
PROMPT_TOKENS = len(_question["prompt_ids"])
COMPLETION_TOKENS = len(ANSWER_TOKENS) + 1
# Ids and log-probabilities of the likeliest first tokens, falling.
FIRST_TOP = _question["last_top20"]
assert _question["greedy_text"].startswith(ANSWER)

# A text that repeats itself, for plain completion.
FOX = case("quick brown fox")
FOX_TEXT = "\nThe quick brown fox jumps over the lazy dog."
FOX_TOKENS = 11
assert FOX["greedy_text"].startswith(FOX_TEXT)
assert min(FOX["greedy_gap"][:FOX_TOKENS]) > 0.7
