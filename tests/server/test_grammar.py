"""Grammars: what an answer may be, whether the marks are tokens or letters."""

from typing import Any

import pytest
import torch

from penstock.models.loader import LoadedModel
from penstock.server.answer_format import AnswerFormat, Thoughts
from penstock.server.grammar import Grammars
from penstock.testing.tiny_chat import tiny_chat_model

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"$ref": "#/$defs/small"}}, "$defs": {"small": {"type": "integer"}},
}  # fmt: skip
NAMES = ("g", "f")
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
ANSWER = '{"a":1}'
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
THOUGHT = "<think>\nwhy {\n</think>\n\n"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="module", params=["letters", "tokens"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    made = tiny_chat_model()
    if request.param == "tokens":
        tokenizer: Any = made.tokenizer
        tokenizer.add_tokens(MARKS)
        made.model.resize_token_embeddings(len(tokenizer))
    return made


def is_whole(loaded: LoadedModel, held: Any, text: str) -> bool:
    """Whether a text is an answer, token by token to its end."""
    tokenizer: Any = loaded.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    logits = torch.zeros(len(tokenizer))
    return all(bool(held(ids[:i], logits)[ids[i]].isfinite()) for i in range(len(ids)))


@pytest.mark.parametrize(
    ("schema", "tools", "thoughts", "right", "wrong"),
    [
        (SCHEMA, [], "none", [ANSWER], [CALL, THOUGHT + ANSWER]),
        (None, TOOLS, "none", [CALL], [ANSWER, CALL + CALL]),
        (SCHEMA, TOOLS, "none", [ANSWER, CALL], ["so", '{"a":"1"}', ANSWER + CALL]),
        (SCHEMA, TOOLS, "may", [ANSWER, CALL, THOUGHT + ANSWER, THOUGHT + CALL],
         [THOUGHT, THOUGHT + "so", THOUGHT + THOUGHT + ANSWER]),
        (SCHEMA, TOOLS, "begun", ["why?</think>" + CALL, "</think>" + ANSWER], [ANSWER, CALL]),
    ],
)  # fmt: skip
def test_an_answer_is_of_a_form(
    loaded: LoadedModel, schema: Any, tools: list[Any], thoughts: Thoughts, right: list[str],
    wrong: list[str],
) -> None:  # fmt: skip
    grammars = Grammars(loaded)
    for text in (*right, *wrong):
        held = grammars.of(schema=schema, tools=tools, thoughts=thoughts)
        assert is_whole(loaded, held, text) == (text in right), text


def test_a_prompt_says_where_thoughts_are() -> None:
    made = AnswerFormat(style="json", is_own=False, thinks=True, tokenizer=None)
    prompts = ("assistant\n", "<think>\n", "<think>\n\n</think>\n\n")
    assert [made.thoughts(each) for each in prompts] == ["may", "begun", "none"]
