"""Grammars: hold answers to JSON schemas and calls of tools, as logits processors."""

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
from penstock.server.answer_format import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    Thoughts,
)
from penstock.server.errors import ApiError, refused

_OPTIONS = {"whitespace_flexible": False}
"""A model that has learnt little would write blanks to the end."""


class Grammars:
    """Makes processors for one model's tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Remember the model; its vocabulary is read when it is first needed."""
        self._loaded, self._lock = loaded, threading.Lock()
        self._tokenizer: Any = None

    def of(
        self, *, schema: Any = None, tools: Sequence[Mapping[str, Any]] = (),
        thoughts: Thoughts = "none",
    ) -> LogitsProcessor:  # fmt: skip
        """Answers are JSON of a schema, or one call of one of the tools, behind free thoughts.

        Args:
            schema: None: an answer is a call.
            tools: none: an answer is JSON.
            thoughts: as `AnswerFormat.thoughts` has them.

        Raises:
            ApiError: a schema cannot be held to; or llguidance is not installed.
        """
        forms, rules = [], []
        if tools:
            forms.append("call")
            names = " | ".join(f"call_{i}" for i in range(len(tools)))
            opening, closing = self._mark(CALL_OPEN), self._mark(CALL_CLOSE)
            rules.append(f'call: {opening} "\\n" ({names}) "\\n" {closing}')
            for i, tool in enumerate(tools):  # each a schema by itself, which may refer to its root
                function = tool["function"]
                head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
                rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
                arguments = function.get("parameters") or {"type": "object"}
                rules.append(f"arguments_{i}: {_json(arguments)}")
        if schema is not None:
            forms.append("answer")
            rules.append(f"answer: {_json(schema)}")
        if thoughts != "none":
            closing, text = self._mark(THINK_CLOSE), "/(?s:.*)/"
            is_token = closing == THINK_CLOSE
            rules += [
                f"thoughts: {'' if thoughts == 'begun' else self._mark(THINK_OPEN)} inner blank",
                f"inner: {text} {closing}" if is_token else f"inner[suffix={closing}]: {text}",
                "blank: /\\n{0,2}/",
            ]
        before = {"none": "", "begun": "thoughts ", "may": "thoughts? "}[thoughts]
        lark = "\n".join([f"start: {before}({' | '.join(forms)})", *rules, ""])
        grammar = _library().LLMatcher.grammar_from_lark(lark)
        return self._of(grammar, "tools" if schema is None else "response_format")

    def _mark(self, text: str) -> str:
        """A mark in a grammar: its own token where the tokenizer has one, else its letters."""
        tokenizer: Any = self._loaded.tokenizer
        return text if text in tokenizer.get_added_vocab() else json.dumps(text)

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


def _json(schema: Any) -> str:
    """A schema in a grammar."""
    whole = schema if isinstance(schema, Mapping) else {"allOf": [schema]}
    return f"%json {json.dumps({**whole, 'x-guidance': _OPTIONS})}"


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
