"""Grammars: hold answers to a JSON schema or to a call of a tool, as logits processors."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.generation.decoding import end_tokens, vocabulary_size
from penstock.generation.sampling import LogitsProcessor
from penstock.models.loader import LoadedModel
from penstock.server.answer_format import CALL_CLOSE, CALL_OPEN
from penstock.server.errors import ApiError, refused

_OPTIONS = {"whitespace_flexible": False}
"""A model that has learnt little would write blanks to the end."""


class Grammars:
    """Makes processors for one model's tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Remember the model; its vocabulary is read when it is first needed."""
        self._loaded, self._lock = loaded, threading.Lock()
        self._tokenizer: Any = None

    def of_schema(self, schema: Any, param: str = "response_format") -> LogitsProcessor:
        """Answers are JSON of a schema.

        Raises:
            ApiError: the schema cannot be held to; or llguidance is not installed.
        """
        matcher = _library().LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise refused(f"the JSON schema cannot be used: {error}", param) from error
        return self._of(grammar, param)

    def of_calls(self, tools: Sequence[Mapping[str, Any]]) -> LogitsProcessor:
        """Answers are one call of one of these tools.

        Raises:
            ApiError: the schema of a tool cannot be held to; or llguidance is not installed.
        """
        choices = [
            {
                "type": "object", "additionalProperties": False, "required": ["name", "arguments"],
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
            }
            for tool in tools
        ]  # fmt: skip
        schema = {"anyOf": choices, "x-guidance": _OPTIONS}
        marks = json.dumps(f"{CALL_OPEN}\n"), json.dumps(f"\n{CALL_CLOSE}")
        lark = f"start: {marks[0]} call {marks[1]}\ncall: %json {json.dumps(schema)}\n"
        return self._of(_library().LLMatcher.grammar_from_lark(lark), "tools")

    def _of(self, grammar: str, param: str) -> LogitsProcessor:
        matcher = _library().LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            said = str(matcher.get_error()).splitlines()[0]
            raise refused(f"the JSON schema cannot be used: {said}", param)
        return _Held(matcher)

    def _tokens(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                _library()
                from llguidance.hf import from_tokenizer

                model, tokenizer = self._loaded.model, self._loaded.tokenizer
                try:
                    self._tokenizer = from_tokenizer(
                        tokenizer, n_vocab=vocabulary_size(model),
                        eos_token=sorted(end_tokens(model, tokenizer).all),
                    )  # fmt: skip
                except Exception as error:  # whatever a tokenizer of another kind raises
                    raise ApiError(
                        501, "answers of this model's tokenizer cannot be held to a grammar"
                    ) from error
        return self._tokenizer


class _Held:
    """Leaves the tokens that a grammar allows; keeps its state by the tokens of the answer."""

    def __init__(self, matcher: Any) -> None:
        self._states: dict[tuple[int, ...], Any] = {(): matcher}

    def __call__(self, answer_ids: Sequence[int], logits: Tensor) -> Tensor:
        allowed = np.frombuffer(self._state(tuple(answer_ids)).compute_logit_bias(), np.uint8) > 0
        kept = torch.zeros(len(logits), dtype=torch.bool)
        count = min(len(kept), len(allowed))
        kept[:count] = torch.from_numpy(allowed[:count])
        return logits.masked_fill(~kept.to(logits.device), float("-inf"))

    def _state(self, answer: tuple[int, ...]) -> Any:
        if answer not in self._states:
            # Several answers of one request share the beginning; each goes on with a copy.
            self._states = {
                each: state for each, state in self._states.items() if len(each) >= len(answer) - 1
            }
            state = self._states[answer[:-1]].deep_copy()
            state.consume_token(answer[-1])
            self._states[answer] = state
        return self._states[answer]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ApiError(
            501, "answers of a given form need llguidance: pip install 'penstock[server]'"
        ) from error
    return llguidance
